"""Before the first request of a GPU engine: batches that nobody asked for, so that kernels are compiled and captured.

The first call of a shape on a GPU compiles kernels for seconds, the second captures a graph; a client should see
neither. What is decoded is thrown away; policies and metrics learn nothing of it. A runtime that cannot run these
batches is found out here and not by a client.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import numpy as np

from faser_backend.core.errors import FaserError
from faser_backend.core.request import FinishReason, Limits, Request, SamplingParams
from faser_backend.pipeline.engine import Engine

_log = logging.getLogger(__name__)
NUM_TOKENS = 24  # of every answer: a few rounds of each policy, for the second call of a shape captures it
NUM_PROMPT_TOKENS = 16
TEMPERATURES = (0.0, 0.8)


def warm_up(engine: Engine, *, max_num_seqs: int, max_prefill_tokens: int) -> None:
    """Runs the batches to their end on the calling thread. Raises FaserError with the first step's error."""
    start = time.perf_counter()
    observers = engine.stepper.observers[:]
    engine.stepper.observers.clear()
    num_batches = 0
    try:
        for batch in warm_up_batches(engine.limits, max_num_seqs, max_prefill_tokens):
            num_batches += 1
            for request in batch:
                engine.submit(request)
            while engine.has_work:
                for output in engine.step():
                    if output.finish_reason is FinishReason.ERROR:
                        raise FaserError(f"warm-up with {len(batch)} requests: {output.error}")
    finally:
        engine.stepper.observers[:] = observers
    engine.reset_metrics()
    _log.info("warmed up with %d batches in %.1f s", num_batches, time.perf_counter() - start)


def warm_up_batches(limits: Limits, max_num_seqs: int, max_prefill_tokens: int) -> Iterator[list[Request]]:
    """One long prompt, then 1, 2, 4, ... requests at once, greedy and random; token ids are random."""
    rng = np.random.default_rng(0)

    def request(name: str, num_prompt: int, temperature: float) -> Request:
        num_prompt = max(1, min(num_prompt, limits.max_context - 1))
        num_tokens = max(1, min(NUM_TOKENS, limits.max_context - num_prompt))
        prompt = rng.integers(0, limits.vocab_size, num_prompt)
        return Request(f"warm-up {name}", prompt, num_tokens, SamplingParams(temperature=temperature))

    yield [request("prompt", max_prefill_tokens, 0.0)]
    sizes = [1 << power for power in range(max_num_seqs.bit_length()) if 1 << power <= max_num_seqs]
    for size in sizes if sizes[-1] == max_num_seqs else [*sizes, max_num_seqs]:
        for temperature in TEMPERATURES:
            yield [request(f"{size} {temperature} {index}", NUM_PROMPT_TOKENS, temperature) for index in range(size)]
