"""The parts of a check, in the order in which they are run: what is cheap and what later parts use goes first."""

from __future__ import annotations

from lab.gpu.harness import Part

FULL_BUDGET_S = 450.0
PARTS = (
    Part("device", "device and libraries", "lab.gpu.device_part:run", 20),
    Part("peaks", "copy bandwidth and matrix products", "lab.gpu.peaks:run", 15),
    Part("kernels", "kernels against their references", "lab.gpu.kernels_part:correctness", 45),
    Part("bandwidth", "bandwidth of kernels", "lab.gpu.kernels_part:bandwidth", 35),
    Part("sms", "SM splits", "lab.gpu.sm_part:run", 20, needs_gpu=True, is_fresh=True),
    Part("parity", "runtime torch against ONNX Runtime", "lab.gpu.parity_part:torch_runtime", 50, is_fresh=True),
    Part("latency", "draft and target on every split", "lab.gpu.latency_part:run", 75, is_fresh=True),
    Part("ladder-8b", "ladder, synthetic 8B + 0.6B", "lab.gpu.ladder_part:pair_8b", 130, is_fresh=True),
    Part("ladder-demo", "ladder, demo pair", "lab.gpu.ladder_part:demo", 50, is_fresh=True),
    Part("rtx", "TensorRT-RTX", "lab.gpu.parity_part:rtx_runtime", 40),
    Part("tensorrt", "full TensorRT", "lab.gpu.parity_part:tensorrt_runtime", 40),
    Part(
        "ladder-32b", "ladder, synthetic 32B + 0.6B", "lab.gpu.ladder_part:pair_32b", 70, needs_gpu=True,
        is_fresh=True,
    ),
    Part("sweep", "launches of the attention kernel", "lab.gpu.sweep_part:run", 40, is_fresh=True),
)  # fmt: skip
