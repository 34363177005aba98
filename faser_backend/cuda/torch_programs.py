"""`TorchPrograms`: the programs of runtime torch, over weights that are read once for all shares of the device.

`TorchSegment` is a segment of a decoder, with the layers of engines.decoder. Rows are packed, and only attention
separates sequences. The last layer computes attention output and MLP for the logit rows only. Norms, rotations and
logits are float32. One fused kernel of the project runs between two matrix products, because reading and writing rows
costs as much as a small model's products.

An EAGLE-3 head has two programs: one joins the target's hidden states, the other is its layer. It differs from a
decoder's layer in the input of queries, keys and values, [norm(embedding), norm(hidden)], and in the ids of its logits.
A block drafter also has two: TorchContext makes keys and values of the target's hidden states, and TorchBlock runs
blocks. On CPU tensors the kernels' references run, so all of this is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch.nn import functional

from faser_backend.core.adapter import ADAPTED, module_shapes
from faser_backend.core.config import MAX_LORA_RANK
from faser_backend.cuda.buffers import ADAPTERS, FEATURES
from faser_backend.cuda.call_shapes import PROMPT_ROWS, VERIFY_ROWS, CallBounds
from faser_backend.cuda.pool import pool_slots, write_kv
from faser_backend.cuda.segment import Launch, SegmentProgram
from faser_backend.cuda.torch_weights import HeadTensors, ModelTensors, load_head, load_weights
from faser_backend.manifest import FileSpec, ModelEngine, ModelSpec, SegmentSpec
from faser_backend.plugins.add_adapters import add_adapters
from faser_backend.plugins.add_rms_norm import add_rms_norm
from faser_backend.plugins.attention_config import choose_num_splits, count_parts, launch_config
from faser_backend.plugins.exit_scores import exit_scores
from faser_backend.plugins.gated_silu import gated_silu
from faser_backend.plugins.product import MatrixProduct
from faser_backend.plugins.pruned_chunk_attention import pruned_chunk_attention
from faser_backend.plugins.rotate_heads import rotate_heads

Tensors = Mapping[str, torch.Tensor]
Rotated = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # queries, keys and values, by head
MANY_VERIFY_ROWS = 32  # as VERIFY_ROWS, for calls with at least PROMPT_ROWS rows


@dataclass(eq=False)
class TorchSegment:
    """A SegmentProgram in torch. Runners of all shares may share `weights`."""

    model: ModelSpec
    spec: SegmentSpec
    weights: ModelTensors
    num_sms: int  # of the program's share; long contexts are split to fill them
    packs_tables = True

    def __post_init__(self) -> None:
        self.product = MatrixProduct(self.weights.head.device)

    def prepare(self, tensors: Tensors, bounds: CallBounds, *, is_kept: bool = True) -> Launch:
        return SegmentCall(self, tensors, bounds).launch

    def num_splits(self, bounds: CallBounds, pool: torch.Tensor) -> int:
        """Returns the most parts that programs of their own take in a call; pool [Hkv, NB, kv_block_size, hd].

        They fill the SMs if all rows belong to one sequence. Calls with prompts fill them without.
        """
        if bounds.num_rows >= PROMPT_ROWS:
            return 1
        model, group = self.model, self.model.num_heads // self.model.num_kv_heads
        config = launch_config(pool.element_size(), model.head_dim, group, usual_rows(bounds))
        num_tiles = -(-bounds.num_rows // (config.block_m // group))
        num_parts = count_parts(max(1, bounds.num_blocks) * pool.shape[2])
        return choose_num_splits(model.num_kv_heads, num_parts, self.num_sms, num_tiles)


def usual_rows(bounds: CallBounds) -> int:
    """Returns the rows per sequence that tiles are chosen for: all in a call without logits, as a prompt's chunk."""
    if bounds.num_logit_rows == 0:
        return bounds.max_rows
    return min(bounds.max_rows, VERIFY_ROWS if bounds.num_rows < PROMPT_ROWS else MANY_VERIFY_ROWS)


