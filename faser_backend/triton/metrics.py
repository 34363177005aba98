"""Reports the engine's counters as Triton metrics, under the names in TensorRT-LLM's dashboards."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from faser_backend.core.request import EngineOutput, FinishReason, RequestStats
from faser_backend.pipeline.engine import NUM_POSITIONS, STEP_KINDS, EngineMetrics
from faser_backend.serving.request_reports import RequestLife
from faser_backend.triton.link import DIRECT

TOKEN_BUCKETS = (10, 50, 100, 500, 1000)
REQUESTS, STEPS = "vllm:request_success_total", "faser:steps_total"
BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
LENGTHS = {  # of finished requests, in tokens; family -> its label
    "nv_llm_input_token_len": "total_input_tokens",
    "nv_llm_output_token_len": "total_output_tokens",
}
# Seconds of finished requests. Names and buckets follow OpenTelemetry's conventions for servers of generative models;
# the time in the queue has vLLM's name.
LATENCIES = {
    "gen_ai_server_time_to_first_token_seconds": (
        "From arrival to the first token",
        (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    ),
    "gen_ai_server_time_per_output_token_seconds": (
        "From the first token to the last, per token after the first",
        (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    ),
    "gen_ai_server_request_duration_seconds": (
        "From arrival to the last token",
        (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    ),
    "vllm:request_queue_time_seconds": (
        "From arrival to the first step",
        (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    ),
}
SPECULATION = {  # totals, under vLLM's names
    "vllm:spec_decode_num_drafts_total": "Verifications of a sequence that had draft tokens",
    "vllm:spec_decode_num_draft_tokens_total": "Draft tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "Accepted draft tokens",
}


class Family(NamedTuple):
    """A family of metrics: one for each value of its label."""

    kind: str
    description: str
    label: str = ""
    values: tuple[str, ...] = ("",)
    buckets: tuple[float, ...] = ()


def gauge_values(metrics: EngineMetrics) -> dict[str, dict[str, float]]:
    """Returns the gauges' values by family and label value."""
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
    """Returns the bytes of this process in main memory and those that torch has allocated on a GPU."""
    num_resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    torch = sys.modules.get("torch")  # not imported here: only runtimes on a GPU load it
    gpu = torch.cuda.memory_allocated() if torch is not None and torch.cuda.is_available() else 0
    return {"cpu": num_resident_pages * os.sysconf("SC_PAGE_SIZE"), "gpu": gpu, "pinned": 0}


GAUGES = {  # family -> its description and label; the label's values are those of gauge_values
    "nv_trt_llm_request_metrics": ("Requests in the engine", "request_type"),
    "nv_trt_llm_runtime_memory_metrics": ("Memory of the engine's process in bytes", "memory_type"),
    "nv_trt_llm_kv_cache_block_metrics": ("KV cache blocks", "kv_cache_block_type"),
    "nv_trt_llm_inflight_batcher_metrics": ("Continuous batching", "inflight_batcher_specific_metric"),
    "nv_trt_llm_general_metrics": ("General", "general_type"),
    "nv_trt_llm_speculative_decoding_metrics": (
        "Speculative decoding since the start; price: tokens per second at the policy's optimum",
        "speculative_decoding_type",
    ),
    "nv_trt_llm_cuda_graph_metrics": (
        "CUDA graphs captured since the start, and captures that failed",
        "cuda_graph_type",
    ),
}
FAMILIES = {
    **{name: Family("GAUGE", *GAUGES[name], tuple(values)) for name, values in gauge_values(EngineMetrics()).items()},
    # Dashboards read these lines. One engine reads prompts and answers them, so they stay 0.
    "nv_trt_llm_disaggregated_serving_metrics": Family(
        "COUNTER",
        "Disaggregated serving, which this engine does not support",
        "disaggregated_serving_type",
        ("kv_cache_transfer_ms", "request_count"),
    ),
    **{
        name: Family("HISTOGRAM", "TRT LLM response metrics", "response_metric_type", (value,), TOKEN_BUCKETS)
        for name, value in LENGTHS.items()
    },
    **{name: Family("HISTOGRAM", text, buckets=buckets) for name, (text, buckets) in LATENCIES.items()},
    **{name: Family("COUNTER", text) for name, text in SPECULATION.items()},
    BY_POSITION: Family(
        "COUNTER", "Accepted draft tokens by position in their chain", "position", tuple(map(str, range(NUM_POSITIONS)))
    ),
    REQUESTS: Family(
        "COUNTER", "Requests that have ended", "finished_reason", tuple(reason.value for reason in FinishReason)
    ),
    STEPS: Family("COUNTER", "Steps with a verification, by pipeline mode", "mode", STEP_KINDS),
}


