"""An EAGLE-3 head that nobody trained, for checks of a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np

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
