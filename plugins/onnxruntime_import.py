"""ONNX Runtime, imported here and nowhere else: release 1.31 sends usage data unless it is told not to before it is
loaded."""

from __future__ import annotations

import os

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import onnxruntime
import onnxruntime.capi._pybind_state as onnxruntime_kernels

__all__ = ["onnxruntime", "onnxruntime_kernels"]