def latencies_of(stats: RequestStats, num_output_tokens: int) -> dict[str, float]:
    """Returns the values of LATENCIES of a request that has ended, without those that are undefined."""
    if not stats.first_token_ns:
        return {}
    first, last, arrival, num_gaps = stats.first_token_ns, stats.last_token_ns, stats.arrival_ns, num_output_tokens - 1
    per_token = (last - first) / num_gaps if num_gaps > 0 else None
    times = (first - arrival, per_token, last - arrival, stats.first_scheduled_ns - arrival)
    found = zip(LATENCIES, times, strict=True)
    return {name: max(0, time_ns) / 1e9 for name, time_ns in found if time_ns is not None}


def lasting_family(pb_utils: Any, kind: str, name: str, description: str) -> Callable[..., Any]:
    """Returns a function that makes the metrics of a family. This process never destroys them.

    kind: `COUNTER`, `GAUGE` or `HISTOGRAM`. Of labels that Triton has, the metric is Triton's own.

    Destroying a metric removes it from the server's registry. While one engine replaces another, both share metrics of
    the same labels, and the end of the first would free the second's and crash the server. A destroyed family with one
    of Triton's own names would remove a model's counters. At the end of a process, Python destroys objects after the
    queue to the server, which crashes.
    """
    kinds = pb_utils.MetricFamily
    family = _keep(kinds(name=name, description=description, kind=getattr(kinds, kind)))
    return lambda labels, **more: _keep(family.Metric(labels=labels, **more))


def _keep(held: Any) -> Any:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    return held


REFRESH_S = 5.0  # between two updates of all gauges


class MetricReporter:
    """Registers the families with Triton once per process, and updates them on its own thread.

    An update is a message to the server process (about 0.1 ms), so `report` and `observe` only enqueue, and unchanged
    gauges are skipped until the next refresh. pb_utils: Triton's Python module.
    """

    def __init__(self, pb_utils: Any, model: str, version: str) -> None:
        self.is_replaced = False  # by another engine, which the gauges then describe; it overwrites ours by a refresh
        self._refresh_s = 0.0
        labels = {"model": model, "version": version}
        self._metrics: dict[tuple[str, str], Any] = {}
        self._last: dict[tuple[str, str], float] = {}  # of gauges and totals
        for name, family in FAMILIES.items():
            metric = lasting_family(pb_utils, family.kind, name, family.description)
            more = {"buckets": list(family.buckets)} if family.buckets else {}
            for value in family.values:
                own = {family.label: value} if family.label else {}
                self._metrics[name, value] = metric({**labels, **own}, **more)
        self._counters = ComposingCounters(pb_utils, version)
        self._updates: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def report(self, metrics: EngineMetrics) -> None:
        self._updates.put(partial(self._set, metrics))

    def observe(self, output: EngineOutput, num_output_tokens: int) -> None:
        """Counts one finished request into the histograms."""
        if output.stats is not None and output.finish_reason is not None:
            is_direct = output.request_id.startswith(DIRECT)  # Triton, through which it did not pass, cannot count it
            ended = replace(output.stats), num_output_tokens, output.finish_reason
            self._updates.put(partial(self._count, *ended, is_direct=is_direct))

    def close(self) -> None:
        self._updates.put(None)
        self._thread.join(5.0)
        self._counters.close()

    def _run(self) -> None:
        while (update := self._updates.get()) is not None:
            update()

    def _count(self, stats: RequestStats, num_output_tokens: int, reason: FinishReason, *, is_direct: bool) -> None:
        lengths = stats.num_prompt_tokens, num_output_tokens
        for family, length in zip(LENGTHS.items(), lengths, strict=True) if stats.arrival_ns else ():  # not refused
            self._metrics[family].observe(length)
        for name, seconds in latencies_of(stats, num_output_tokens).items():
            self._metrics[name, ""].observe(seconds)
        self._metrics[REQUESTS, reason.value].increment(1)
        if is_direct and reason not in (FinishReason.CANCELLED, FinishReason.ERROR):
            queued, whole = stats.first_scheduled_ns - stats.arrival_ns, stats.last_token_ns - stats.arrival_ns
            self._counters.add({"tensorrt_llm": (whole, queued, 0, whole - queued, 0)}, 1)

    def _set(self, metrics: EngineMetrics) -> None:
        is_refresh = time.monotonic() >= self._refresh_s
        if is_refresh:
            self._refresh_s = time.monotonic() + REFRESH_S
        for family, values in ({} if self.is_replaced else gauge_values(metrics)).items():
            for label, value in values.items():
                if is_refresh or self._last.get((family, label)) != value:
                    self._metrics[family, label].set(value)
                    self._last[family, label] = value
        numbers = (metrics.num_drafts, metrics.num_drafted, metrics.num_accepted)
        totals = {(name, ""): number for name, number in zip(SPECULATION, numbers, strict=True)}
        totals |= {(BY_POSITION, str(position)): n for position, n in enumerate(metrics.num_accepted_by_position)}
        totals |= {(STEPS, kind): n for kind, n in metrics.num_steps_by_kind.items()}
        for key, total in totals.items():
            if (new := total - self._last.get(key, 0)) > 0:
                self._metrics[key].increment(new)
                self._last[key] = total


