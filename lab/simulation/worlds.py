"""Worlds: a named machine and pair, or a profiled engine of this machine; every assumption in words."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist

import numpy as np

from faser_backend.core.errors import ConfigError
from faser_backend.lab.shapes import MACHINES, PAIRS
from faser_backend.lab.simulation.acceptance import RETENTION, demo_process, fitted_fits
from faser_backend.lab.simulation.costs import ASSUMPTIONS, kv_capacity_tokens, roofline
from faser_backend.lab.simulation.engine import World
from faser_backend.manifest import EngineManifest, ModelEngine
from faser_backend.serving.profile_store import load_knowledge

AGREEMENT = ("Draft and target agree", "Acceptance is that")  # how what is assumed of acceptance begins
DECODING = "Sample-and-match; every request decodes to the trace's length; no prompts are shared; clients take no time."
SPREAD_LEVELS = 64  # acceptances that stand for a normal distribution
ACCEPTANCE = 0.75  # share of positions at which draft and target agree, of pairs that nobody has traced here
EXIT_AUC = 0.75  # of an exit at a fifth of the depth, given the draft's margin


def roofline_world(
    hardware: str, pair_name: str, *, max_context: int, acceptance: float = ACCEPTANCE, exit_auc: float = EXIT_AUC
) -> World:
    """Raises ConfigError for unknown names and for a pair that does not fit the machine's memory."""
    for option, name, known in (("hardware", hardware, MACHINES), ("pair", pair_name, PAIRS)):
        if name not in known:
            raise ConfigError(f"{option} = {name!r}: unknown; known are {', '.join(known)}")
    machine, pair = MACHINES[hardware], PAIRS[pair_name]
    edges = (0, *pair.exit_layers, pair.target.num_layers)
    num_kv_tokens = kv_capacity_tokens(machine, pair)
    process = demo_process("sampled").at_level(acceptance).with_exits((exit_auc,) * len(pair.exit_layers))
    return World(
        name=f"{hardware} + {pair_name}",
        costs=roofline(machine, pair),
        process=process,
        target_layers=tuple(last - first for first, last in pairwise(edges)),
        draft_layers=(pair.draft.num_layers,),
        exits=tuple(enumerate(pair.exit_layers)),
        num_kv_tokens=num_kv_tokens,
        max_context=max_context,
        assumptions=(
            f"{machine.num_gpus} x {machine.flops_per_s / 1e12:.0f} TFLOP/s bf16 dense, "
            f"{machine.bytes_per_s / 1e12:g} TB/s, {machine.memory_bytes / 1e9:.0f} GB (data sheet); "
            f"room for the KV of {num_kv_tokens} tokens of both models.",
            *ASSUMPTIONS,
            f"Draft and target agree at {acceptance:.0%} of positions; margins, memory along a text and differences "
            "between requests are those of the demo pair at temperature 0.8.",
            f"Exit after layer {', '.join(map(str, pair.exit_layers))} of {pair.target.num_layers}: its margin tells "
            f"accepted from rejected tokens with AUC {exit_auc:g} beyond what the draft's margin tells; its threshold "
            f"keeps {RETENTION:.0%} of the tokens that would be accepted.",
            DECODING,
        ),
    )


def with_levels(world: World, levels: list[float], words: str) -> World:
    """The world with requests that differ as planted."""
    kept = [line for line in world.assumptions if not line.startswith(AGREEMENT)]
    told = f"Requests differ in acceptance: {words}; margins and the memory along a text are those of the demo pair."
    return replace(world, process=world.process.with_levels(levels), assumptions=(*kept, told))


def spread_levels(mean: float, deviation: float) -> list[float]:
    """Acceptances of requests, each as likely, normal around the mean and cut to what can be."""
    normal = NormalDist(mean, deviation)
    return [min(max(normal.inv_cdf((i + 0.5) / SPREAD_LEVELS), 0.02), 0.98) for i in range(SPREAD_LEVELS)]


def profile_world(engine_dir: Path, max_num_seqs: int, acceptance: float | None = None) -> World:
    """Raises ManifestError or ConfigError."""
    manifest = EngineManifest.load(engine_dir)
    if manifest.draft is None:
        raise ConfigError(f"{engine_dir}: has no draft model; what is simulated is the acceptance of a pair of models")
    costs = load_knowledge(engine_dir, manifest).costs
    if not costs.is_measured:
        raise ConfigError(f"{engine_dir}: has no profile; run `faser profile {engine_dir}`")
    exits = tuple(
        (index, segment.last_layer) for index, segment in enumerate(manifest.target.segments) if segment.has_exit_scores
    )
    max_context = min(manifest.target.spec.max_context, manifest.draft.spec.max_context)
    aucs = _exit_aucs([layer / manifest.target.spec.num_layers for _, layer in exits])
    process = demo_process("sampled").with_exits(aucs)
    level = "of the demo pair"
    if acceptance is not None:
        process, level = process.at_level(acceptance), f"of the demo pair, moved to {acceptance:.0%} of positions"
    return World(
        name=f"profile of {engine_dir.name}",
        costs=costs,
        process=process,
        target_layers=_layers(manifest.target),
        draft_layers=_layers(manifest.draft),
        exits=exits,
        num_kv_tokens=max_num_seqs * max_context,
        max_context=max_context,
        assumptions=(
            f"Costs are those that `faser profile` measured; KV memory holds {max_num_seqs} full contexts of "
            f"{max_context} tokens.",
            f"Acceptance is that {level} (sampled texts)."
            + "".join(f" Exit at {layer}: AUC {auc:.2f}." for (_, layer), auc in zip(exits, aucs, strict=True)),
            "Prompt chunks pay for their model calls alone. Calls of a shape that was never seen cost no more.",
            DECODING,
        ),
    )


def _layers(model: ModelEngine) -> tuple[int, ...]:
    return tuple(segment.last_layer - segment.first_layer for segment in model.segments)


def _exit_aucs(depths: list[float]) -> tuple[float, ...]:
    """Measured on the demo pair, beyond the draft's margin; between its exits interpolated by relative depth."""
    measured = {int(layer): figures["auc_given_margin"] for layer, figures in fitted_fits()["sampled"]["exits"].items()}
    known = np.array([0.0, *(layer / 6 for layer in measured), 1.0])  # of 6 layers; nothing is known before the first
    aucs = np.array([0.5, *measured.values(), 0.99])
    return tuple(np.maximum(np.interp(depths, known, aucs), 0.5).tolist())
