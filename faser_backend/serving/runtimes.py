"""Opens the runtime that a manifest names (faser_backend/runtime_spec.py).

GPU runtimes are imported only when they are opened, so an engine on a CPU never loads torch or a CUDA library.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from faser_backend.core.config import EngineConfig
from faser_backend.core.errors import ConfigError
from faser_backend.cpu.runtime import cpu_identity, open_llvm
from faser_backend.device.runtime import Runtime
from faser_backend.manifest import EngineManifest
from faser_backend.runtime_spec import RUNTIMES

MIN_TABLE_BLOCKS = 8  # a GPU's block tables have 8, 16, 32, ... columns

AnyRuntime = Runtime[Any, Any]


def open_runtime(engine_dir: Path, manifest: EngineManifest, config: EngineConfig) -> AnyRuntime:
    """Opens the device for an engine directory. Raises ConfigError if its runtime cannot run here."""
    spec = manifest.runtime_spec
    if spec.is_cpu:
        return open_llvm(engine_dir, manifest, config)
    try:
        from faser_backend.cuda.runtime import open_cuda_runtime
    except ImportError as error:
        raise ConfigError(
            f"runtime = {spec.name!r}: needs torch and Triton-language; "
            f"pip install 'faser-backend[{spec.extra}]' ({error})"
        ) from error
    return open_cuda_runtime(engine_dir, manifest, config)


def identity_of(runtime: str) -> dict[str, str | int]:
    """Returns the facts about this machine that decide how long calls take, without opening the device."""
    if RUNTIMES[runtime].is_cpu:
        return cpu_identity()
    from faser_backend.cuda.identity import gpu_identity

    return gpu_identity(runtime)


def key_columns_of(runtime: str, num_tokens: int, kv_block_size: int) -> int:
    """Returns the columns of keys that a call reads for a sequence of num_tokens tokens."""
    num_blocks = -(-num_tokens // kv_block_size)
    if RUNTIMES[runtime].is_gathered:  # it gathers all columns of the block table
        num_blocks = 1 << max(num_blocks - 1, MIN_TABLE_BLOCKS - 1).bit_length()
    return num_blocks * kv_block_size  # other runtimes read the allocated blocks alone
