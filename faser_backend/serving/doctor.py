"""`faser doctor`: what this machine can run, and why not what it cannot. Looks, changes nothing."""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from faser_backend.core.errors import FaserError
from faser_backend.device.partition import core_partitions
from faser_backend.serving.demo_engine import DEMO_PAIR
from faser_backend.serving.server import MODEL_REPO, check_libpython, find_triton

MIN_GREEN_CONTEXT_DRIVER = 12040  # CUDA 12.4: cuGreenCtxCreate


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `is_needed`: without it nothing can be served here."""

    name: str
    is_ok: bool
    detail: str
    is_needed: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def examine() -> list[Finding]:
    """All findings, in the order of the report."""
    driver = _cuda_driver()
    return [
        _check("Python", _python, is_needed=True),
        _check("CPU partitions", lambda: core_partitions().note),
        _check("ONNX Runtime", _onnx_runtime, is_needed=True),
        _check("Triton server", lambda: str(find_triton().binary), is_needed=True),
        _check("Triton Python stub", _stub, is_needed=True),
        _check("model repository", _repository, is_needed=True),
        _check("demo pair", _demo_pair),
        driver,
        _green_contexts(driver),
        _package("TensorRT-RTX", "tensorrt-rtx-cu13-libs", "pip install faser-backend[tensorrt-rtx]"),
        _package("TensorRT", "tensorrt-cu13", "pip install faser-backend[tensorrt]; needs a GPU"),
        _package("torch", "torch", "pip install faser-backend[torch]; needs a GPU"),
    ]


def print_report(findings: list[Finding]) -> None:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        mark = "yes" if finding.is_ok else "NO " if finding.is_needed else "no "
        print(f"{mark}  {finding.name:<{width}}  {finding.detail}")
    can_serve = all(finding.is_ok for finding in findings if finding.is_needed)
    print("This machine can serve." if can_serve else "This machine cannot serve: mend what is marked NO.")


def _check(name: str, look: Callable[[], str], *, is_needed: bool = False) -> Finding:
    try:
        return Finding(name, True, look(), is_needed)
    except (FaserError, ImportError, OSError) as error:
        return Finding(name, False, str(error), is_needed)


def _python() -> str:
    import numpy as np

    if int(np.__version__.split(".")[0]) != 1:
        raise ImportError(f"numpy {np.__version__}: the server's stubs need numpy 1, pip install 'numpy<2'")
    return f"{platform.python_version()} at {sys.executable}, numpy {np.__version__}"


def _onnx_runtime() -> str:
    import onnxruntime

    return f"{onnxruntime.__version__}, providers {', '.join(onnxruntime.get_available_providers())}"


def _stub() -> str:
    check_libpython()
    stub = find_triton().stub
    return "brought by the server itself" if stub is None else str(stub)


def _repository() -> str:
    if not (MODEL_REPO / "faser" / "config.pbtxt").is_file():
        raise FileNotFoundError(f"{MODEL_REPO}: missing; run from a checkout of the project")
    return str(MODEL_REPO)


def _demo_pair() -> str:
    if not (DEMO_PAIR / "target" / "model.safetensors").is_file():
        raise FileNotFoundError(f"{DEMO_PAIR}: missing; --engine-dir is needed")
    return str(DEMO_PAIR)


def _cuda_driver() -> Finding:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Finding("NVIDIA GPU", False, "no NVIDIA driver (libcuda.so.1); engines run on the CPU")
    count, driver = ctypes.c_int(), ctypes.c_int()
    status = cuda.cuInit(0)
    if status != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return Finding("NVIDIA GPU", False, f"the driver is here but shows no GPU (cuInit status {status})")
    cuda.cuDriverGetVersion(ctypes.byref(driver))
    name = ctypes.create_string_buffer(128)
    cuda.cuDeviceGetName(name, len(name), 0)
    return Finding("NVIDIA GPU", True, f"{count.value} x {name.value.decode()}, driver for CUDA {driver.value}")


def _green_contexts(driver: Finding) -> Finding:
    """SM partitions; the CUDA version is the last word of the driver's finding."""
    if not driver.is_ok:
        return Finding("green contexts", False, "need an NVIDIA GPU")
    number = int(driver.detail.rsplit(" ", 1)[-1])
    needed = f"CUDA driver {number}, needs at least {MIN_GREEN_CONTEXT_DRIVER}"
    return Finding("green contexts", number >= MIN_GREEN_CONTEXT_DRIVER, needed)


def _package(name: str, distribution: str, hint: str) -> Finding:
    try:
        return Finding(name, True, version(distribution))
    except PackageNotFoundError:
        return Finding(name, False, f"not installed ({hint})")
