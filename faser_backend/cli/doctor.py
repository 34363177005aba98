"""The report of `faser doctor`: what this machine can run, and the memory that an engine directory needs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import Any, Literal

from faser_backend.core.config import EngineConfig
from faser_backend.core.errors import ConfigError, FaserError
from faser_backend.cpu.weights import choose_copy
from faser_backend.cuda.green_contexts import DriverError, GreenSplits, gpu_facts, load_driver, memory_bytes
from faser_backend.cuda.memory_plan import plan_memory
from faser_backend.device.partition import core_partitions
from faser_backend.device.runtime import ModelPair
from faser_backend.manifest import EngineManifest
from faser_backend.places import DEMO_PAIR, MODEL_REPO
from faser_backend.plugins.tensorrt_import import import_tensorrt
from faser_backend.serving.compose import choose_num_blocks, served_models, with_prompt_rows
from faser_backend.serving.runtimes import check_kernel_compiler, has_driver, open_runtime
from faser_backend.triton.server import check_stub, find_triton

RTX_GPUS = "8.0, 8.6, 8.9 and 12.x"  # compute capabilities that TensorRT-RTX builds our engines for
TORCH_EXTRA = "pip install 'faser-backend[torch]'"
CONTEXT_BYTES = 600 << 20  # an allowance for a CUDA context with its modules
LoadDriver = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the report. is_needed: nothing can be served here without it."""

    name: str
    is_ok: bool
    detail: str
    is_needed: bool = False


def examine(load_driver: LoadDriver = load_driver) -> list[Finding]:
    """Returns all findings, in the order of the report. load_driver: imports cuda.bindings.driver."""
    gpu = _check("NVIDIA GPU", lambda: _gpu(load_driver))
    return [
        _check("Python", lambda: f"{python_version()} at {sys.executable}, numpy {version('numpy')}", is_needed=True),
        _check("CPU partitions", lambda: core_partitions().note),
        _check("CPU kernels", _host_kernels, is_needed=True),
        _check("Triton server", lambda: str(find_triton().binary), is_needed=True),
        _check("Triton Python stub", _stub, is_needed=True),
        _check(
            "model repository",
            lambda: _holding(MODEL_REPO, "tensorrt_llm/config.pbtxt", "install faser-backend again"),
            is_needed=True,
        ),
        _check("demo pair", lambda: _holding(DEMO_PAIR, "target/model.safetensors", "--engine-dir is needed")),
        gpu,
        _check("green contexts", lambda: _green_contexts(load_driver))
        if gpu.is_ok
        else Finding("green contexts", False, "need an NVIDIA GPU"),
        _check("TensorRT-RTX", lambda: _tensorrt("rtx")),
        _check("TensorRT", lambda: _tensorrt("full")),
        _check("torch", lambda: _torch(gpu.is_ok), hint=TORCH_EXTRA),
        _check("Triton-language", lambda: version("triton"), hint=TORCH_EXTRA),
        _check("kernel compiler", check_kernel_compiler),
    ]


def print_report(findings: list[Finding]) -> None:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        mark = "yes" if finding.is_ok else "NO " if finding.is_needed else "no "
        print(f"{mark}  {finding.name:<{width}}  {finding.detail}")
    can_serve = all(finding.is_ok for finding in findings if finding.is_needed)
    print("This machine can serve." if can_serve else "This machine cannot serve: fix the lines marked NO.")


def _check(name: str, find: Callable[[], str], *, is_needed: bool = False, hint: str = "") -> Finding:
    try:
        return Finding(name, True, find(), is_needed)
    except PackageNotFoundError:
        return Finding(name, False, f"not installed ({hint})", is_needed)
    except (FaserError, ImportError, OSError) as error:
        return Finding(name, False, str(error), is_needed)


