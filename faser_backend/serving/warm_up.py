"""Warms up a GPU engine before its first request: captures every graph and runs some batches.

It runs on the thread that steps, as libraries open some handles per thread. All possible calls are known beforehand,
so no client waits for a capture. The batches check that everything runs and compile the remaining kernels. Their output
is dropped; policies and metrics do not see it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from faser_backend.core.errors import FaserError
from faser_backend.core.ports import Partition
from faser_backend.core.request import FinishReason, Limits, Request, Sampling
from faser_backend.pipeline.engine import Engine
from faser_backend.policy.early_exit import NUM_CANDIDATES
from faser_backend.serving.loading import log

_log = logging.getLogger(__name__)
NUM_TOKENS = 24  # per answer: some steps of each policy, because the second call of a shape captures it
NUM_PROMPT_TOKENS = 16
TEMPERATURES = (0.0, 0.8)


def warm_up(engine: Engine, *, max_num_seqs: int, max_prefill_tokens: int) -> None:
    """Captures graphs and runs the batches on the calling thread. Raises FaserError if a step fails."""
    start = time.perf_counter()
    engine.bind_thread()
    for name, partition in engine.step_runner.partitions.items():
        log.info(f"compiling kernels and capturing graphs: {engine.metrics().num_graphs} graphs, now for {name}")
        capture_menus([partition], max_num_seqs)
    captured_s = time.perf_counter() - start
    observers = engine.step_runner.observers[:]
    engine.step_runner.observers.clear()
    num_batches = 0
    try:
        for batch in warm_up_batches(engine.limits, max_num_seqs, max_prefill_tokens):
            num_batches += 1
            log.info(f"warming up: batch {num_batches}, {len(batch)} requests")
            for request in batch:
                engine.submit(request)
            while engine.has_work:
                for output in engine.step():
                    if output.finish_reason is FinishReason.ERROR:
                        raise FaserError(f"warm-up with {len(batch)} requests: {output.error}")
    finally:
        engine.step_runner.observers[:] = observers
    engine.reset_metrics()
    metrics, num_s = engine.metrics(), time.perf_counter() - start
    num_graphs, num_failed = metrics.num_graphs, metrics.num_failed_captures
    _log.info("captured %d graphs in %.1f s (%d could not be captured)", num_graphs, captured_s, num_failed)
    _log.info("warmed up with %d batches; ready after %.1f s", num_batches, num_s)


def capture_menus(partitions: Iterable[Partition], max_num_seqs: int) -> None:
    """Captures the calls of every target, draft and draft loop, on the thread that will run them."""
    for partition in partitions:
        lanes: Any = partition.lanes
        on_target = lanes.on_target if lanes is not None else _here
        on_draft = lanes.on_draft if lanes is not None else _here
        num_candidates = NUM_CANDIDATES if partition.target.exits else 0
        for run, captured, arguments in (
            (on_target, partition.target, (num_candidates,)),
            (on_draft, partition.draft, (0,)),
            (on_draft, partition.draft_loop, (max_num_seqs, num_candidates)),
        ):
            if (capture := getattr(captured, "capture_menu", None)) is not None:  # all possible calls are known
                run(partial(capture, *arguments))


def _here(work: Callable[[], None]) -> None:
    work()


def warm_up_batches(limits: Limits, max_num_seqs: int, max_prefill_tokens: int) -> Iterator[list[Request]]:
    """Yields one long prompt, then 1, 2, 4, ... requests at once, greedy and sampled, of random token ids."""
    rng = np.random.default_rng(0)

    def request(name: str, num_prompt: int, temperature: float) -> Request:
        num_prompt = max(1, min(num_prompt, limits.max_context - 1))
        num_tokens = max(1, min(NUM_TOKENS, limits.max_context - num_prompt))
        prompt = rng.integers(0, limits.vocab_size, num_prompt)
        return Request(f"warm-up {name}", prompt, num_tokens, Sampling(temperature=temperature))

    yield [request("prompt", max_prefill_tokens, 0.0)]
    sizes = [1 << power for power in range(max_num_seqs.bit_length()) if 1 << power <= max_num_seqs]
    for size in sizes if sizes[-1] == max_num_seqs else [*sizes, max_num_seqs]:
        for temperature in TEMPERATURES:
            yield [request(f"{size} {temperature} {index}", NUM_PROMPT_TOKENS, temperature) for index in range(size)]
