"""Engine counters as Triton metric families, under the names that TensorRT-LLM's dashboards already know."""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from faser_backend.core.request import FinishReason, RequestOutput, RequestStats
from faser_backend.pipeline.engine import NUM_POSITIONS, STEP_KINDS, EngineMetrics
from faser_backend.serving.lasting_metrics import LastingFamily

TOKEN_BUCKETS = [10, 50, 100, 500, 1000]
HISTOGRAMS = (  # family, its type
    ("nv_llm_input_token_len", "total_input_tokens"),
    ("nv_llm_output_token_len", "total_output_tokens"),
)
# Seconds of finished requests. Names and buckets of OpenTelemetry's conventions for servers of generative models, where
# these have one; the wait in the queue is called as vLLM calls it.
LATENCIES = {
    "gen_ai_server_time_to_first_token_seconds": (
        "From arrival to the first token",
        [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0],
    ),
    "gen_ai_server_time_per_output_token_seconds": (
        "From the first token to the last, per token behind the first",
        [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5],
    ),
    "gen_ai_server_request_duration_seconds": (
        "From arrival to the last token",
        [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92],
    ),
    "vllm:request_queue_time_seconds": (
        "From arrival to the first step",
        [0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0],
    ),
}
SPECULATION = {  # counters, as vLLM calls them
    "vllm:spec_decode_num_drafts_total": "Verifications of a sequence that had draft tokens",
    "vllm:spec_decode_num_draft_tokens_total": "Draft tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "Draft tokens that were accepted",
}
BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
STEPS = "faser:steps_total"
REQUESTS = "vllm:request_success_total"  # by the reason of the end
GAUGES = {  # family -> (label, description, values of the label)
    "nv_trt_llm_request_metrics": (
        "request_type",
        "Requests in the engine",
        ("active", "max", "scheduled", "context", "waiting"),
    ),
    "nv_trt_llm_runtime_memory_metrics": (
        "memory_type",
        "Bytes that the engine's process holds",
        ("cpu", "gpu", "pinned"),
    ),
    "nv_trt_llm_kv_cache_block_metrics": (
        "kv_cache_block_type",
        "KV cache blocks",
        ("max", "free", "used", "tokens_per", "reused", "fraction"),
    ),
    "nv_trt_llm_inflight_batcher_metrics": (
        "inflight_batcher_specific_metric",
        "Continuous batching",
        ("total_context_tokens", "generation_requests", "micro_batch_id", "paused_requests"),
    ),
    "nv_trt_llm_general_metrics": ("general_type", "General", ("timestamp", "iteration_counter")),
    "nv_trt_llm_speculative_decoding_metrics": (
        "speculative_decoding_type",
        "Speculative decoding since the start; price: the tokens per second that a policy asks of any use of time",
        (
            *("drafted_tokens", "accepted_tokens", "emitted_tokens", "pruned_tokens", "wasted_tokens"),
            *("acceptance_rate", "preemptions", "price"),
        ),
    ),
    "nv_trt_llm_cuda_graph_metrics": (
        "cuda_graph_type",
        "CUDA graphs since the start, and calls that run without because theirs could not be captured",
        ("captured", "failed_captures"),
    ),
}
# Dashboards read the lines; prompts are read and answered by one engine here, so they stay 0.
UNUSED_COUNTERS = {
    "nv_trt_llm_disaggregated_serving_metrics": (
        "disaggregated_serving_type",
        "Disaggregated serving, which this engine does not do",
        ("kv_cache_transfer_ms", "request_count"),
    ),
}


def gauge_values(metrics: EngineMetrics) -> dict[str, dict[str, float]]:
    """family -> label value -> number."""
    num_used = metrics.num_blocks - metrics.num_free_blocks
    num_context = 1 if metrics.num_context_tokens else 0
    return {
        "nv_trt_llm_request_metrics": {
            "active": metrics.num_running + metrics.num_waiting,
            "max": metrics.max_num_seqs,
            "scheduled": metrics.num_scheduled if metrics.num_running else 0,
            "context": num_context if metrics.num_running else 0,
            "waiting": metrics.num_waiting,
        },
        "nv_trt_llm_kv_cache_block_metrics": {
            "max": metrics.num_blocks,
            "free": metrics.num_free_blocks,
            "used": num_used,
            "tokens_per": metrics.kv_block_size,
            "reused": metrics.num_reused_blocks,
            "fraction": num_used / metrics.num_blocks if metrics.num_blocks else 0.0,
        },
        "nv_trt_llm_inflight_batcher_metrics": {
            "total_context_tokens": metrics.num_context_tokens if metrics.num_running else 0,
            "generation_requests": metrics.num_running,
            "micro_batch_id": 0,  # steps are not pipelined over several devices
            "paused_requests": metrics.num_paused,
        },
        "nv_trt_llm_runtime_memory_metrics": memory_bytes(),
        "nv_trt_llm_general_metrics": {
            "timestamp": time.time_ns() // 1000,  # microseconds, as in TensorRT-LLM
            "iteration_counter": metrics.num_steps,
        },
        "nv_trt_llm_speculative_decoding_metrics": {
            "drafted_tokens": metrics.num_drafted,
            "accepted_tokens": metrics.num_accepted,
            "emitted_tokens": metrics.num_emitted,
            "pruned_tokens": metrics.num_pruned,
            "wasted_tokens": metrics.num_drafted - metrics.num_accepted,
            "acceptance_rate": metrics.num_accepted / metrics.num_drafted if metrics.num_drafted else 0.0,
            "preemptions": metrics.num_preemptions,
            "price": metrics.tokens_per_second,
        },
        "nv_trt_llm_cuda_graph_metrics": {
            "captured": metrics.num_graphs,
            "failed_captures": metrics.num_failed_captures,
        },
    }