class SegmentCall:
    """The segment over the tensors of one call; temporaries come from torch's allocator."""

    def __init__(self, program: TorchSegment, tensors: Tensors, bounds: CallBounds) -> None:
        self.model = program.model
        self.spec = program.spec
        self.weights = program.weights
        self.tensors = tensors
        self.bounds = bounds
        self.num_sms = program.num_sms
        self.product = program.product
        self.num_splits = program.num_splits(bounds, tensors[f"k_pool.{program.spec.first_layer}"])

    def launch(self) -> None:
        """Runs the layers. An MLP's output is added to hidden by the next norm, or here at the end of the segment."""
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
        """Runs the model's last layer, with logits of the wanted rows; without any, only keys and values."""
        layer, tensors = self.model.num_layers - 1, self.tensors
        if self.bounds.num_logit_rows == 0:
            _, qkv = self._qkv(layer, hidden, found)
            self.write_kv(layer, *qkv)
            return
        hidden, found = self._layer(layer, hidden, found, wanted_rows=tensors["logit_rows"])  # [R, d]
        _, normed = self.norm(hidden, found, self.weights.norm)
        self.product(normed, self.weights.head, out=tensors["logits"])
        if "hidden_out" in tensors:  # of a block drafter
            tensors["hidden_out"].copy_(normed)

    def _layer(
        self, layer: int, hidden: torch.Tensor, found: torch.Tensor | None, wanted_rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs a layer on hidden [T, d] and the addend `found`; returns both after it, [R, d] for wanted rows."""
        hidden, qkv = self._qkv(layer, hidden, found)
        return self.attend(layer, hidden, qkv, wanted_rows)

    def attend(
        self, layer: int, hidden: torch.Tensor, qkv: Rotated, wanted_rows: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the layer from its attention on, see _layer."""
        weights = self.weights.layers[layer]
        attended = self._attention(layer, *qkv)  # [T, H * hd]
        if wanted_rows is not None:
            attended, hidden = attended.index_select(0, wanted_rows), hidden.index_select(0, wanted_rows)
        found = self.product(attended, weights.attention_out, weights.attention_out_bias)
        self._adapt(layer, ("attention_out",), attended, found, wanted_rows)
        hidden, normed = self.norm(hidden, found, weights.mlp_norm)
        gate_up = self.product(normed, weights.gate_up, weights.gate_up_bias)
        self._adapt(layer, ("gate", "up"), normed, gate_up, wanted_rows)
        gated = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        gated_silu(gate_up, gated)
        found = self.product(gated, weights.down, weights.down_bias)
        self._adapt(layer, ("down",), gated, found, wanted_rows)
        return hidden, found

    def _adapt(
        self, layer: int, names: Sequence[str], rows: torch.Tensor, found: torch.Tensor, wanted: torch.Tensor | None
    ) -> None:
        """Adds the adapters of rows, all or those in `wanted`, to found, their products with matrices side by side."""
        if self.bounds.has_adapters:
            adapters, shapes = self.tensors[ADAPTERS.name], module_shapes(self.model)
            adapters = adapters if wanted is None else adapters.index_select(0, wanted)
            first_entry = layer * len(ADAPTED) + ADAPTED.index(names[0])
            add_adapters(rows, adapters, first_entry, [shapes[name][1] for name in names], MAX_LORA_RANK, found)

    def _qkv(self, layer: int, hidden: torch.Tensor, found: torch.Tensor | None) -> tuple[torch.Tensor, Rotated]:
        """Returns the layer's input, hidden + found, and its rotated queries, keys and values."""
        hidden, normed = self.norm(hidden, found, self.weights.layers[layer].input_norm)
        if layer in self.model.feature_layers:
            features, index = self.tensors[FEATURES], self.model.feature_layers.index(layer)
            slots = pool_slots(self.tensors["slot_mapping"], features)
            features.flatten(0, 1)[:, index].index_copy_(0, slots, hidden)
        return hidden, self.rotated(layer, normed)

    def rotated(self, layer: int, normed: torch.Tensor, *, has_queries: bool = True) -> Rotated:
        """Returns rotated queries [T, H, hd] and keys [T, Hkv, hd], and values [T, Hkv, hd], of normed [T, any].

        has_queries: otherwise they have no head.
        """
        num_heads, num_kv = self.model.num_heads * has_queries, self.model.num_kv_heads
        weights, num_outputs = self.weights.layers[layer], (num_heads + 2 * num_kv) * self.model.head_dim
        bias = None if weights.qkv_bias is None else weights.qkv_bias[-num_outputs:]
        qkv = self.product(normed, weights.qkv[-num_outputs:], bias)
        self._adapt(layer, ("q", "k", "v"), normed, qkv, None)
        qkv = qkv.unflatten(1, (num_heads + 2 * num_kv, self.model.head_dim))
        rotated = qkv.new_empty(qkv.shape[0], num_heads + num_kv, self.model.head_dim)
        rotate_heads(
            qkv, self.tensors["positions"], self.weights.rope_cos, self.weights.rope_sin, rotated, num_heads=num_heads,
            q_norm=weights.q_norm, k_norm=weights.k_norm, eps=self.model.rms_eps,
        )  # fmt: skip
        return rotated[:, :num_heads], rotated[:, num_heads:], qkv[:, num_heads + num_kv :]

    def write_kv(self, layer: int, _: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes keys and values to the pool, which is all that a last layer without logit rows does."""
        pools = self.tensors[f"k_pool.{layer}"], self.tensors[f"v_pool.{layer}"]
        write_kv(keys, values, self.tensors["slot_mapping"], *pools)

    def _attention(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Returns attention's output [T, H * hd]; results of padding rows are meaningless and reach no other row."""
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
            num_sms=self.num_sms,
            table_width=tensors["table_width"],
            is_causal=not self.model.block_size,  # rows of a drafted block see each other
        )
        return out.flatten(1)

    def norm(
        self, hidden: torch.Tensor, found: torch.Tensor | None, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns hidden + found and its RMS norm, as new tensors: hidden may be an input and must not change."""
        normed = torch.empty_like(hidden)
        summed = None if found is None else torch.empty_like(hidden)
        add_rms_norm(hidden, found, weight, self.model.rms_eps, summed, normed)
        return hidden if summed is None else summed, normed


def read_features(tensors: Tensors) -> torch.Tensor:
    """Returns each row's hidden states of the target, side by side: [T, num_features * hidden_size of the target]."""
    features = tensors[FEATURES]
    return features.flatten(2).flatten(0, 1).index_select(0, pool_slots(tensors["slot_mapping"], features))


class TorchPrograms:
    """Programs of runtime torch; a segment.ProgramSource. `load` returns the weights of a model on the device."""

    def __init__(self, load: Callable[[ModelEngine], ModelTensors | HeadTensors]) -> None:
        self._load = load
        self._weights: dict[tuple[FileSpec, ...], ModelTensors | HeadTensors] = {}

    @classmethod
    def of_directory(cls, engine_dir: Path, dtype: str, device: torch.device, target: ModelEngine) -> TorchPrograms:
        """dtype: the manifest's. target: provides the ends of a draft that has none."""

        def load(model: ModelEngine) -> ModelTensors | HeadTensors:
            path = engine_dir / model.segments[0].file.name
            if not model.spec.reads_target:
                return load_weights(path, model.spec, dtype, device)
            return load_head(path, model.spec, dtype, device, lambda: cast(ModelTensors, programs.weights(target)))

        programs = cls(load)
        return programs

    def open(self, model: ModelEngine, split: str, num_sms: int) -> Sequence[SegmentProgram]:
        weights = self.weights(model)
        if isinstance(weights, ModelTensors):
            return [TorchSegment(model.spec, segment, weights, num_sms) for segment in model.segments]
        kinds = (TorchContext, TorchBlock) if model.spec.block_size else (TorchJoin, TorchHeadLayer)
        return [
            kind(model.spec, segment, weights.decoder, num_sms, weights)
            for kind, segment in zip(kinds, model.segments, strict=True)
        ]

    def weights(self, model: ModelEngine) -> ModelTensors | HeadTensors:
        """Returns the weights of a model; the first call loads them."""
        if model.files not in self._weights:
            self._weights[model.files] = self._load(model)
        return self._weights[model.files]

    def limits(self, model: ModelEngine, split: str) -> CallBounds | None:
        """Returns None: the project's kernels take any call."""

    def activation_bytes(self, models: Sequence[ModelEngine]) -> None:
        return None

    def num_unloaded_bytes(self, models: Sequence[ModelEngine]) -> int:
        return sum(model.num_weight_bytes for model in models if model.files not in self._weights)

    def close(self) -> None:
        self._weights.clear()


@dataclass(eq=False)
class _DraftSegment(TorchSegment):
    """A segment of a draft that reads its target."""

    head: HeadTensors


class TorchJoin(_DraftSegment):
    """Segment 0 of a head: joins each row's hidden states of the target into one."""

    packs_tables = False  # it reads no block tables

    def prepare(self, tensors: Tensors, bounds: CallBounds, *, is_kept: bool = True) -> Launch:
        def launch() -> None:
            self.product(read_features(tensors), self.head.join, out=tensors["hidden_out"])

        return launch


class TorchContext(_DraftSegment):
    """Segment 0 of a block drafter: writes each row's keys and values of all layers, of the target's hidden states."""

    packs_tables = False  # it reads no block tables

    def prepare(self, tensors: Tensors, bounds: CallBounds, *, is_kept: bool = True) -> Launch:
        call = SegmentCall(self, tensors, bounds)

        def launch() -> None:
            joined = call.product(read_features(tensors), self.head.join)
            _, normed = call.norm(joined, None, self.head.hidden_norm)
            for layer in range(self.model.num_layers):
                call.write_kv(layer, *call.rotated(layer, normed, has_queries=False))

        return launch


class TorchBlock(_DraftSegment):
    """Segment 1 of a block drafter."""

    def biased(self, logits: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Returns logits [n, V] with the bias of the tokens before, previous [n]."""
        if self.head.bias is None:
            return logits
        table, columns = self.head.bias
        bias = self.product(table.index_select(0, previous), columns, out=torch.empty_like(logits))
        return bias.add_(logits)


class TorchHeadLayer(_DraftSegment):
    """Segment 1 of a head, its layer."""

    def prepare(self, tensors: Tensors, bounds: CallBounds, *, is_kept: bool = True) -> Launch:
        """See SegmentProgram. hidden_out [R, d] may be hidden [T, d] itself if all rows have logits."""
        call, weights = SegmentCall(self, tensors, bounds), self.weights

        def launch() -> None:
            """Runs the layer, with logits and hidden states of the wanted rows; without any, only keys and values."""
            embedded = functional.embedding(tensors["token_ids"], weights.embedding)
            _, of_tokens = call.norm(embedded, None, weights.layers[0].input_norm)
            _, of_hidden = call.norm(tensors["hidden"], None, self.head.hidden_norm)
            qkv = call.rotated(0, torch.cat((of_tokens, of_hidden), dim=1))
            if bounds.num_logit_rows == 0:
                call.write_kv(0, *qkv)
                return
            hidden, found = call.attend(0, tensors["hidden"], qkv, tensors["logit_rows"])  # [R, d]
            normed = torch.empty_like(hidden)
            add_rms_norm(hidden, found, weights.norm, self.model.rms_eps, tensors["hidden_out"], normed)
            # Samplers use the target's ids; ids without logits get -inf.
            logits, token_ids = tensors["logits"], self.head.token_ids
            known = logits if token_ids is None else logits.new_empty(normed.shape[0], token_ids.shape[0])
            self.product(normed, weights.head, out=known)
            if token_ids is not None:
                logits.fill_(float("-inf"))
                logits.index_copy_(1, token_ids, known)

        return launch
