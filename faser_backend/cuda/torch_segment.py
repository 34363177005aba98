"""A segment of a decoder in torch, over the project's kernels: runtime "torch".

The layers are those of engines.decoder: packed rows, of which only attention knows the sequences; the last layer
of a model computes attention output and MLP for the logit rows alone. Norms, rotations and logits are computed
in float32. Between matrix products there is one kernel of ours, for reading and writing rows costs as much as a
small model's products. On CPU tensors the kernels' references run, so that all of this is checked without a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from faser_backend.cuda.buffers import FEATURES
from faser_backend.cuda.call_shapes import PROMPT_ROWS, CallBounds
from faser_backend.cuda.segment import Launch
from faser_backend.cuda.torch_weights import ModelTensors
from faser_backend.manifest import ModelSpec, SegmentSpec
from faser_backend.plugins.add_rms_norm import add_rms_norm
from faser_backend.plugins.attention_config import MIN_TOKENS_PER_SPLIT, choose_num_splits, launch_config
from faser_backend.plugins.exit_scores import exit_scores
from faser_backend.plugins.gated_silu import gated_silu
from faser_backend.plugins.kv_write import write_kv
from faser_backend.plugins.pruned_chunk_attention import pruned_chunk_attention
from faser_backend.plugins.rotate_heads import rotate_heads

Tensors = Mapping[str, torch.Tensor]
Rotated = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # queries, keys and values, by head

VERIFY_ROWS = 8  # of a sequence, for which tiles are chosen where a call is not a prompt's chunk
MANY_VERIFY_ROWS = 32  # the same of calls with as many rows as a prompt's chunk


class TorchSegment:
    """Implements device.cuda.segment.SegmentProgram. Runners of all shares may use the same `weights`."""

    packs_tables = True

    def __init__(self, model: ModelSpec, spec: SegmentSpec, weights: ModelTensors, num_sms: int) -> None:
        """num_sms: of the share that this program runs on; long contexts are split so as to fill them."""
        self.spec = spec
        self.model = model
        self.weights = weights
        self.num_sms = num_sms

    def prepare(self, tensors: Tensors, bounds: CallBounds) -> Launch:
        """See SegmentProgram. Any bounds can be taken."""
        return SegmentCall(self, tensors, bounds).launch

    def num_splits(self, bounds: CallBounds, pool: torch.Tensor) -> int:
        """Into how many parts a call cuts contexts at most; pool [Hkv, NB, kv_block_size, hd].

        As many as fill the SMs where all rows are one sequence's. Parts have a least length, so that sequences whose
        contexts are shorter have fewer of them.
        """
        model, group = self.model, self.model.num_heads // self.model.num_kv_heads
        config = launch_config(pool.element_size(), model.head_dim, group, usual_rows(bounds))
        num_tiles = -(-bounds.num_rows // (config.block_m // group))
        max_context = bounds.num_blocks * pool.shape[2]
        return choose_num_splits(1, model.num_kv_heads, max_context, self.num_sms, num_tiles)


def usual_rows(bounds: CallBounds) -> int:
    """How many rows a sequence has, for the choice of tiles: all where nobody wants logits, as in a prompt's chunk."""
    if bounds.num_logit_rows == 0:
        return bounds.max_rows
    return min(bounds.max_rows, VERIFY_ROWS if bounds.num_rows < PROMPT_ROWS else MANY_VERIFY_ROWS)