def memory_bytes() -> dict[str, float]:
    """Bytes of this process in main memory and, where torch runs on a GPU, what it has allocated there."""
    num_resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    gpu = 0
    torch = sys.modules.get("torch")  # never imported for this: only runtimes on a GPU bring it
    if torch is not None and torch.cuda.is_available():
        gpu = torch.cuda.memory_allocated()
    return {"cpu": num_resident_pages * os.sysconf("SC_PAGE_SIZE"), "gpu": gpu, "pinned": 0}


class Ended(NamedTuple):
    """A request that has ended."""

    stats: RequestStats
    num_output_tokens: int
    reason: FinishReason

    def seconds(self) -> tuple[float | None, float | None, float | None, float | None]:
        """What LATENCIES hold, in their order; None where there is none, as of a request without tokens."""
        stats = self.stats
        if not stats.first_token_ns:
            return None, None, None, None
        num_gaps = self.num_output_tokens - 1
        first, last = stats.first_token_ns, stats.last_token_ns
        per_token = (last - first) / num_gaps if num_gaps > 0 else None
        times = (
            first - stats.arrival_ns,
            per_token,
            last - stats.arrival_ns,
            stats.first_scheduled_ns - stats.arrival_ns,
        )
        return tuple(None if time_ns is None else max(0, time_ns) / 1e9 for time_ns in times)  # pyright: ignore[reportReturnType]


class MetricReporter:
    """Registers the families with Triton once per process; one thread of its own updates them.

    Every update is a message to the server process (about 0.1 ms), so `report` and `observe` only
    hand over, and gauges that did not change are left alone. `pb_utils` is Triton's Python module.
    """

    def __init__(self, pb_utils: Any, model: str, version: str) -> None:
        labels = {"model": model, "version": version}
        self._gauges: dict[tuple[str, str], Any] = {}
        self._last: dict[tuple[str, str], float] = {}
        for name, (label, description, values) in GAUGES.items():
            family = LastingFamily(pb_utils, "GAUGE", name, description)
            for value in values:
                self._gauges[name, value] = family.metric({**labels, label: value})
        for name, (label, description, values) in UNUSED_COUNTERS.items():
            family = LastingFamily(pb_utils, "COUNTER", name, description)
            for value in values:
                family.metric({**labels, label: value})
        self._histograms = []
        for name, kind in HISTOGRAMS:
            family = LastingFamily(pb_utils, "HISTOGRAM", name, "TRT LLM response metrics")
            self._histograms.append(family.metric({**labels, "response_metric_type": kind}, buckets=TOKEN_BUCKETS))
        self._latencies = []
        for name, (description, buckets) in LATENCIES.items():
            family = LastingFamily(pb_utils, "HISTOGRAM", name, description)
            self._latencies.append(family.metric(labels, buckets=buckets))
        self._totals: dict[tuple[str, str], Any] = {}
        counted: dict[str, tuple[str, str, tuple[str, ...]]] = {
            name: (description, "", ("",)) for name, description in SPECULATION.items()
        }
        positions = tuple(map(str, range(NUM_POSITIONS)))
        counted[BY_POSITION] = ("Draft tokens that were accepted, by place in their chain", "position", positions)
        reasons = tuple(reason.value for reason in FinishReason)
        counted[REQUESTS] = ("Requests that have ended", "finished_reason", reasons)
        counted[STEPS] = ("Steps that verified something, by how draft and target took turns", "mode", STEP_KINDS)
        for name, (description, label, values) in counted.items():
            family = LastingFamily(pb_utils, "COUNTER", name, description)
            for value in values:
                self._totals[name, value] = family.metric({**labels, **({label: value} if label else {})})
        self._updates: SimpleQueue[EngineMetrics | Ended | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def report(self, metrics: EngineMetrics) -> None:
        self._updates.put(metrics)

    def observe(self, output: RequestOutput, num_output_tokens: int) -> None:
        """Counts one finished request into the histograms."""
        if output.stats is not None and output.finish_reason is not None:
            self._updates.put(Ended(replace(output.stats), num_output_tokens, output.finish_reason))

    def close(self) -> None:
        self._updates.put(None)
        self._thread.join(5.0)

    def _run(self) -> None:
        while (update := self._updates.get()) is not None:
            if isinstance(update, EngineMetrics):
                self._set_gauges(update)
                self._add_totals(update)
            else:
                self._observe(update)

    def _observe(self, ended: Ended) -> None:
        stats = ended.stats
        for histogram, length in zip(self._histograms, (stats.num_prompt_tokens, ended.num_output_tokens), strict=True):
            histogram.observe(length)
        for histogram, seconds in zip(self._latencies, ended.seconds(), strict=True):
            if seconds is not None:
                histogram.observe(seconds)
        self._totals[REQUESTS, ended.reason.value].increment(1)

    def _add_totals(self, metrics: EngineMetrics) -> None:
        numbers = (metrics.num_drafts, metrics.num_drafted, metrics.num_accepted)
        totals = {(name, ""): number for name, number in zip(SPECULATION, numbers, strict=True)}
        totals |= {(BY_POSITION, str(place)): n for place, n in enumerate(metrics.num_accepted_by_position)}
        totals |= {(STEPS, kind): n for kind, n in metrics.num_steps_by_kind.items()}
        for key, total in totals.items():
            if (new := total - self._last.get(key, 0)) > 0:
                self._totals[key].increment(new)
                self._last[key] = total

    def _set_gauges(self, metrics: EngineMetrics) -> None:
        for family, values in gauge_values(metrics).items():
            for label, value in values.items():
                if self._last.get((family, label)) != value:
                    self._gauges[family, label].set(value)
                    self._last[family, label] = value
