"""Opens a synthetic pair on this machine: weights drawn on the device, the project's own runtime around them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from faser_backend.device.cuda.programs import TorchPrograms
from faser_backend.device.cuda.runtime import current_device, open_on_device
from faser_backend.device.runtime import ModelPair
from faser_backend.manifest import ModelEngine
from lab.gpu.lent_runtime import LentRuntime
from lab.gpu.pairs import PairShape, model_pair, random_tensors, weight_bytes
from lab.gpu.planted import Outcomes
from lab.gpu.worker import Context

DTYPE = {"cuda": "bf16", "cpu": "fp32"}  # by device: a CPU's bf16 products are slow
KV_BLOCK_SIZE = 16
SPARE_BYTES = 3 << 30  # for activations, graphs and logits


class OpenedPair(LentRuntime):
    """A lent runtime that knows its models."""

    def __init__(self, real: Any, models: ModelPair, outcomes: Outcomes | None) -> None:
        super().__init__(real, outcomes=outcomes)
        self.models = models


def opened_pair(
    context: Context, shape: PairShape, stack: ExitStack, *, outcomes: Outcomes | None = None
) -> OpenedPair:
    """The stack closes it. Raises MemoryError where the pair does not fit on the device."""
    dtype = DTYPE[context.device]
    device = checked_device(context)
    models = model_pair(shape, dtype)
    _check_memory(context, shape, dtype)

    def load(model: ModelEngine) -> Any:
        return random_tensors(model.spec, dtype, device, context.seed + (model.spec is shape.draft))

    runtime = open_on_device(TorchPrograms(load), models, KV_BLOCK_SIZE, dtype=dtype)
    stack.callback(runtime.close)
    return OpenedPair(runtime, models, outcomes)


def checked_device(context: Context) -> torch.device:
    """Where the project's runtime will compute. Raises RuntimeError where that is not what was asked for."""
    device = current_device()
    if device.type != context.device:
        raise RuntimeError(f"device = {context.device!r}: torch {torch.__version__} would compute on {device.type!r}")
    return device


def _check_memory(context: Context, shape: PairShape, dtype: str) -> None:
    if not context.is_cuda:
        return
    needed = SPARE_BYTES + sum(
        weight_bytes(spec, dtype) + kv_bytes(shape, spec) for spec in (shape.target, shape.draft)
    )
    free, _ = torch.cuda.mem_get_info()
    if needed > free:
        raise MemoryError(f"{shape.name}: needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")


def kv_bytes(shape: PairShape, spec: Any) -> int:
    """Of the pool that a full batch of longest contexts takes, in half precision."""
    return 2 * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.max_context * shape.max_num_seqs
