"""Closed loops on engines in this process: no server, no text, no network."""

from __future__ import annotations

import hashlib
import itertools
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from benchmarks.workload import Job, Trace
from faser_backend.config import EngineConfig
from faser_backend.core.request import Request, SamplingParams
from faser_backend.pipeline.engine import Engine
from faser_backend.serving.compose import build_engine

PLACE = "in process"


class InProcess:
    """One engine per policy, all loaded, so that repeats can take turns."""

    def __init__(self, engine_dir: Path, policies: list[str]) -> None:
        self._tokenizer = Tokenizer.from_file(str(engine_dir / "tokenizer.json"))
        # Prompts come again in every repeat: without reuse each answer pays for its own prefill.
        self._engines = {
            policy: build_engine(engine_dir, EngineConfig.from_options(policy=policy, enable_prefix_reuse=False))
            for policy in policies
        }

    def run(self, policy: str, jobs: list[Job], num_clients: int) -> tuple[list[Trace], float]:
        """num_clients requests in flight until all jobs are answered. Returns traces and seconds."""
        engine = self._engines[policy]
        requests = [self._request(index, job) for index, job in enumerate(jobs)]
        traces = [Trace(0.0, [], 0, 0, 0, "") for _ in jobs]
        tokens: list[list[int]] = [[] for _ in jobs]
        waiting = iter(range(len(jobs)))
        start = time.perf_counter()
        for index in itertools.islice(waiting, num_clients):
            self._submit(engine, requests[index], traces[index])
        num_open = len(jobs)
        while num_open:
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                if output.error is not None:
                    raise RuntimeError(f"request {output.request_id} failed: {output.error}")
                index = int(output.request_id)
                tokens[index] += output.token_ids
                traces[index].response_s.append(now)
                if output.is_final:
                    num_open -= 1
                    assert output.stats is not None
                    traces[index].num_drafted = output.stats.num_drafted
                    traces[index].num_accepted = output.stats.num_accepted
                    following = next(waiting, None)
                    if following is not None:
                        self._submit(engine, requests[following], traces[following])
        seconds = time.perf_counter() - start
        for trace, ids in zip(traces, tokens, strict=True):
            trace.num_tokens = len(ids)
            trace.digest = hashlib.sha256(np.array(ids, dtype=np.int64).tobytes()).hexdigest()
        return traces, seconds

    def _request(self, index: int, job: Job) -> Request:
        return Request(
            request_id=str(index),
            prompt_ids=np.array(self._tokenizer.encode(job.prompt).ids, dtype=np.int64),
            max_tokens=job.max_tokens,
            sampling=SamplingParams(temperature=job.temperature, seed=job.seed),
        )

    @staticmethod
    def _submit(engine: Engine, request: Request, trace: Trace) -> None:
        trace.start_s = time.perf_counter()
        engine.submit(request)

    def overhead(self, policy: str) -> dict[str, float]:
        """Milliseconds per phase of a step since the start, largest first."""
        metrics = self._engines[policy].metrics()
        phases = sorted(metrics.phase_times_ns.items(), key=lambda item: -item[1])
        return {phase: ns / 1e6 / max(metrics.num_steps, 1) for phase, ns in phases}

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
