"""A segment of a decoder in torch, over the project's kernels: runtime "torch".

The layers are those of engines.decoder: packed rows, of which only attention knows the sequences; the last layer
of a model computes attention output and MLP for the logit rows alone. Norms, rotations and logits are computed
in float32. On CPU tensors the kernels' references run, so that everything here is checked without a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from faser_backend.device.cuda.segment import CallBounds, Launch
from faser_backend.device.cuda.torch_weights import LayerTensors, ModelTensors
from faser_backend.manifest import ModelSpec, SegmentSpec
from plugins.attention_config import choose_num_splits, launch_config
from plugins.exit_scores import exit_scores
from plugins.kv_write import write_kv
from plugins.pruned_chunk_attention import pruned_chunk_attention

Tensors = Mapping[str, torch.Tensor]


class TorchSegment:
    """Implements device.cuda.segment.SegmentProgram. Runners of all shares may use the same `weights`."""

    def __init__(self, model: ModelSpec, spec: SegmentSpec, weights: ModelTensors, num_sms: int) -> None:
        """num_sms: of the share that this program runs on; long contexts are split so as to fill them."""
        self.spec = spec
        self.model = model
        self.weights = weights
        self.num_sms = num_sms

    def prepare(self, tensors: Tensors, bounds: CallBounds) -> Launch:
        """See SegmentProgram. Any bounds can be taken."""
        return _SegmentCall(self, tensors, bounds).launch

    def num_splits(self, bounds: CallBounds, pool: torch.Tensor) -> int:
        """Into how many parts a call cuts contexts; pool [Hkv, NB, kv_block_size, hd]."""
        model, group = self.model, self.model.num_heads // self.model.num_kv_heads
        config = launch_config(pool.element_size(), model.head_dim, group, bounds.max_rows)
        num_tiles = -(-bounds.max_rows // (config.block_m // group))
        max_context = bounds.num_blocks * pool.shape[2]
        return choose_num_splits(bounds.num_sequences, model.num_kv_heads, max_context, self.num_sms, num_tiles)


class _SegmentCall:
    """The segment over the tensors of one call; every temporary is torch's, and falls to its allocator."""

    def __init__(self, program: TorchSegment, tensors: Tensors, bounds: CallBounds) -> None:
        self.model = program.model
        self.spec = program.spec
        self.weights = program.weights
        self.tensors = tensors
        self.bounds = bounds
        self.num_splits = program.num_splits(bounds, tensors[f"k_pool.{program.spec.first_layer}"])

    def launch(self) -> None:
        tensors, weights = self.tensors, self.weights
        is_last = self.spec.last_layer == self.model.num_layers
        if self.spec.first_layer == 0:
            hidden = functional.embedding(tensors["token_ids"], weights.embedding)  # [T, d]
        else:
            hidden = tensors["hidden"]
        rotation = self._rotation()
        for layer in range(self.spec.first_layer, self.spec.last_layer - is_last):
            hidden = self._layer(layer, hidden, rotation)
        if is_last:
            self._last_layer(hidden, rotation)
        else:
            tensors["hidden_out"].copy_(hidden)
            if self.bounds.num_candidates:
                normed = self._norm(hidden, weights.norm)
                exit_scores(normed, weights.head, tensors["exit_candidates"], tensors["exit_scores"])

    def _last_layer(self, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> None:
        """The model's last layer, with logits of the wanted rows; merely its keys and values where none are wanted."""
        layer, tensors = self.model.num_layers - 1, self.tensors
        if self.bounds.num_logit_rows == 0:
            _, keys, values = self._qkv(self.weights.layers[layer], hidden, rotation)
            pools = tensors[f"k_pool.{layer}"], tensors[f"v_pool.{layer}"]
            write_kv(keys, values, tensors["slot_mapping"], *pools)
            return
        hidden = self._layer(layer, hidden, rotation, wanted_rows=tensors["logit_rows"])  # [R, d]
        _head_product(self._norm(hidden, self.weights.norm), self.weights.head, out=tensors["logits"])

    def _layer(
        self,
        layer: int,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        wanted_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """hidden [T, d] -> [T, d], or [R, d] of the wanted rows."""
        weights = self.weights.layers[layer]
        attended = self._attention(layer, *self._qkv(weights, hidden, rotation))  # [T, H * hd]
        if wanted_rows is not None:
            attended, hidden = attended.index_select(0, wanted_rows), hidden.index_select(0, wanted_rows)
        hidden = hidden + functional.linear(attended, weights.attention_out, weights.attention_out_bias)
        gate_up = functional.linear(self._norm(hidden, weights.mlp_norm), weights.gate_up, weights.gate_up_bias)
        gate, up = gate_up.chunk(2, dim=1)
        return hidden + functional.linear(functional.silu(gate) * up, weights.down, weights.down_bias)

    def _qkv(
        self, weights: LayerTensors, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries [T, H, hd] and keys [T, Hkv, hd], and values [T, Hkv, hd]."""
        num_heads, num_kv = self.model.num_heads, self.model.num_kv_heads
        qkv = functional.linear(self._norm(hidden, weights.input_norm), weights.qkv, weights.qkv_bias)
        qkv = qkv.unflatten(1, (num_heads + 2 * num_kv, self.model.head_dim))
        queries, keys, values = qkv.split([num_heads, num_kv, num_kv], dim=1)
        if weights.q_norm is not None and weights.k_norm is not None:
            queries, keys = self._norm(queries, weights.q_norm), self._norm(keys, weights.k_norm)
            return _rotated(queries, *rotation), _rotated(keys, *rotation), values
        both = _rotated(qkv[:, : num_heads + num_kv], *rotation)  # in one go
        return both[:, :num_heads], both[:, num_heads:], values

    def _attention(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[T, H * hd]; what rows that pad the call get has no meaning, and reaches no other row."""
        tensors = self.tensors
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        pruned_chunk_attention(
            queries,
            keys,
            values,
            tensors[f"k_pool.{layer}"],
            tensors[f"v_pool.{layer}"],
            tensors["block_table"],
            tensors["cu_rows"],
            tensors["context_lens"],
            tensors["slot_mapping"],
            out,
            max_rows=self.bounds.max_rows,
            num_splits=self.num_splits,
        )
        return out.flatten(1)

    def _rotation(self) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, 1, head_dim / 2] of the rows' positions."""
        positions, weights = self.tensors["positions"], self.weights
        return weights.rope_cos[positions].unsqueeze(1), weights.rope_sin[positions].unsqueeze(1)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMS norm over the last dimension, in float32."""
        return functional.rms_norm(x.float(), (x.shape[-1],), weight, self.model.rms_eps).to(x.dtype)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, n, hd] with dimension i and i + hd / 2 of each head turned by the row's angle, in float32."""
    first, second = x.float().chunk(2, dim=2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=2).to(x.dtype)


def _head_product(normed: torch.Tensor, head: torch.Tensor, out: torch.Tensor) -> None:
    """out [R, V] float32 = normed [R, d] times head [V, d], never rounded to the engine's dtype on the way."""
    if normed.dtype == torch.float32:
        torch.mm(normed, head.t(), out=out)
    elif normed.is_cuda:
        torch.mm(normed, head.t(), out_dtype=torch.float32, out=out)
    else:  # a CPU multiplies into its own dtype alone
        torch.mm(normed.float(), head.t().float(), out=out)
