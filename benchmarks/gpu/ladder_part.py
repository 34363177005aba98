"""The ladder on the demo pair and on synthetic full-size pairs, and the economics formula beside it.

On synthetic pairs acceptance is planted (planted.py): speed and the cost of every decision are real, texts are not.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.calls import PairCalls
from benchmarks.gpu.costs import fit_costs, measure_exit, measure_points, with_overhead
from benchmarks.gpu.economics import Round, expected_accepted, serial_round
from benchmarks.gpu.ladder import CONTESTANTS, FIXED, REFERENCE, Contestant, Ladder, Sizes
from benchmarks.gpu.lent_runtime import LentRuntime
from benchmarks.gpu.open_pair import opened_pair
from benchmarks.gpu.pairs import PAIRS, PairShape
from benchmarks.gpu.planted import ACCEPTANCE, CHAIN_SLACK, EXIT_AUC, Outcomes, planted_process, process_in_words
from benchmarks.gpu.worker import Context, Result
from faser_backend.core.decision import WHOLE
from faser_backend.device.partition import split_name
from faser_backend.device.runtime import ModelPair
from faser_backend.policy.cost_model import DRAFT, TARGET, CostModel
from faser_backend.policy.knowledge import Knowledge
from faser_backend.simulation.acceptance import AcceptanceProcess, demo_process
from faser_backend.simulation.knowledge import knowledge_of

PAIR_SIZES = Sizes((1, 8, 32, 64), prompt_tokens=96, output_tokens=48, waves=2, repeats=2, bursty_s=7.0)
LARGE_SIZES = Sizes((1, 8, 32), prompt_tokens=96, output_tokens=32, waves=2, repeats=1, bursty_s=7.0)
DEMO_SIZES = Sizes((1, 8, 32), prompt_tokens=64, output_tokens=64, waves=2, repeats=2, bursty_s=4.0)
TINY_SIZES = Sizes((1, 3), prompt_tokens=9, output_tokens=6, waves=1, repeats=1, bursty_s=0.3)
PREFILL_TOKENS = 2048  # of a step: on a GPU a chunk of 256 rows is hardly dearer than one of 32
BURSTY_RESERVE_S = 12.0  # per contestant


def pair_8b(context: Context) -> Result:
    return _synthetic(context, PAIRS["tiny" if context.is_tiny else "qwen3-8b/0.6b"], PAIR_SIZES, CONTESTANTS)


def pair_32b(context: Context) -> Result:
    chosen = [each for each in CONTESTANTS if each.is_rival]
    return _synthetic(context, PAIRS["tiny" if context.is_tiny else "qwen3-32b/0.6b"], LARGE_SIZES, chosen)


def _synthetic(context: Context, shape: PairShape, sizes: Sizes, contestants: Sequence[Contestant]) -> Result:
    process = planted_process(exit_auc=EXIT_AUC if shape.exit_layer else None)
    sizes = TINY_SIZES if context.is_tiny else sizes
    outcomes = Outcomes(
        process, shape.target.vocab_size, shape.max_num_seqs, 4 * sizes.output_tokens + CHAIN_SLACK, context.seed
    )
    found: Result = {
        "pair": shape.name,
        "is_synthetic": True,
        "planted": {"wanted_acceptance": ACCEPTANCE, "wanted_exit_auc": EXIT_AUC, **process_in_words(process)},
    }
    with ExitStack() as stack:
        runtime = opened_pair(context, shape, stack, outcomes=outcomes)
        found["menu"] = runtime.menu.note
        _run(context, runtime, runtime.models, shape.max_num_seqs, process, sizes, contestants, found, stack)
    return found


def demo(context: Context) -> Result:
    """The demo pair on runtime torch: real texts, real acceptance, a model far too small for a GPU."""
    from engines.build import build_engines
    from faser_backend.config import EngineConfig
    from faser_backend.manifest import EngineManifest
    from faser_backend.serving.demo_engine import DEMO_PAIR
    from faser_backend.serving.runtimes import open_runtime

    sizes = TINY_SIZES if context.is_tiny else DEMO_SIZES
    found: Result = {"pair": "demo", "is_synthetic": False}
    with tempfile.TemporaryDirectory(prefix="faser-demo-") as folder, ExitStack() as stack:
        engine_dir = Path(folder) / "torch"
        dtype = "bf16" if context.is_cuda else "fp32"
        build_engines(DEMO_PAIR / "target", DEMO_PAIR / "draft", engine_dir, runtime="torch", dtype=dtype)
        manifest = EngineManifest.load(engine_dir)
        real = stack.enter_context(closing(open_runtime(engine_dir, manifest, EngineConfig())))
        found["menu"] = real.menu.note
        models = ModelPair(manifest.target, manifest.draft)
        contestants = [each for each in CONTESTANTS if "exit" not in each.note]
        max_num_seqs = 4 if context.is_tiny else 32
        process = demo_process("sampled")
        _run(context, LentRuntime(real), models, max_num_seqs, process, sizes, contestants, found, stack)
    return found


def _run(
    context: Context,
    runtime: LentRuntime,
    models: ModelPair,
    max_num_seqs: int,
    process: AcceptanceProcess,
    sizes: Sizes,
    contestants: Sequence[Contestant],
    found: Result,
    stack: ExitStack,
) -> None:
    """Costs, then the overhead of a step, then every load; found grows and is saved on the way."""
    calls = PairCalls.open(runtime, models, max_num_seqs, stack, context.seed)
    points = _points(context, calls, found["pair"], max_num_seqs)
    costs = fit_costs(points, runtime.kv_block_size, models.max_context)
    exits = tuple(
        (index, segment.last_layer) for index, segment in enumerate(models.target.segments) if segment.has_exit_scores
    )
    exit_us = tuple(context.result_of("latency").get("exit_us", ())) if found["is_synthetic"] else ()
    if exits and not exit_us:
        exit_us = measure_exit(calls, (1, max(1, max_num_seqs // 2)), 3)
    calls.release_slots()
    knowledge: list[Knowledge] = []
    ladder = Ladder(context, runtime, models, max_num_seqs, PREFILL_TOKENS, lambda: knowledge[0])
    stack.callback(ladder.close)
    costs = _with_overhead(context, runtime, ladder, calls, costs, max_num_seqs, exit_us or (0.0, 0.0), found)
    knowledge.append(knowledge_of(process, costs, exits))
    found["rows"] = []
    rivals = [each for each in contestants if each.is_rival]
    for num_clients in sizes.clients:
        if context.has_time(BURSTY_RESERVE_S * len(rivals) / 4 if not context.is_tiny else 1.0):
            rows = ladder.closed(contestants, sizes, num_clients)
            found["rows"] += [_with_economics(row, costs, process, sizes) for row in rows]
            found["missing"] = ladder.missing
            context.save(found)
    if context.has_time(1.0):
        rows, found["bursty"] = ladder.bursty(rivals, sizes)
        found["rows"] += rows
    found["missing"] = ladder.missing


def _points(context: Context, calls: PairCalls, pair: str, max_num_seqs: int) -> list[dict[str, Any]]:
    """The latency part's, where it measured this pair; else a few of the whole device and of the middle split."""
    latency = context.result_of("latency")
    if latency.get("pair") == pair and latency.get("points"):
        return latency["points"]
    names = [split_name(*split) for split in calls.runtime.splits]
    chosen = [WHOLE, *names[len(names) // 2 : len(names) // 2 + 1]]
    return [point for name in chosen for point in measure_points(calls, name, 2, max_num_seqs)]


def _with_overhead(
    context: Context,
    runtime: LentRuntime,
    ladder: Ladder,
    calls: PairCalls,
    costs: CostModel,
    max_num_seqs: int,
    exit_us: tuple[float, ...],
    found: Result,
) -> CostModel:
    """What steps of a fixed length take beyond their calls."""
    fixed = Contestant(FIXED, "overhead")
    ladder.engine(fixed)
    steps = []
    for num_clients in sorted({1, max(2, max_num_seqs // 4), max_num_seqs}):
        sizes = Sizes((num_clients,), 16, 24 if not context.is_tiny else 6, 1, 1, 0.0)
        ladder.closed([fixed], sizes, num_clients)
        for note in ladder.log(fixed).notes:
            size = len(note.sequences)
            if size == num_clients and note.num_drafted.min() > 0:
                predicted = step_us(costs, size, int(note.num_drafted.max()), int(note.num_tokens.mean()))
                spent = (note.end_ns - note.start_ns) / 1e3
                steps.append((size, int(note.num_rows.sum()), spent - predicted))
    if not steps:
        raise RuntimeError(f"no step of {fixed.name} could be timed: {'; '.join(ladder.missing) or 'none drafted'}")
    lanes_us = 0.0
    lanes = next((place.lanes for place in calls.partitions.values() if place.lanes is not None), None)
    if lanes is not None:
        lanes_us = float(np.median([calls.timed(lambda: lanes.run_both(_nothing, _nothing)) for _ in range(30)]))
    fitted = with_overhead(costs, np.array(steps, np.float64), (exit_us[0], exit_us[1]), lanes_us)
    overhead = fitted.overhead
    found["overhead"] = {name: getattr(overhead, name) for name in overhead.__slots__}
    del runtime
    return fitted


def step_us(costs: CostModel, size: int, num_draft_tokens: int, context: int) -> float:
    """Calls of a serial step that drafts and verifies chains of equal length, without overhead."""
    draft = num_draft_tokens * costs.call_us(DRAFT, WHOLE, size, size, context, num_logit_rows=size)
    return float(draft + costs.call_us(TARGET, WHOLE, size * (num_draft_tokens + 1), size, context))


def _with_economics(
    row: dict[str, Any], costs: CostModel, process: AcceptanceProcess, sizes: Sizes
) -> dict[str, Any]:
    """For plain decoding and fixed lengths in turn: the round that the formula predicts, beside the measured one."""
    policy, size = row["policy"], row["num_clients"]
    context = sizes.prompt_tokens + sizes.output_tokens // 2
    if policy == REFERENCE:
        predicted = Round(float(costs.call_us(TARGET, WHOLE, size, size, context)), 1.0)
    elif policy.startswith("fixed:") and "(" not in policy:
        length = int(policy.partition(":")[2])
        draft = length * float(costs.call_us(DRAFT, WHOLE, size, size, context, num_logit_rows=size))
        verify = float(costs.call_us(TARGET, WHOLE, size * (length + 1), size, context))
        predicted = serial_round(draft, verify, expected_accepted(process.sample(200, 128)[1], length))
    else:
        return row
    measured_tokens = 1.0 + row["mean_accepted"]
    return row | {
        "predicted": {
            "round_us": predicted.us,
            "tokens": predicted.tokens,
            "tokens_per_s": predicted.tokens_per_s(size),
            # Measured over predicted: 1 where the formula has every term.
            "time_ratio": row["step_us_p50"] / predicted.us,
            "yield_ratio": measured_tokens / predicted.tokens,
        }
    }


def _nothing() -> None:
    """The work of a lane that is only handed over."""
