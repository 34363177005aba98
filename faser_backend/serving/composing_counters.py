"""What the text models do themselves, counted as the models that do it in TensorRT-LLM."""

from __future__ import annotations

import threading
from typing import Any

from faser_backend.serving.lasting_metrics import LastingFamily
from faser_backend.serving.wire import Answered

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
    """Counts what `ensemble` and `tensorrt_llm_bls` do themselves into the counters of the models that do it in
    TensorRT-LLM, which dashboards and tests read: preprocessing, tensorrt_llm and postprocessing.

    Triton keeps one Prometheus registry: a family with the name of one of its own is that family, and a metric with the
    labels of a model is that model's counter. Increments are summed up and sent twice a second, for each is a message
    to the server process.
    """

    def __init__(self, pb_utils: Any, version: str) -> None:
        self._counters: dict[tuple[str, str], Any] = {}
        for name in COMPOSING_COUNTERS:
            family = LastingFamily(pb_utils, "COUNTER", name, name)
            for model in COMPOSING_MODELS:
                self._counters[model, name] = family.metric({"model": model, "version": version})
        self._lock = threading.Lock()
        self._pending: dict[tuple[str, str], int] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="composing-counters", daemon=True)
        self._thread.start()

    def count(self, answered: Answered) -> None:
        """Takes in one request. Thread-safe; sends nothing."""
        reading, engine, writing = answered.preprocessing_ns, answered.engine_ns, answered.postprocessing_ns
        queued, entering, sending = answered.queued_ns, answered.submitting_ns, answered.sending_ns
        durations_ns = {  # whole, and of it in the queue, for input, inference and output
            "preprocessing": (reading, 0, 0, reading, 0),
            "tensorrt_llm": (engine, queued, entering, max(0, engine - queued - entering), 0),
            "postprocessing": (writing + sending, 0, 0, writing, sending),
        }
        with self._lock:
            for model, nanoseconds in durations_ns.items():
                amounts = (1, answered.num_prompts, 1, *(duration // 1000 for duration in nanoseconds))
                for name, amount in zip(COMPOSING_COUNTERS, amounts, strict=True):
                    self._pending[model, name] = self._pending.get((model, name), 0) + amount

    def close(self) -> None:
        self._closing.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        is_closing = False
        while not is_closing:
            is_closing = self._closing.wait(FLUSH_PERIOD_S)  # and once more for what came last
            with self._lock:
                pending, self._pending = self._pending, {}
            for key, amount in pending.items():
                if amount:
                    self._counters[key].increment(amount)
