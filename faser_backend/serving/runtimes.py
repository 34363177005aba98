"""Opens the runtime that a manifest names (faser_backend/runtime_spec.py).

GPU runtimes are imported only when they are opened, so an engine on a CPU never loads torch or a CUDA library.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

from faser_backend.core.config import EngineConfig
from faser_backend.core.errors import ConfigError
from faser_backend.cpu.runtime import LlvmRuntime, cpu_identity
from faser_backend.device.runtime import Runtime
from faser_backend.manifest import EngineManifest
from faser_backend.runtime_spec import RUNTIMES
from faser_backend.serving.loading import CHECKING, log, size_text

HEADER_SCHEME = "posix_prefix"  # Triton-language's, even if a distribution's default is another
AnyRuntime = Runtime[Any, Any]


def open_runtime(engine_dir: Path, manifest: EngineManifest, config: EngineConfig) -> AnyRuntime:
    """Verifies weights and opens the device. Raises ManifestError, or ConfigError if the runtime cannot run here."""

    def report(done: int, total: int) -> None:
        log.info(f"{CHECKING}: {size_text(done)} of {size_text(total)}")

    check_device(manifest.runtime)
    manifest.verify_weights(engine_dir, is_full=config.verify == "full", report=report)
    log.info("loading weights and kernels")
    spec = manifest.runtime_spec
    if spec.is_cpu:
        return LlvmRuntime(engine_dir, manifest, num_threads=config.num_threads)
    try:
        from faser_backend.cuda.runtime import open_cuda_runtime
    except ImportError as error:
        raise ConfigError(
            f"runtime = {spec.name!r}: needs torch and Triton-language; "
            f"pip install 'faser-backend[{spec.extra}]' ({error})"
        ) from error
    return open_cuda_runtime(engine_dir, manifest)


def check_kernel_compiler() -> str:
    """Returns the C compiler with which Triton-language builds the launchers of kernels. Raises ConfigError."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths(HEADER_SCHEME)["include"], "Python.h")
    python = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
    if packages := ["gcc"] * (not compiler) + [python] * (not header.is_file()):
        needed = f"a C compiler (gcc, clang or $CC) and {header}"
        raise ConfigError(f"Triton-language needs {needed}; apt-get install {' '.join(packages)}")
    return f"{compiler}, {header}"


def check_device(runtime: str) -> None:
    """Raises ConfigError if kernels must be compiled for a GPU here and cannot be."""
    if not RUNTIMES[runtime].is_cpu and has_driver():
        check_kernel_compiler()


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def identity_of(runtime: str) -> dict[str, str | int]:
    """Returns the facts about this machine that decide how long calls take, without opening the device."""
    if RUNTIMES[runtime].is_cpu:
        return cpu_identity()
    from faser_backend.cuda.green_contexts import gpu_identity

    return gpu_identity(runtime)
