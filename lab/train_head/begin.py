"""What a head takes from its target before training: dimensions, embedding, last norm, the head's rows, last layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engines.checkpoint import open_checkpoint
from engines.families import read_spec
from engines.weights import ModelWeights
from faser_backend.core.errors import ConfigError
from faser_backend.core.model import EAGLE3, ModelSpec
from lab.train_head.model import Head

NUM_FEATURES = 3
SPREAD = 0.02  # deviation of what is not taken from the target


class TargetTensors:
    """A target's weights in torch, read when asked for: float32, matrices [outputs, inputs]."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError."""
        checkpoint = open_checkpoint(path)
        self.spec = read_spec(checkpoint)
        self._weights = ModelWeights(checkpoint, self.spec)

    def __getitem__(self, name: str) -> Tensor:
        array = np.asarray(self._weights[name]).astype(np.float32)
        is_matrix = self._weights.sources[name].is_transposed
        return torch.from_numpy(np.ascontiguousarray(array.T if is_matrix else array))

    @property
    def lm_head(self) -> Tensor:
        """[vocab_size, hidden_size]; the embedding where the target has no other."""
        return self["lm_head" if "lm_head" in self._weights else "embedding"]

    def layer(self, index: int) -> dict[str, Tensor]:
        """By name, but for experts."""
        prefix = f"layers.{index}."
        names = [name for name in self._weights if name.startswith(prefix) and ".expert" not in name]
        return {name.removeprefix(prefix): self[name] for name in names}


@dataclass(frozen=True, slots=True, eq=False)
class TargetParts:
    """Of a target: what training reads. Matrices are [outputs, inputs], float32."""

    spec: ModelSpec
    embedding: Tensor  # [vocab_size, hidden_size]
    norm: Tensor  # [hidden_size], before the logits
    lm_head: Tensor  # [vocab_size, hidden_size]
    last_layer: dict[str, Tensor]


def read_target(path: Path) -> TargetParts:
    """Raises CheckpointError."""
    tensors = TargetTensors(path)
    last = tensors.layer(tensors.spec.num_layers - 1)
    return TargetParts(tensors.spec, tensors["embedding"], tensors["norm"], tensors.lm_head, last)


def feature_layers(spec: ModelSpec) -> tuple[int, ...]:
    """A low, a middle and a high layer, by whose inputs a head is fed: the published choice where there is room."""
    last = spec.num_layers
    if last < NUM_FEATURES + 1:
        raise ConfigError(f"target: {last} layers: a head reads {NUM_FEATURES} of them, and needs one more")
    published = (2, last // 2, last - 3)
    return published if is_published(published, spec) else (1, 1 + (last - 1) // 2, last - 1)


def is_published(layers: tuple[int, ...], spec: ModelSpec) -> bool:
    """Whether these are what readers take where a config names no layers."""
    published = (2, spec.num_layers // 2, spec.num_layers - 3)
    return layers == published and published[0] < published[1] < published[2]


def head_spec(target: ModelSpec, num_kv_heads: int, intermediate_size: int) -> ModelSpec:
    """The head as a Llama of one layer, without biases and experts."""
    return replace(
        target,
        num_layers=1,
        num_kv_heads=num_kv_heads,
        intermediate_size=intermediate_size,
        tie_word_embeddings=False,
        family=EAGLE3,
        has_qkv_bias=False,
        has_attention_out_bias=False,
        has_mlp_bias=False,
        has_qk_norm=False,
        num_experts=0,
        num_experts_per_token=0,
        feature_layers=(),
    )


def new_head(target: TargetParts, spec: ModelSpec, token_ids: np.ndarray, seed: int) -> Head:
    """A head that begins as its target's last layer over the highest feature; its logits are the target's rows.

    Parts without a counterpart are small random numbers; so is a matrix of another shape than the target's.
    """
    head = Head(spec, NUM_FEATURES, target.spec.hidden_size, token_ids.size)
    rng = torch.Generator().manual_seed(seed)
    layer, hidden = target.last_layer, spec.hidden_size
    num_q, num_kv = target.spec.num_heads * spec.head_dim, target.spec.num_kv_heads * spec.head_dim
    q, k, v = layer["qkv"].split([num_q, num_kv, num_kv])
    taken = {
        "midlayer.hidden_norm.weight": layer["input_norm"],
        "midlayer.post_attention_layernorm.weight": layer["mlp_norm"],
        "midlayer.self_attn.o_proj.weight": layer["attention_out"],
        "norm.weight": target.norm,
        "lm_head.weight": target.lm_head[torch.from_numpy(token_ids)],
    } | {f"midlayer.mlp.{name}_proj.weight": layer[name] for name in ("gate", "up", "down") if name in layer}
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, SPREAD, generator=rng)
            if name in taken and taken[name].shape == parameter.shape:
                parameter.copy_(taken[name])
        head.fc.weight[:, -hidden:] = torch.eye(hidden)
        attention = head.midlayer.self_attn
        for projection, matrix in ((attention.q_proj, q), (attention.k_proj, k), (attention.v_proj, v)):
            num_heads = projection.weight.shape[0] // spec.head_dim
            of_heads = matrix.unflatten(0, (-1, spec.head_dim))
            if num_heads % of_heads.shape[0] == 0:  # more heads than the target has: each begins as its group's
                repeated = of_heads.repeat_interleave(num_heads // of_heads.shape[0], dim=0)
                projection.weight[:, hidden:] = repeated.flatten(0, 1)
    return head


def frequent_ids(token_ids: np.ndarray, vocab_size: int, num_ids: int) -> np.ndarray:
    """[num_ids] rising: the ids that occur most often; of equals the lowest, which tokenizers learned first."""
    counts = np.bincount(token_ids, minlength=vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:num_ids])
