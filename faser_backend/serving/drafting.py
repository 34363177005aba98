"""Selects the drafter of an engine: its draft model, n-grams of the text so far, or both.

The choice depends on option `draft` and on the models in the manifest, and is made here alone.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from faser_backend.core.config import EngineConfig
from faser_backend.core.errors import ConfigError
from faser_backend.core.ports import PhaseTimes, Sampler
from faser_backend.device.runtime import ModelPair
from faser_backend.manifest import EngineManifest
from faser_backend.pipeline.draft import ModelProposer
from faser_backend.pipeline.head import BlockProposer, HeadProposer
from faser_backend.pipeline.joint import JointProposer
from faser_backend.pipeline.ngram import NgramProposer
from faser_backend.pipeline.propose import Proposer
from faser_backend.policy.speculation import Knowledge
from faser_backend.serving.profile_store import load_knowledge, with_ngrams

BOTH = "model+ngram"


def served_models(manifest: EngineManifest, config: EngineConfig) -> ModelPair:
    """Returns the models to load; none for drafting if n-grams draft. Raises ConfigError for bad combinations."""
    if config.draft in ("model", BOTH) and manifest.draft is None:
        raise ConfigError(
            f"draft = {config.draft!r}: the engine directory has no draft model; use 'ngram', or build with one"
        )
    draft = None if config.draft == "ngram" else manifest.draft
    if draft is None and config.early_exit == "on":
        raise ConfigError(
            "early_exit = 'on': an exit scores the candidates of a draft model, and n-grams draft here; use 'auto'"
        )
    if config.draft == BOTH and config.early_exit == "on":
        raise ConfigError(f"early_exit = 'on' with draft = {BOTH!r}: n-gram chains have no exits; use 'auto'")
    if config.early_exit == "on" and config.policy != "none" and not manifest.exit_layers:
        raise ConfigError("early_exit = 'on': the engine has no exits; build it with --exit-layers, then profile it")
    target = manifest.target
    if draft is None and manifest.runtime_spec.is_cpu:  # elsewhere features are an input of the segments
        target = replace(target, spec=replace(target.spec, feature_layers=()))  # that a head would read
    return ModelPair(target, draft)


def serving_knowledge(engine_dir: Path, manifest: EngineManifest, config: EngineConfig) -> Knowledge:
    """Returns the profile's knowledge for policies. Raises ConfigError, also if the profile does not fit.

    If n-grams draft, the measured costs and acceptance of the draft model are left out.
    """
    models = served_models(manifest, config)
    knowledge = load_knowledge(engine_dir, manifest)
    if models.draft is None:
        margins = knowledge.margins if manifest.draft is None else {}
        return Knowledge(with_ngrams(knowledge.costs), margins)
    if config.acceptance == "rejection" and knowledge.costs.num_idle is None:
        # It needs the draft's probabilities: the host draws.
        return replace(knowledge, costs=replace(knowledge.costs, drafts_at_once=False))
    return knowledge


def make_proposer(
    models: ModelPair, config: EngineConfig, sampler: Sampler, times: PhaseTimes, block_tables: np.ndarray
) -> Proposer:
    """Returns the proposer. block_tables [max_num_seqs, max_blocks], by slot."""
    keeps_probs = config.acceptance == "rejection"
    look_ups = NgramProposer(times)
    if models.draft is None:
        return look_ups
    proposer = HeadProposer if models.draft.spec.reads_target else ModelProposer
    if models.draft.spec.block_size:
        proposer = BlockProposer
    model = proposer(sampler, times, block_tables, keeps_probs=keeps_probs)
    return JointProposer(model, look_ups, config.max_prefill_tokens) if config.draft == BOTH else model
