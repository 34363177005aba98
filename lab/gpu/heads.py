"""EAGLE-3 heads for checks of a GPU: one that nobody trained, and the shapes of one beside a model of `lab.shapes`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from engines.torch_build import head_segments, torch_segments
from faser_backend.device.runtime import ModelPair
from faser_backend.manifest import FileSpec, ModelEngine
from lab.shapes import Pair
from lab.train_head.begin import feature_layers, head_spec, new_head, read_target
from lab.train_head.export import head_config, save_head

KNOWN_IDS = 0.75  # of the vocabulary that the untrained head knows


def write_untrained_head(target_dir: Path, directory: Path, seed: int) -> Path:
    """A head as training begins, which is now and then right. Returns the directory of its checkpoint."""
    target = read_target(target_dir)
    spec = head_spec(target.spec, target.spec.num_kv_heads, target.spec.intermediate_size)
    token_ids = np.arange(int(KNOWN_IDS * spec.vocab_size))
    head = new_head(target, spec, token_ids, seed)
    config = head_config(spec, target.spec, feature_layers(target.spec), token_ids.size)
    save_head(directory, config, dict(head.named_parameters()), token_ids)
    return directory


def head_pair(shape: Pair, dtype: str) -> ModelPair:
    """The target of a pair and a head of it as a manifest would describe them; their files do not exist."""
    target = replace(shape.target, feature_layers=feature_layers(shape.target))
    head = head_spec(target, target.num_kv_heads, target.intermediate_size)
    files = [FileSpec(f"{name}.synthetic", name, 0) for name in ("target", "draft")]
    cuts = (*shape.exit_layers, target.num_layers)
    return ModelPair(
        ModelEngine(target, files[0], torch_segments(target, files[0], cuts, dtype)),
        ModelEngine(head, files[1], head_segments(head, target, files[1], dtype)),
    )