class SegmentCall:
    """The segment over the tensors of one call; every temporary is torch's, and falls to its allocator."""

    def __init__(self, program: TorchSegment, tensors: Tensors, bounds: CallBounds) -> None:
        self.model = program.model
        self.spec = program.spec
        self.weights = program.weights
        self.tensors = tensors
        self.bounds = bounds
        self.num_splits = program.num_splits(bounds, tensors[f"k_pool.{program.spec.first_layer}"])

    def launch(self) -> None:
        """Runs the layers. What the last MLP found is added where the next norm reads it: here, or behind a cut."""
        tensors, weights = self.tensors, self.weights
        first, last = self.spec.first_layer, self.spec.last_layer
        is_first, is_last = first == 0, last == self.model.num_layers
        hidden = functional.embedding(tensors["token_ids"], weights.embedding) if is_first else tensors["hidden"]
        found = None  # [T, d], not yet added to hidden
        for layer in range(first, last - is_last):
            hidden, found = self._layer(layer, hidden, found)
        if is_last:
            self._last_layer(hidden, found)
            return
        assert found is not None, "a segment has at least one layer"
        torch.add(hidden, found, out=tensors["hidden_out"])
        if self.bounds.num_candidates:
            _, normed = self.norm(tensors["hidden_out"], None, weights.norm)
            exit_scores(normed, weights.head, tensors["exit_candidates"], tensors["exit_scores"])

    def _last_layer(self, hidden: torch.Tensor, found: torch.Tensor | None) -> None:
        """The model's last layer, with logits of the wanted rows; merely its keys and values where none are wanted."""
        layer, tensors = self.model.num_layers - 1, self.tensors
        if self.bounds.num_logit_rows == 0:
            _, qkv = self._qkv(layer, hidden, found)
            self.write_kv(layer, *qkv)
            return
        hidden, found = self._layer(layer, hidden, found, wanted_rows=tensors["logit_rows"])  # [R, d]
        _, normed = self.norm(hidden, found, self.weights.norm)
        head_product(normed, self.weights.head, out=tensors["logits"])

    def _layer(
        self, layer: int, hidden: torch.Tensor, found: torch.Tensor | None, wanted_rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [T, d] and what is to be added to it -> the same behind the layer; [R, d] of the wanted rows."""
        hidden, qkv = self._qkv(layer, hidden, found)
        return self.attend(layer, hidden, qkv, wanted_rows)

    def attend(
        self, layer: int, hidden: torch.Tensor, qkv: Rotated, wanted_rows: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer from its attention on: as _layer, of the wanted rows where they are given."""
        weights = self.weights.layers[layer]
        attended = self._attention(layer, *qkv)  # [T, H * hd]
        if wanted_rows is not None:
            attended, hidden = attended.index_select(0, wanted_rows), hidden.index_select(0, wanted_rows)
        found = product(attended, weights.attention_out, weights.attention_out_bias)
        hidden, normed = self.norm(hidden, found, weights.mlp_norm)
        gate_up = product(normed, weights.gate_up, weights.gate_up_bias)
        gated = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        gated_silu(gate_up, gated)
        return hidden, product(gated, weights.down, weights.down_bias)

    def _qkv(self, layer: int, hidden: torch.Tensor, found: torch.Tensor | None) -> tuple[torch.Tensor, Rotated]:
        """The sum of hidden and found, which goes into the layer, and what attention is of."""
        hidden, normed = self.norm(hidden, found, self.weights.layers[layer].input_norm)
        if layer in self.model.feature_layers:
            features, place = self.tensors[FEATURES], self.model.feature_layers.index(layer)
            slots = feature_slots(self.tensors["slot_mapping"], features)
            features.flatten(0, 1)[:, place].index_copy_(0, slots, hidden)
        return hidden, self.rotated(layer, normed)

    def rotated(self, layer: int, normed: torch.Tensor) -> Rotated:
        """Rotated queries [T, H, hd] and keys [T, Hkv, hd], and values [T, Hkv, hd], of normed [T, any]."""
        num_heads, num_kv = self.model.num_heads, self.model.num_kv_heads
        weights = self.weights.layers[layer]
        qkv = product(normed, weights.qkv, weights.qkv_bias)
        qkv = qkv.unflatten(1, (num_heads + 2 * num_kv, self.model.head_dim))
        rotated = qkv.new_empty(qkv.shape[0], num_heads + num_kv, self.model.head_dim)
        rotate_heads(
            qkv,
            self.tensors["positions"],
            self.weights.rope_cos,
            self.weights.rope_sin,
            rotated,
            num_heads=num_heads,
            q_norm=weights.q_norm,
            k_norm=weights.k_norm,
            eps=self.model.rms_eps,
        )
        return rotated[:, :num_heads], rotated[:, num_heads:], qkv[:, num_heads + num_kv :]

    def write_kv(self, layer: int, _: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """All that is left of the last layer where nobody wants logits."""
        pools = self.tensors[f"k_pool.{layer}"], self.tensors[f"v_pool.{layer}"]
        write_kv(keys, values, self.tensors["slot_mapping"], *pools)

    def _attention(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[T, H * hd]; what rows that pad the call get has no meaning, and reaches no other row."""
        tensors = self.tensors
        out = queries.new_empty(queries.shape)
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
            max_rows=usual_rows(self.bounds),
            num_splits=self.num_splits,
            min_part_tokens=MIN_TOKENS_PER_SPLIT,
            table_width=tensors["table_width"],
        )
        return out.flatten(1)

    def norm(
        self, hidden: torch.Tensor, found: torch.Tensor | None, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden + found, and its RMS norm. A new tensor each: hidden may be what a cut hands over, and stays."""
        normed = torch.empty_like(hidden)
        summed = None if found is None else torch.empty_like(hidden)
        add_rms_norm(hidden, found, weight, self.model.rms_eps, summed, normed)
        return hidden if summed is None else summed, normed


def product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[T, out] = rows [T, in] times weight [out, in], plus bias [out].

    Not in one call: that is cuBLASLt's, whose choice of a kernel asks for the green context of the stream, and fails
    where the stream is being captured.
    """
    result = functional.linear(rows, weight)
    return result if bias is None else result.add_(bias)


def feature_slots(slot_mapping: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Where rows [T] lie in features [blocks, kv_block_size, ...], int64: rows that pad a call in nobody's block."""
    return slot_mapping.remainder(features.shape[0] * features.shape[1]).long()


def head_product(normed: torch.Tensor, head: torch.Tensor, out: torch.Tensor) -> None:
    """out [R, V] float32 = normed [R, d] times head [V, d], never rounded to the engine's dtype on the way."""
    if normed.dtype == torch.float32:
        torch.mm(normed, head.t(), out=out)
    elif normed.is_cuda:
        torch.mm(normed, head.t(), out_dtype=torch.float32, out=out)
    else:  # a CPU multiplies into its own dtype alone
        torch.mm(normed.float(), head.t().float(), out=out)