COMPOSING_MODELS = ("preprocessing", "tensorrt_llm", "postprocessing")
COMPOSING_COUNTERS = (  # Triton's own families, in the order of ComposingCounters.count
    "nv_inference_request_success",
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_request_duration_us",
    "nv_inference_queue_duration_us",
    "nv_inference_compute_input_duration_us",
    "nv_inference_compute_infer_duration_us",
    "nv_inference_compute_output_duration_us",
)
FLUSH_PERIOD_S = 0.5


class ComposingCounters:
    """Counts requests of `ensemble` and `tensorrt_llm_bls` for preprocessing, tensorrt_llm and postprocessing too.

    TensorRT-LLM runs these three for such a request, and dashboards read their counters.

    In Triton's registry, a family with one of Triton's names is Triton's family, and a metric with a model's labels is
    that model's counter. Increments are sent in sums twice a second, as each is a message to the server process.
    """

    def __init__(self, pb_utils: Any, version: str) -> None:
        self._counters: dict[tuple[str, str], Any] = {}
        for name in COMPOSING_COUNTERS:
            metric = lasting_family(pb_utils, "COUNTER", name, name)
            for model in COMPOSING_MODELS:
                self._counters[model, name] = metric({"model": model, "version": version})
        self._lock = threading.Lock()
        self._pending = Counter[tuple[str, str]]()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="composing-counters", daemon=True)
        self._thread.start()

    def count(self, life: RequestLife) -> None:
        """Adds one answered request, to be sent later. Thread-safe."""
        reading, engine = life.parsed_ns - life.received_ns, life.answered_ns - life.parsed_ns
        writing, sending = life.postprocessing_ns, life.sending_ns
        queued, entering = life.queued_for_ns, max(0, life.submitted_ns - life.parsed_ns)
        durations_ns = {  # in all; in the queue, for input, for inference, for output
            "preprocessing": (reading, 0, 0, reading, 0),
            "tensorrt_llm": (engine, queued, entering, max(0, engine - queued - entering), 0),
            "postprocessing": (writing + sending, 0, 0, writing, sending),
        }
        self.add(durations_ns, life.num_prompts)

    def add(self, durations_ns: dict[str, tuple[int, ...]], num_prompts: int) -> None:
        with self._lock:
            for model, nanoseconds in durations_ns.items():
                amounts = (1, num_prompts, 1, *(duration // 1000 for duration in nanoseconds))
                self._pending.update({(model, name): n for name, n in zip(COMPOSING_COUNTERS, amounts, strict=True)})

    def close(self) -> None:
        self._closing.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        is_closing = False
        while not is_closing:
            is_closing = self._closing.wait(FLUSH_PERIOD_S)  # then sends the last increments
            with self._lock:
                pending, self._pending = +self._pending, Counter()  # without zeros
            for key, amount in pending.items():
                self._counters[key].increment(amount)
