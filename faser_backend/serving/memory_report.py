"""`faser doctor --engine-dir`: what an engine directory takes of a device's memory, before anything is loaded.

On a GPU the plan by which KV blocks are given out; on a CPU weights, what a token takes in the caches, and the pool
that a server of this configuration would open now.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from faser_backend.config import EngineConfig
from faser_backend.core.errors import ConfigError
from faser_backend.device.cuda.identity import load_driver, memory_bytes
from faser_backend.device.cuda.memory_plan import plan_memory
from faser_backend.device.runtime import ModelPair
from faser_backend.manifest import EngineManifest
from faser_backend.serving.compose import choose_num_blocks
from faser_backend.serving.drafting import served_models
from faser_backend.serving.runtimes import open_runtime

CONTEXT_BYTES = 600 << 20  # an allowance for a CUDA context with its modules

LoadDriver = Callable[[], Any]


def memory_report(
    engine_dir: Path,
    *,
    gpu_gib: float | None = None,
    config: EngineConfig | None = None,
    load_driver: LoadDriver = load_driver,
) -> list[str]:
    """What the engines of a directory take, a line per purpose, in MiB.

    gpu_gib: of a GPU that is not here. Raises ManifestError; ConfigError where a GPU's size is given for engines of a
    CPU, or where not even one context fits; DriverError where there is no GPU and none was named.
    """
    manifest, config = EngineManifest.load(engine_dir), config or EngineConfig()
    models = served_models(manifest, config)
    if manifest.runtime_spec.is_cpu:
        if gpu_gib is not None:
            raise ConfigError(f"--gpu-gib = {gpu_gib:g}: engines of runtime {manifest.runtime!r} run on a CPU")
        return _cpu_report(engine_dir, manifest, models, config)
    total = int(gpu_gib * 2**30) if gpu_gib is not None else memory_bytes(load_driver())
    return _gpu_report(manifest, models, config, total)


def _gpu_report(manifest: EngineManifest, models: ModelPair, config: EngineConfig, total: int) -> list[str]:
    """With one split beside the whole device, where draft and target do not run in turn."""
    has_split = models.draft is not None and not models.draft.spec.reads_target
    plan = plan_memory(
        models.present,
        dtype=manifest.dtype,
        kv_block_size=manifest.kv_block_size,
        free_bytes=total - CONTEXT_BYTES,
        num_partitions=2 if has_split else 1,
        max_num_seqs=config.max_num_seqs,
        max_prefill_tokens=config.max_prefill_tokens,
        unloaded_bytes=sum(model.num_weight_bytes for model in models.present),
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
    # Kernels of ours read weights from the file; graphs hold their own.
    how = "mapped: pages that engines of the directory share" if manifest.runtime_spec.is_weights_only else "resident"
    num_contexts = num_blocks * size / models.max_context
    lines = [_line(free_bytes, "free on this machine")]
    lines += [
        _line(model.num_weight_bytes, f"weights of the {name}, {how}")
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
