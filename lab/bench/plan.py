"""Estimates the memory and time of a benchmark before it begins, and reduces the benchmark to what is available.

All engines are open at once, because they alternate. Engines of one directory on a CPU share one mapped weight
file. Each has its own KV pools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from faser_backend.core.errors import ConfigError
from faser_backend.cpu.kv_pool import KvPool
from faser_backend.cpu.weights import available_memory
from faser_backend.device.runtime import ModelPair
from faser_backend.lab.answers import Answer
from faser_backend.lab.contestants import LOADS, MAX_NUM_SEQS, Contestant, Load, Sizing, taking_part
from faser_backend.manifest import EngineManifest

GIB = 1 << 30
POOL_SHARE = 0.5  # of the memory beside weights: answers, buffers and other processes need the rest
ENGINE_BYTES = 24 << 20  # roughly: buffers of calls and position tables
MAX_CONTEXT = 768  # of a request of the bench; bounds the KV pools of all engines together
PROBE_TOKENS = 6
MIN_TOKENS = 8  # of an answer: shorter ones measure mostly prompts
TIMELINE_WAVES, TRIAL_WAVES = 4, 1.25
SHARES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.15, 0.1)  # of lengths and durations, in the order of trial
CLOSED_LOADS = [load for load in LOADS if not load.is_open]  # the busiest last


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The KV blocks of each engine, and the memory of all engines in words ("" if the runtime counts it)."""

    num_kv_blocks: int
    words: str = ""


def plan_memory(manifest: EngineManifest, num_engines: int, available_bytes: int | None = None) -> MemoryPlan:
    """Returns a plan with KV blocks for every request in flight, or as many as fit. On a GPU the runtime counts its
    memory when it opens.

    available_bytes: None asks this machine. Raises ConfigError if not even one context of each engine fits.
    """
    models, size = ModelPair(manifest.target, manifest.draft), manifest.kv_block_size
    context = manifest.target.spec.max_context
    wanted = -(-max(context, MAX_NUM_SEQS * min(context, MAX_CONTEXT)) // size)
    if not manifest.runtime_spec.is_cpu:
        return MemoryPlan(wanted)
    available = available_memory() if available_bytes is None else available_bytes
    block_bytes = sum(KvPool.bytes_per_block(m.spec, size, manifest.kv_cache_dtype) for m in models.present)
    fixed = sum(model.num_weight_bytes for model in models.present) + num_engines * ENGINE_BYTES
    fitting = int((available - fixed) * POOL_SHARE) // (block_bytes * num_engines)
    num_blocks = max(min(wanted, fitting), -(-models.max_context // size))
    num_bytes = fixed + num_engines * num_blocks * block_bytes
    words = f"memory: about {num_bytes / GIB:.1f} GiB, {available / GIB:.1f} GiB are available"
    if num_bytes > available:
        raise ConfigError(
            f"{words}: {num_engines} engines with one context of {models.max_context} tokens each do not fit; choose "
            f"fewer with --policies (about {num_bytes / num_engines / GIB:.2f} GiB each), or build with a smaller "
            "--max-context"
        )
    return MemoryPlan(num_blocks, words)


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of the reference until all requests of a wave have a token, and per further token."""

    first_s: float
    token_s: float

    @classmethod
    def of(cls, answers: Sequence[Answer], seconds: float) -> Speed:
        """Derives the speed from one wave of answers of several tokens each."""
        first_s = max(answer.response_s[0] - answer.start_s for answer in answers)
        num_tokens = max(len(answer.token_ids) for answer in answers)
        return cls(min(first_s, seconds), max(seconds - first_s, 0.0) / max(num_tokens - 1, 1))

    def wave_s(self, num_tokens: int) -> float:
        return self.first_s + self.token_s * (num_tokens - 1)


def load_s(load: Load, sizing: Sizing, contestants: list[Contestant], speeds: Mapping[str, Speed]) -> float:
    """Estimates the seconds of a load at one temperature, all at the reference's speed. speeds: by closed load."""
    num_runs = len(taking_part(contestants, load, sizing)) * (sizing.repeats + 1)
    if load.is_open:
        return 2 * speeds[CLOSED_LOADS[-1].name].wave_s(2 * sizing.max_tokens) + num_runs * sizing.bursty_s
    wave_s = speeds[load.name].wave_s(sizing.max_tokens)
    return TRIAL_WAVES * wave_s + num_runs * max(sizing.loop_s, sizing.waves_of(load) * wave_s)


def timeline_s(sizing: Sizing, speeds: Mapping[str, Speed]) -> float:
    """Estimates the seconds of the timeline of one mode."""
    return TIMELINE_WAVES * speeds[CLOSED_LOADS[1].name].wave_s(sizing.max_tokens)


def estimate_s(
    sizing: Sizing, contestants: list[Contestant], speeds: Mapping[str, Speed], timeline_modes: int = 0
) -> float:
    """Estimates the seconds of all loads at all temperatures, and of the timelines."""
    loads_s = sum(load_s(load, sizing, contestants, speeds) for load in LOADS)
    return len(sizing.temperatures) * loads_s + timeline_modes * timeline_s(sizing, speeds)


def fitted(
    sizing: Sizing, contestants: list[Contestant], speeds: Mapping[str, Speed], budget_s: float, timeline_modes: int = 0
) -> Sizing:
    """Returns the sizing, reduced to budget_s by shorter answers and then by fewer repeats, or the smallest sizing if
    none fits."""
    tried = sizing
    for repeats, share in product(range(sizing.repeats, 0, -1), SHARES):
        tried = replace(
            sizing,
            repeats=repeats,
            max_tokens=max(round(share * sizing.max_tokens), min(MIN_TOKENS, sizing.max_tokens)),
            loop_s=share * sizing.loop_s,
            bursty_s=max(share, 0.5) * sizing.bursty_s,
            min_waves=sizing.min_waves if share == 1.0 else 1,
        )
        if estimate_s(tried, contestants, speeds, timeline_modes) <= budget_s:
            return tried
    return tried


def in_minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
