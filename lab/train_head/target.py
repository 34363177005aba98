"""The target in torch: whole passes over conversations, to learn from their states, and single steps that write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from faser_backend.core.errors import ConfigError
from faser_backend.core.model import ModelSpec, rotary_tables
from faser_backend.engines.families import read_spec
from faser_backend.engines.pairs import open_checkpoint
from faser_backend.engines.weights import ModelWeights
from faser_backend.lab.train_head.head import rotated

NUM_FEATURES = 3
ROWS_AT_ONCE = 4096  # whose logits over the whole vocabulary are in memory together

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Target:
    """A Llama-like model on a torch device. States between layers are float32, products have the device's half type."""

    def __init__(self, path: Path, device: torch.device, *, is_exact: bool = False) -> None:
        """Reads a checkpoint of any layout. is_exact: computes in float32.

        Raises CheckpointError, or ConfigError for a model that this code cannot run.
        """
        checkpoint = open_checkpoint(path)
        self.spec = spec = read_spec(checkpoint.fields)
        if spec.num_experts or spec.has_attention_out_bias or spec.has_mlp_bias:
            raise ConfigError(
                f"target: family {spec.family}: train-head runs no experts, and no biases but those of qkv"
            )
        self.device = device
        weights = ModelWeights(checkpoint, spec)
        is_bf16 = device.type == "cpu" or weights.checkpoint_dtype == "BF16"
        self.dtype = torch.float32 if is_exact else torch.bfloat16 if is_bf16 else torch.float16
        self.layers: list[dict[str, Tensor]] = [{} for _ in range(spec.num_layers)]  # matrices are [outputs, inputs]
        ends: dict[str, Tensor] = {}
        for name in weights:
            array = np.asarray(weights[name]).astype(np.float32)
            tensor = torch.from_numpy(np.ascontiguousarray(array.T if weights.sources[name].is_transposed else array))
            tensor = tensor.to(device, self.dtype if tensor.ndim == 2 or name.endswith("bias") else torch.float32)
            if name.startswith("layers."):
                _, layer, part = name.split(".")
                self.layers[int(layer)][part] = tensor
            else:
                ends[name] = tensor
        self.embedding, self.norm = ends["embedding"], ends["norm"]  # [vocab_size, hidden_size], [hidden_size]
        self.lm_head = ends.get("lm_head", self.embedding)
        self._cos, self._sin = (torch.from_numpy(table).to(device) for table in rotary_tables(spec))
        self._features = feature_layers(spec)

    @torch.no_grad()
    def states(self, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what a head learns from token_ids [B, n], which padding may follow.

        Features [B, n, F * d], the inputs of some layers side by side; the normed output of the last layer [B, n, d];
        and the most likely token after each one [B, n].
        """
        groups = self.spec.num_heads // self.spec.num_kv_heads

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
            return scaled_dot_product_attention(q, k, v, is_causal=True)

        features: list[Tensor] = []
        n = token_ids.shape[1]
        normed = self._run(token_ids, self._cos[:n], self._sin[:n], attend, features)
        best = [self.logits(rows).argmax(-1) for rows in normed.flatten(0, 1).split(ROWS_AT_ONCE)]
        return torch.cat(features, dim=-1), normed, torch.cat(best).view_as(token_ids)

    @torch.no_grad()
    def step(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Returns logits [B, vocab_size] after token_ids [B] at positions [B]. attend: sees q [B, heads, 1, head_dim],
        and k and v alike."""
        cos, sin = self._cos[positions][:, None, None], self._sin[positions][:, None, None]  # [B, 1, 1, head_dim / 2]
        return self.logits(self._run(token_ids[:, None], cos, sin, attend)[:, 0])

    def logits(self, normed: Tensor) -> Tensor:
        return linear(normed, self.lm_head)

    def _run(
        self, token_ids: Tensor, cos: Tensor, sin: Tensor, attend: Attend, features: list[Tensor] | None = None
    ) -> Tensor:
        """Returns the normed states [B, n, d] of token_ids [B, n]. features: gets the inputs of some layers."""
        spec = self.spec
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        x = embedding(token_ids, self.embedding).float()
        for index, layer in enumerate(self.layers):
            if features is not None and index in self._features:
                features.append(x.to(self.dtype))
            joined = linear(self._normed(x, layer["input_norm"]), layer["qkv"], layer.get("qkv_bias"))
            q, k, v = (
                part.unflatten(2, (-1, spec.head_dim)).transpose(1, 2)
                for part in joined.split([q_size, kv_size, kv_size], -1)
            )
            if spec.has_qk_norm:
                q, k = self._normed(q, layer["q_norm"]), self._normed(k, layer["k_norm"])
            mixed = attend(index, rotated(q, cos, sin), rotated(k, cos, sin), v).transpose(1, 2).flatten(2)
            x = x + linear(mixed, layer["attention_out"]).float()
            normed = self._normed(x, layer["mlp_norm"])
            gated = silu(linear(normed, layer["gate"]).float()).to(self.dtype) * linear(normed, layer["up"])
            x = x + linear(gated, layer["down"]).float()
        return self._normed(x, self.norm)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x.float(), weight.shape, weight, self.spec.rms_eps).to(self.dtype)


def feature_layers(spec: ModelSpec) -> tuple[int, ...]:
    """Returns a low, a middle and a high layer, whose inputs feed a head: the published choice if there are enough
    layers."""
    last = spec.num_layers
    if last < NUM_FEATURES + 1:
        raise ConfigError(f"target: {last} layers: a head needs at least {NUM_FEATURES + 1}")
    return published_layers(spec) or (1, 1 + (last - 1) // 2, last - 1)


def published_layers(spec: ModelSpec) -> tuple[int, ...] | None:
    """Returns the layers that readers assume if a config names none, or None if the target has too few."""
    low, middle, high = 2, spec.num_layers // 2, spec.num_layers - 3
    return (low, middle, high) if low < middle < high else None
