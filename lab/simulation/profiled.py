"""A simulated world from a profiled engine: measured costs, the demo pair's acceptance."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from faser_backend.core.errors import ConfigError
from faser_backend.manifest import EngineManifest, ModelEngine
from faser_backend.serving.profile_store import load_cost_model
from lab.simulation.acceptance import demo_process, fitted_fits
from lab.simulation.engine import World


def profile_world(
    engine_dir: Path, max_num_seqs: int, acceptance: float | None = None, *, kind: str = "sampled"
) -> World:
    """kind: of the demo pair's traces, "greedy" or "sampled". Raises ManifestError or ConfigError."""
    manifest = EngineManifest.load(engine_dir)
    if manifest.draft is None:
        raise ConfigError(f"{engine_dir}: has no draft model; what is simulated is the acceptance of a pair of models")
    costs = load_cost_model(engine_dir, manifest)
    if not costs.is_measured:
        raise ConfigError(f"{engine_dir}: has no profile; run `faser profile {engine_dir}`")
    exits = tuple(
        (index, segment.last_layer) for index, segment in enumerate(manifest.target.segments) if segment.has_exit_scores
    )
    max_context = min(manifest.target.spec.max_context, manifest.draft.spec.max_context)
    aucs = _exit_aucs(kind, [layer / manifest.target.spec.num_layers for _, layer in exits])
    process = demo_process(kind).with_exits(aucs)
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
            f"Acceptance is that {level} ({kind} texts)."
            + "".join(f" Exit at {layer}: AUC {auc:.2f}." for (_, layer), auc in zip(exits, aucs, strict=True)),
            "Prompt chunks pay for their model calls alone. Calls of a shape that was never seen cost no more.",
            "Sample-and-match; every request decodes to the trace's length; no prompts are shared; clients take no "
            "time.",
        ),
    )


def _layers(model: ModelEngine) -> tuple[int, ...]:
    return tuple(segment.last_layer - segment.first_layer for segment in model.segments)


def _exit_aucs(kind: str, depths: list[float]) -> tuple[float, ...]:
    """Measured on the demo pair, beyond the draft's margin; between its exits interpolated by relative depth."""
    measured = {int(layer): figures["auc_given_margin"] for layer, figures in fitted_fits()[kind]["exits"].items()}
    known = np.array([0.0, *(layer / 6 for layer in measured), 1.0])  # of 6 layers; nothing is known before the first
    aucs = np.array([0.5, *measured.values(), 0.99])
    return tuple(np.maximum(np.interp(depths, known, aucs), 0.5).tolist())
