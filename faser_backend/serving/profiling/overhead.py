"""Measures what a step costs around its model calls, by running the real engine on random prompts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from faser_backend.config import EngineConfig
from faser_backend.core.request import Request, SamplingParams
from faser_backend.pipeline.engine import Engine
from faser_backend.pipeline.timing import MODEL_PHASES
from faser_backend.policy.cost_fit import fit_overhead
from faser_backend.policy.cost_model import OverheadCost
from faser_backend.serving.compose import build_engine

DRAFT_PHASES = ("draft_rows", "draft_sample")
PROMPT_TOKENS = 8


class StepSample(NamedTuple):
    """Medians over the steps of one load: B sequences, K drafted tokens each."""

    num_sequences: int
    num_rows: int
    step_us: float  # outside the model calls and the draft's own overhead
    draft_call_us: float  # packing and sampling, per draft call


def measure_overhead(engine_dir: Path, *, is_quick: bool, seed: int) -> tuple[OverheadCost, list[StepSample]]:
    """Sampling at temperature 1, in one thread, at 1, 8 and 32 requests with 1 and 4 drafted tokens each."""
    rng = np.random.default_rng(seed)
    samples = []
    for num_draft_tokens in (1, 4):
        engine = build_engine(engine_dir, EngineConfig.from_options(policy=f"fixed:{num_draft_tokens}"))
        try:
            for num_sequences in (1, 8, 32):
                samples.append(_sample(engine, num_sequences, num_draft_tokens, 8 if is_quick else 16, rng))
        finally:
            engine.close()
    columns = np.array(samples, np.float64).T
    return fit_overhead(*columns), samples


def _sample(
    engine: Engine, num_sequences: int, num_draft_tokens: int, num_steps: int, rng: np.random.Generator
) -> StepSample:
    """Times num_steps steps in which all sequences decode and none ends; then cancels them."""
    limits = engine.limits
    max_tokens = min((num_steps + 4) * (num_draft_tokens + 1), limits.max_context - PROMPT_TOKENS)
    for index in range(num_sequences):
        sampling = SamplingParams(temperature=1.0, seed=index)
        prompt = rng.integers(0, limits.vocab_size, PROMPT_TOKENS)
        engine.submit(Request(f"profile-{index}", prompt, max_tokens, sampling))
    times = []
    while len(times) < num_steps:
        before = engine.metrics().phase_times_ns
        start = time.perf_counter_ns()
        outputs = engine.step()
        wall_ns = time.perf_counter_ns() - start
        after = engine.metrics()
        if after.num_running < num_sequences or any(output.is_final for output in outputs):
            if not engine.has_work:
                break
            continue
        spent = {name: ns - before.get(name, 0) for name, ns in after.phase_times_ns.items()}
        if spent.get("prefill_model", 0) or len(outputs) < num_sequences:
            continue
        model_ns = sum(spent.get(name, 0) for name in MODEL_PHASES)
        draft_ns = sum(spent.get(name, 0) for name in DRAFT_PHASES)
        times.append((wall_ns - model_ns - draft_ns, draft_ns))
    for index in range(num_sequences):
        engine.cancel(f"profile-{index}")
    while engine.has_work:
        engine.step()
    step_ns, draft_ns = np.median(np.array(times, np.float64).reshape(-1, 2), axis=0)
    num_rows = num_sequences * (num_draft_tokens + 1)
    return StepSample(num_sequences, num_rows, step_ns / 1e3, draft_ns / 1e3 / num_draft_tokens)
