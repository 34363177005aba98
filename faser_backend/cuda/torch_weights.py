"""Weights of a model on a device, read from its safetensors file once for the runners of all shares.

Matrices are stored [out, in], the fastest layout for a GPU's matrix products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from faser_backend.core.adapter import ADAPTED, AdapterMatrices
from faser_backend.core.errors import ConfigError
from faser_backend.core.model import rotary_tables
from faser_backend.cuda.pool import DTYPES
from faser_backend.manifest import ModelSpec


@dataclass(frozen=True, slots=True, eq=False)
class LayerTensors:
    """Weights of one layer; norms float32, everything else in the engine's dtype."""

    input_norm: torch.Tensor  # [hidden_size]
    qkv: torch.Tensor  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    attention_out: torch.Tensor  # [hidden_size, num_heads * head_dim]
    mlp_norm: torch.Tensor  # [hidden_size]
    gate_up: torch.Tensor  # [2 * intermediate_size, hidden_size]
    down: torch.Tensor  # [hidden_size, intermediate_size]
    qkv_bias: torch.Tensor | None = None
    attention_out_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None  # [head_dim]
    k_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ModelTensors:
    """A decoder's weights on a device. `head` is a view of `embedding` if they are tied."""

    embedding: torch.Tensor  # [vocab_size, or more with a block drafter's mask, hidden_size]
    layers: tuple[LayerTensors, ...]
    norm: torch.Tensor  # [hidden_size] float32
    head: torch.Tensor  # [vocab_size, hidden_size]
    rope_cos: torch.Tensor  # [max_context, head_dim / 2] float32
    rope_sin: torch.Tensor


def load_weights(path: Path, spec: ModelSpec, dtype: str, device: torch.device) -> ModelTensors:
    """Reads the file that engines.weights_build wrote; dtype: the manifest's.

    Raises ConfigError if a tensor is missing, unknown or of another dtype.
    """
    reader = _Reader(path, DTYPES[dtype], device)
    embedding = reader.matrix("embedding")
    layers = tuple(_read_layer(reader, spec, layer) for layer in range(spec.num_layers))
    head = embedding[: spec.vocab_size] if spec.tie_word_embeddings else reader.matrix("lm_head")
    cos, sin = (torch.from_numpy(table).to(device) for table in rotary_tables(spec))
    weights = ModelTensors(embedding, layers, reader.norm("norm"), head, cos, sin)
    reader.check_all_read()
    return weights


class AdapterTensors:
    """An adapter on a device: its matrices, and the table of their addresses that plugins.add_adapters reads."""

    def __init__(self, matrices: AdapterMatrices, num_layers: int, device: torch.device) -> None:
        parts = [part for a, b in matrices.values() for part in (a.T, b)]
        padded = [np.pad(part.reshape(-1), (0, -part.size % 8)) for part in parts]  # 16 bytes are read at once
        self.memory = torch.from_numpy(np.concatenate(padded)).to(device)
        starts = np.cumsum([0, *(part.nbytes for part in padded)])[:-1].reshape(-1, 2)
        table = np.zeros((num_layers, len(ADAPTED), 2), np.int64)
        for (layer, name), pair in zip(matrices, starts, strict=True):
            table[layer, ADAPTED.index(name)] = self.memory.data_ptr() + pair
        self.table = torch.from_numpy(np.append(parts[0].shape[0], table)).to(device)
        self.num_bytes = self.memory.nbytes + self.table.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class HeadTensors:
    """The weights of an EAGLE-3 head or a block drafter on a device.

    decoder: the layers, with the target's embedding and head where the draft has none. A head's qkv reads
    [2 * hidden_size], and its `head` has a row per logit.
    """

    decoder: ModelTensors
    hidden_norm: torch.Tensor  # [hidden_size] float32
    join: torch.Tensor  # [hidden_size, features of all layers, side by side]
    token_ids: torch.Tensor | None = None  # [num_logits] int64, the id of each logit; None: all, in order
    bias: tuple[torch.Tensor, torch.Tensor] | None = None  # DSpark's w1 and w2, [vocab_size, rank]
    confidence: torch.Tensor | None = None  # [hidden_size] float32
    token_confidences: np.ndarray | None = None  # see core.ports.BlockRunner