def _host_kernels() -> str:
    """Returns facts about the kernels of CPUs, and compiles none."""
    import llvmlite
    import numba

    from faser_backend.cpu.kernels import attention

    try:
        keeping = f"kernels are kept in {attention.kernel_directory()}"
    except RuntimeError:
        keeping = "every process compiles its kernels: set NUMBA_CACHE_DIR to a folder that can keep them"
    halves = (
        "fp16 KV caches are fast"
        if attention.has_halves()
        else "this CPU cannot convert fp16 KV caches: build engines with --kv-cache-dtype fp32"
    )
    compiler = f"numba {numba.__version__}, llvmlite {llvmlite.__version__}"
    return f"{compiler}, {_vectors()}, {keeping}; {halves}"


def _vectors() -> str:
    """Returns the instructions that multiply matrices here."""
    from llvmlite import binding

    from faser_backend.cpu.kernels.matrix_units import PRODUCTS, find_matrix_units
    from faser_backend.cpu.kernels.vector_products import TILE_ROWS, USED

    has = binding.get_host_cpu_features()
    widths = {"avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX", "sse2": "SSE2", "neon": "NEON"}
    width = next((name for feature, name in widths.items() if has.get(feature, False)), "no known vectors")
    has_units, found = find_matrix_units()
    units = f"of {', '.join(sorted(PRODUCTS[1]))} weights on {found}" if has_units else f"no matrix units ({found})"
    if USED and not has_units:
        units += f"; with --compute bf16, {USED}"
    return f"float32 products with {width} in tiles of {TILE_ROWS} rows; {units}"


def _stub() -> str:
    check_stub()
    stub = find_triton().stub
    return "part of the server" if stub is None else str(stub)


def _holding(folder: Path, file: str, remedy: str) -> str:
    if not (folder / file).is_file():
        raise FileNotFoundError(f"{folder}: missing; {remedy}")
    return str(folder)


def _gpu(load_driver: LoadDriver) -> str:
    try:
        facts = gpu_facts(load_driver())
    except ImportError:
        if not has_driver():
            raise DriverError("no NVIDIA driver (libcuda.so.1); engines run on the CPU") from None
        raise DriverError(f"there is an NVIDIA driver, but cuda-python is missing ({TORCH_EXTRA})") from None
    several = f" x {facts.num_gpus}" if facts.num_gpus > 1 else ""
    cuda = f"{facts.driver // 1000}.{facts.driver % 1000 // 10}"
    return f"{facts.name}{several}, {facts.num_sms} SMs, driver for CUDA {cuda}"


def _green_contexts(load_driver: LoadDriver) -> str:
    """Opens the SM splits that an engine would get, and closes them."""
    try:
        green = GreenSplits(load_driver(), 0)
    except (DriverError, ImportError) as error:
        raise DriverError(f"{error}; draft and target take turns") from None
    names = ", ".join(f"{draft.num_sms}/{target.num_sms}" for draft, target in green.splits)
    note = f"; {green.note}" if green.note else ""
    green.close()
    return f"{green.num_sms} SMs in groups of {green.group_sms}, draft/target {names}{note}"


def _tensorrt(flavour: Literal["rtx", "full"]) -> str:
    tensorrt = import_tensorrt(flavour)
    targets = tensorrt.compute_capabilities
    builds = f"builds for compute capability {', '.join(targets)}" if targets else "builds for this GPU"
    gpus = f"GPUs of compute capability {RTX_GPUS}; for an H100 (9.0) use torch or TensorRT"
    return f"{tensorrt.title}, {builds}; engines run on {gpus if flavour == 'rtx' else 'a GPU'}"


def _torch(has_gpu: bool) -> str:
    """Imports torch, which takes seconds, only if there is a GPU."""
    number = version("torch")
    if not has_gpu:
        return f"{number}; runs on the CPU here, for tests only"
    import torch

    if not torch.cuda.is_available():
        raise ImportError(f"torch {number} does not find the GPU; it was built for CUDA {torch.version.cuda}")
    return f"{number} for CUDA {torch.version.cuda}"


