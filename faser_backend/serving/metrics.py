"""Engine counters as Triton metric families, under the names that dashboards already know.

Families and their metrics are both held: a family that is collected takes its metrics along, and the
next update raises.
"""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import Any

from faser_backend.core.request import RequestOutput
from faser_backend.pipeline.engine import EngineMetrics

TOKEN_BUCKETS = [10, 50, 100, 500, 1000]
HISTOGRAMS = (("nv_llm_input_token_len", "Prompt tokens"), ("nv_llm_output_token_len", "Output tokens"))
GAUGES = {  # family -> (label, description, values of the label)
    "nv_trt_llm_request_metrics": (
        "request_type",
        "Requests in the engine",
        ("active", "max", "scheduled", "context", "waiting"),
    ),
    "nv_trt_llm_kv_cache_block_metrics": (
        "kv_cache_block_type",
        "KV cache blocks",
        ("max", "free", "used", "tokens_per", "reused", "fraction"),
    ),
    "nv_trt_llm_inflight_batcher_metrics": (
        "inflight_batcher_specific_metric",
        "Continuous batching",
        ("total_context_tokens", "generation_requests", "paused_requests"),
    ),
    "nv_trt_llm_general_metrics": ("general_type", "General", ("timestamp", "iteration_counter")),
    "nv_trt_llm_speculative_decoding_metrics": (
        "speculative_decoding_type",
        "Speculative decoding since the start",
        ("drafted_tokens", "accepted_tokens", "emitted_tokens", "pruned_tokens", "acceptance_rate", "preemptions"),
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
            "paused_requests": metrics.num_paused,
        },
        "nv_trt_llm_general_metrics": {"timestamp": time.time(), "iteration_counter": metrics.num_steps},
        "nv_trt_llm_speculative_decoding_metrics": {
            "drafted_tokens": metrics.num_drafted,
            "accepted_tokens": metrics.num_accepted,
            "emitted_tokens": metrics.num_emitted,
            "pruned_tokens": metrics.num_pruned,
            "acceptance_rate": metrics.num_accepted / metrics.num_drafted if metrics.num_drafted else 0.0,
            "preemptions": metrics.num_preemptions,
        },
    }


class MetricReporter:
    """Registers the families with Triton once per process; one thread of its own updates them.

    Every update is a message to the server process (about 0.1 ms), so `report` and `observe` only
    hand over, and gauges that did not change are left alone. `pb_utils` is Triton's Python module.
    """

    def __init__(self, pb_utils: Any, model: str, version: str) -> None:
        labels = {"model": model, "version": version}
        kinds = pb_utils.MetricFamily
        self._families = []
        self._gauges: dict[tuple[str, str], Any] = {}
        self._last: dict[tuple[str, str], float] = {}
        for name, (label, description, values) in GAUGES.items():
            family = kinds(name=name, description=description, kind=kinds.GAUGE)
            self._families.append(family)
            for value in values:
                self._gauges[name, value] = family.Metric(labels={**labels, label: value})
        self._histograms = []
        for name, description in HISTOGRAMS:
            family = kinds(name=name, description=description, kind=kinds.HISTOGRAM)
            self._families.append(family)
            self._histograms.append(family.Metric(labels=labels, buckets=TOKEN_BUCKETS))
        self._updates: SimpleQueue[EngineMetrics | tuple[int, int] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def report(self, metrics: EngineMetrics) -> None:
        self._updates.put(metrics)

    def observe(self, output: RequestOutput, num_output_tokens: int) -> None:
        """Counts one finished request into the length histograms."""
        if output.stats is not None:
            self._updates.put((output.stats.num_prompt_tokens, num_output_tokens))

    def close(self) -> None:
        self._updates.put(None)
        self._thread.join(5.0)

    def _run(self) -> None:
        while (update := self._updates.get()) is not None:
            if isinstance(update, EngineMetrics):
                self._set_gauges(update)
            else:
                for histogram, length in zip(self._histograms, update, strict=True):
                    histogram.observe(length)

    def _set_gauges(self, metrics: EngineMetrics) -> None:
        for family, values in gauge_values(metrics).items():
            for label, value in values.items():
                if self._last.get((family, label)) != value:
                    self._gauges[family, label].set(value)
                    self._last[family, label] = value