def load_head(
    path: Path, spec: ModelSpec, dtype: str, device: torch.device, target: Callable[[], ModelTensors]
) -> HeadTensors:
    """Reads the file of a draft that engines.weights_build wrote. Raises as load_weights does.

    target: returns the target's weights, of which a draft uses the ends that it does not have.
    """
    reader, own, prefix = _Reader(path, DTYPES[dtype], device), dict[str, Any](), "layers.0."
    embedding = reader.matrix("embedding") if "embedding" in reader.names else target().embedding
    head = reader.matrix("lm_head") if "lm_head" in reader.names else target().head
    if spec.block_size:
        prefix = ""
        if spec.mask_id >= embedding.shape[0]:
            raise ConfigError(f"mask_id = {spec.mask_id}: the embedding has {embedding.shape[0]} rows")
        if "markov_w1" in reader.names:
            own["bias"] = table, _ = reader.matrix("markov_w1"), reader.matrix("markov_w2").t().contiguous()
            if "confidence_weight" in reader.names:
                weight = reader.matrix("confidence_weight")[0].float()
                own["confidence"], of_tokens = weight.split([spec.hidden_size, table.shape[1]])
                of_tokens = (table.float() * of_tokens).sum(1) + reader.norm("confidence_bias")
                own["token_confidences"] = of_tokens.cpu().numpy()
    else:
        token_ids = reader.integers("token_ids")
        is_id = token_ids < spec.vocab_size  # the target has no padding rows of the vocabulary
        if not bool(is_id.all()):
            token_ids, head = token_ids[is_id], head[is_id]
        if not torch.equal(token_ids, torch.arange(spec.vocab_size, device=device)):
            own["token_ids"] = token_ids
    layers = tuple(_read_layer(reader, spec, layer) for layer in range(spec.num_layers))
    cos, sin = (torch.from_numpy(table).to(device) for table in rotary_tables(spec))
    decoder, norm = ModelTensors(embedding, layers, reader.norm("norm"), head, cos, sin), f"{prefix}hidden_norm"
    weights = HeadTensors(decoder, reader.norm(norm), reader.matrix("fc").t().contiguous(), **own)
    reader.check_all_read()
    return weights


def _read_layer(reader: _Reader, spec: ModelSpec, layer: int) -> LayerTensors:
    prefix = f"layers.{layer}."

    def matrix(*names: str) -> torch.Tensor:
        """Concatenates the transposes of matrices [in, out]."""
        return torch.cat([reader.matrix(prefix + name).t() for name in names])

    def bias(is_there: bool, *names: str) -> torch.Tensor | None:
        return torch.cat([reader.bias(f"{prefix}{name}_bias") for name in names]) if is_there else None

    return LayerTensors(
        input_norm=reader.norm(prefix + "input_norm"),
        qkv=matrix("qkv"),
        attention_out=matrix("attention_out"),
        mlp_norm=reader.norm(prefix + "mlp_norm"),
        gate_up=matrix("gate", "up"),
        down=matrix("down"),
        qkv_bias=bias(spec.has_qkv_bias, "qkv"),
        attention_out_bias=bias(spec.has_attention_out_bias, "attention_out"),
        gate_up_bias=bias(spec.has_mlp_bias, "gate", "up"),
        down_bias=bias(spec.has_mlp_bias, "down"),
        q_norm=reader.norm(prefix + "q_norm") if spec.has_qk_norm else None,
        k_norm=reader.norm(prefix + "k_norm") if spec.has_qk_norm else None,
    )


class _Reader:
    """Reads a weight file tensor by tensor to the device, and tracks unread tensors."""

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._path = path
        self._dtype = dtype
        self._file = safe_open(path, framework="pt", device=str(device))
        self.names = frozenset(self._file.keys())
        self._unread = set(self.names)

    def matrix(self, name: str) -> torch.Tensor:
        return self._read(name, self._dtype)

    def norm(self, name: str) -> torch.Tensor:
        return self._read(name, torch.float32)

    def bias(self, name: str) -> torch.Tensor:
        """Reads a bias in the engine's dtype, because it is added to products of that dtype."""
        return self._read(name, torch.float32).to(self._dtype)

    def integers(self, name: str) -> torch.Tensor:
        return self._read(name, torch.int64)

    def check_all_read(self) -> None:
        if self._unread:
            raise ConfigError(f"{self._path}: holds {min(self._unread)}, which runtime torch does not know")

    def _read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        if name not in self._unread:
            raise ConfigError(f"{self._path}: tensor {name} is missing")
        self._unread.discard(name)
        tensor = self._file.get_tensor(name)
        if tensor.dtype != dtype:
            raise ConfigError(f"{self._path}: {name} has dtype {tensor.dtype}, the engine's wants {dtype}")
        return tensor
