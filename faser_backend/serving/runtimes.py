"""Which implementation stands behind each runtime of the manifest. The only place that asks for it by name.

GPU runtimes are imported where they are asked for: a CPU's engine never loads torch or a CUDA library.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from faser_backend.config import EngineConfig
from faser_backend.core.errors import ConfigError
from faser_backend.device import cpu_runtime
from faser_backend.device.runtime import ModelPair, Runtime
from faser_backend.manifest import CPU_RUNTIMES, EngineManifest

MIN_TABLE_BLOCKS = 8  # a GPU's block tables have 8, 16, 32, ... columns

AnyRuntime = Runtime[Any, Any]


def open_runtime(engine_dir: Path, manifest: EngineManifest, config: EngineConfig) -> AnyRuntime:
    """Opens the device for an engine directory. Raises ConfigError where its runtime cannot run here."""
    models = ModelPair(manifest.target, manifest.draft)
    if manifest.runtime in CPU_RUNTIMES:
        opened = cpu_runtime.OrtRuntime if manifest.runtime == "onnxruntime" else cpu_runtime.LlvmRuntime
        return opened(
            engine_dir,
            models,
            manifest.kv_block_size,
            kv_cache_dtype=manifest.kv_cache_dtype,
            num_threads=config.num_threads,
        )
    try:
        from faser_backend.device.cuda.runtime import open_cuda_runtime
    except ImportError as error:
        extra = "tensorrt" if manifest.runtime == "tensorrt" else "torch"
        raise ConfigError(
            f"runtime = {manifest.runtime!r}: needs torch and Triton-language; "
            f"pip install 'faser-backend[{extra}]' ({error})"
        ) from error
    return open_cuda_runtime(engine_dir, manifest)


def identity_of(runtime: str) -> dict[str, str | int]:
    """What decides how long its calls take on this machine, by name; looks at the device without opening it."""
    if runtime in CPU_RUNTIMES:
        return cpu_runtime.identity(runtime)
    from faser_backend.device.cuda.identity import identity

    return identity(runtime)


def key_columns_of(runtime: str, num_tokens: int, kv_block_size: int) -> int:
    """Columns of keys that a call reads for a sequence of so many tokens."""
    num_blocks = -(-num_tokens // kv_block_size)
    if runtime == "tensorrt_rtx":  # gathers what the block table has columns for
        num_blocks = 1 << max(num_blocks - 1, MIN_TABLE_BLOCKS - 1).bit_length()
    return num_blocks * kv_block_size  # attention of ours reads the blocks that there are
