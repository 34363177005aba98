"""What the engines of a benchmark take of this machine's memory, told and checked before any is opened.

All contestants are open at once, for they take turns. Engines of one directory read one mapped weight file where the
runtime maps it; each has KV pools of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from faser_backend.core.errors import ConfigError
from faser_backend.device.kv_pool import KvPool
from faser_backend.device.runtime import ModelPair
from faser_backend.manifest import EngineManifest

GIB = 1 << 30
POOL_SHARE = 0.5  # of the memory that is left beside weights: answers, buffers and others need some too
ENGINE_BYTES = 24 << 20  # buffers of calls and tables of positions, about
MAPPED = "llvm"  # the runtime whose engines share weights


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """num_kv_blocks of each engine, and the bytes that all of them take together."""

    num_kv_blocks: int
    num_bytes: int
    available_bytes: int

    def __str__(self) -> str:
        return f"memory: about {self.num_bytes / GIB:.1f} GiB, {self.available_bytes / GIB:.1f} GiB are available"


def plan_memory(
    manifest: EngineManifest, num_engines: int, wanted_tokens: int, available_bytes: int | None = None
) -> MemoryPlan:
    """KV blocks for wanted_tokens in each of the engines, or as many as fit.

    available_bytes: None asks this machine. Raises ConfigError where not even one context of each fits.
    """
    available = available_memory() if available_bytes is None else available_bytes
    models = ModelPair(manifest.target, manifest.draft)
    block_size = manifest.kv_block_size
    block_bytes = sum(KvPool.bytes_per_block(m.spec, block_size, manifest.kv_cache_dtype) for m in models.present)
    copies = 1 if manifest.runtime == MAPPED else num_engines
    fixed = copies * sum(model.num_weight_bytes for model in models.present) + num_engines * ENGINE_BYTES
    least = -(-models.max_context // block_size)
    fitting = int((available - fixed) * POOL_SHARE) // (block_bytes * num_engines)
    num_blocks = max(min(-(-wanted_tokens // block_size), fitting), least)
    plan = MemoryPlan(num_blocks, fixed + num_engines * num_blocks * block_bytes, available)
    if plan.num_bytes > available:
        each = plan.num_bytes / num_engines / GIB
        raise ConfigError(
            f"{plan}: {num_engines} engines with one context of {models.max_context} tokens each do not fit; choose "
            f"fewer with --policies (about {each:.2f} GiB each), or build with a smaller --max-context"
        )
    return plan


def available_memory() -> int:
    """Bytes that can be taken without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise ConfigError("/proc/meminfo: has no MemAvailable")