# -- an engine directory ------------------------------------------------------------------------------
# Its memory before anything is loaded. On a GPU: the plan of KV blocks. On a CPU: weights, the bytes of a token in the
# caches, and the pool that a server of this configuration would open now.


def memory_report(
    engine_dir: Path,
    *,
    gpu_gib: float | None = None,
    config: EngineConfig | None = None,
    load_driver: LoadDriver = load_driver,
) -> list[str]:
    """Returns the memory of a directory's engines, a line per purpose, in MiB.

    gpu_gib: of an assumed GPU. Raises ManifestError; ConfigError if a GPU is assumed for engines of a CPU, or if not
    even one context fits; DriverError if there is no GPU and none is assumed.
    """
    manifest = EngineManifest.load(engine_dir)
    config = with_prompt_rows(config or EngineConfig(), manifest)
    models = served_models(manifest, config)
    if manifest.runtime_spec.is_cpu:
        if gpu_gib is not None:
            raise ConfigError(f"--gpu-gib = {gpu_gib:g}: engines of runtime {manifest.runtime!r} run on a CPU")
        return _cpu_report(engine_dir, manifest, models, config)
    total = int(gpu_gib * 2**30) if gpu_gib is not None else memory_bytes(load_driver())
    return _gpu_report(manifest, models, config, total)


def _gpu_report(manifest: EngineManifest, models: ModelPair, config: EngineConfig, total: int) -> list[str]:
    """Counts one SM split beside the whole device, unless draft and target alternate."""
    has_split = models.draft is not None and not models.draft.spec.reads_target
    plan = plan_memory(
        models.present,
        config,
        dtype=manifest.dtype,
        kv_block_size=manifest.kv_block_size,
        free_bytes=total - CONTEXT_BYTES,
        num_partitions=2 if has_split else 1,
        unloaded_bytes=sum(model.num_weight_bytes for model in models.present),
        compiled_bytes=0 if manifest.runtime_spec.tensorrt else None,  # known once the engines are loaded
    )
    return [
        f"{total / 2**20:8.0f} MiB  of the GPU, less {CONTEXT_BYTES >> 20} MiB of CUDA's own:",
        *plan.report(manifest.kv_block_size),
    ]


def _cpu_report(engine_dir: Path, manifest: EngineManifest, models: ModelPair, config: EngineConfig) -> list[str]:
    runtime = open_runtime(engine_dir, replace(manifest, draft=models.draft), config)
    try:
        size = manifest.kv_block_size
        num_blocks = choose_num_blocks(runtime, models, config)
        block_bytes = [runtime.bytes_per_block(model.spec) for model in models.present]
        free_bytes = runtime.free_bytes()
    finally:
        runtime.close()
    num_contexts = num_blocks * size / models.max_context
    lines = [f"{manifest.compute:>12}  products", _line(free_bytes, "free on this machine")]
    lines += [
        _line(model.num_weight_bytes, f"weights of the {name}, {choose_copy(model.num_weight_bytes)[1]}")
        for name, model in zip(ModelPair._fields, models.present, strict=False)
    ]
    pool = f"{num_blocks} KV blocks of {size} tokens, {num_blocks * size} in all: {num_contexts:.1f} requests of"
    lines += [
        _line(num_blocks * sum(block_bytes), f"{pool} {models.max_context} tokens, the context"),
        *(
            f"{num_bytes // size:8d} bytes of a token in the {name}'s cache ({manifest.kv_cache_dtype})"
            for name, num_bytes in zip(ModelPair._fields, block_bytes, strict=False)
        ),
        _line(-(-models.max_context // size) * sum(block_bytes), "of a request of maximal length in the caches"),
    ]
    return lines


def _line(num_bytes: int, what: str) -> str:
    return f"{num_bytes / 2**20:8.1f} MiB  {what}"
