"""`LlvmRuntime`: kernels of ours on the cores of this machine; implements device.runtime.Runtime.

What is not a model's call is ONNX Runtime's sibling's: cores, pools, lanes and the sampler are the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from faser_backend.core.model import EAGLE3
from faser_backend.device.cpu_runtime import OrtRuntime
from faser_backend.device.kv_pool import KvPool
from faser_backend.device.llvm_head import LlvmHeadRunner
from faser_backend.device.llvm_runner import LlvmRunner
from faser_backend.device.partition import CorePartition
from faser_backend.device.runtime import ModelPair
from faser_backend.manifest import ModelEngine


class LlvmRuntime(OrtRuntime):
    """Runs the pair of one engine directory. All runners of a model read one mapped file."""

    loads_weights_per_split = False

    def __init__(self, engine_dir: Path, models: ModelPair, kv_block_size: int, **options: Any) -> None:
        """Arguments as of OrtRuntime."""
        super().__init__(engine_dir, models, kv_block_size, **options)
        self._target = models.target

    def open_runner(self, model: ModelEngine, share: CorePartition, pool: KvPool) -> LlvmRunner:
        arguments = (model, self._engine_dir, share, pool)
        if model.spec.family == EAGLE3:
            return LlvmHeadRunner(*arguments, self._target, num_threads=self._num_threads)
        return LlvmRunner(*arguments, num_threads=self._num_threads)
