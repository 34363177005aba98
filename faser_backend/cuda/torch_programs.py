"""`TorchPrograms`: the programs of runtime torch, over weights that are read once for all shares of the device.

A decoder's are in torch_segment.py. Those of an EAGLE-3 head are here: what joins the target's hidden states, and the
one layer, a decoder's but for what queries, keys and values are made of, [norm(embedding), norm(hidden)], and for the
ids that its logits are of. On CPU tensors the kernels' references run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.nn import functional

from faser_backend.cuda.buffers import FEATURES
from faser_backend.cuda.call_shapes import CallBounds
from faser_backend.cuda.segment import Launch, SegmentProgram
from faser_backend.cuda.torch_segment import SegmentCall, Tensors, TorchSegment, feature_slots, head_product
from faser_backend.cuda.torch_weights import HeadTensors, ModelTensors, load_head, load_weights
from faser_backend.manifest import FileSpec, ModelEngine, ModelSpec, SegmentSpec
from faser_backend.plugins.add_rms_norm import add_rms_norm


class TorchPrograms:
    """Programs of runtime torch; a segment.ProgramSource. `load` reads, or makes, the weights of a model on the
    device; models are told apart by their files."""

    def __init__(self, load: Callable[[ModelEngine], ModelTensors | HeadTensors]) -> None:
        self._load = load
        self._weights: dict[tuple[FileSpec, ...], ModelTensors | HeadTensors] = {}

    @classmethod
    def of_directory(
        cls, engine_dir: Path, dtype: str, device: torch.device, target: ModelEngine | None = None
    ) -> TorchPrograms:
        """dtype: of the manifest. target: whose embedding a head without one of its own reads."""

        def load(model: ModelEngine) -> ModelTensors | HeadTensors:
            path = engine_dir / model.segments[0].file.name
            if model.spec.reads_target:
                return load_head(path, model.spec, dtype, device, lent_embedding)
            return load_weights(path, model.spec, dtype, device)

        def lent_embedding() -> torch.Tensor:
            assert target is not None, "a head without an embedding has a target"
            weights = programs.weights(target)
            assert isinstance(weights, ModelTensors)
            return weights.embedding

        programs = cls(load)
        return programs

    def open(self, model: ModelEngine, split: str, num_sms: int) -> Sequence[SegmentProgram]:
        weights = self.weights(model)
        if isinstance(weights, ModelTensors):
            return [TorchSegment(model.spec, segment, weights, num_sms) for segment in model.segments]
        join, layer = model.segments
        return [TorchJoin(join, weights), TorchHeadLayer(model.spec, layer, weights, num_sms)]

    def weights(self, model: ModelEngine) -> ModelTensors | HeadTensors:
        """Loaded when they are first asked for."""
        if model.files not in self._weights:
            self._weights[model.files] = self._load(model)
        return self._weights[model.files]

    def limits(self, model: ModelEngine, split: str) -> CallBounds | None:
        """Kernels of ours take any call."""

    def num_unloaded_bytes(self, models: Sequence[ModelEngine]) -> int:
        return sum(model.num_weight_bytes for model in models if model.files not in self._weights)

    def close(self) -> None:
        self._weights.clear()


class TorchJoin:
    """Segment 0 of a head: rows of the target's hidden states to one each. A device.cuda.segment.SegmentProgram."""

    packs_tables = False  # it has none

    def __init__(self, spec: SegmentSpec, weights: HeadTensors) -> None:
        self.spec = spec
        self._matrix = weights.join  # [hidden_size, num_features * hidden_size of the target]

    def prepare(self, tensors: Tensors, bounds: CallBounds) -> Launch:
        """See SegmentProgram. Any bounds can be taken."""
        features = tensors[FEATURES]

        def launch() -> None:
            slots = feature_slots(tensors["slot_mapping"], features)
            read = features.flatten(2).flatten(0, 1).index_select(0, slots)  # [T, num_features * hidden_size]
            torch.mm(read, self._matrix.t(), out=tensors["hidden_out"])

        return launch


class TorchHeadLayer(TorchSegment):
    """Segment 1 of a head."""

    def __init__(self, model: ModelSpec, spec: SegmentSpec, weights: HeadTensors, num_sms: int) -> None:
        """num_sms: as of TorchSegment."""
        super().__init__(model, spec, weights.layer, num_sms)
        self.head = weights

    def prepare(self, tensors: Tensors, bounds: CallBounds) -> Launch:
        """See SegmentProgram. hidden_out [R, d] may be hidden [T, d] itself where all rows have logits."""
        return _HeadCall(self, tensors, bounds).launch


class _HeadCall(SegmentCall):
    def __init__(self, program: TorchHeadLayer, tensors: Tensors, bounds: CallBounds) -> None:
        super().__init__(program, tensors, bounds)
        self._head = program.head

    def launch(self) -> None:
        """The layer, with logits and hidden states of the wanted rows; merely keys and values where none are."""
        tensors, weights, eps = self.tensors, self.weights, self.model.rms_eps
        embedded = functional.embedding(tensors["token_ids"], weights.embedding)
        _, of_tokens = self.norm(embedded, None, weights.layers[0].input_norm)
        _, of_hidden = self.norm(tensors["hidden"], None, self._head.hidden_norm)
        qkv = self.rotated(0, torch.cat((of_tokens, of_hidden), dim=1))
        if self.bounds.num_logit_rows == 0:
            self.write_kv(0, *qkv)
            return
        hidden, found = self.attend(0, tensors["hidden"], qkv, tensors["logit_rows"])  # [R, d]
        normed = torch.empty_like(hidden)
        add_rms_norm(hidden, found, weights.norm, eps, tensors["hidden_out"], normed)
        self._put_logits(normed, tensors["logits"])

    def _put_logits(self, normed: torch.Tensor, logits: torch.Tensor) -> None:
        """logits [R, vocab_size]: -inf at ids that the head does not know. Over the target's ids, because noise,
        penalties and filters are keyed by those: a sampler that shares them with the target knows nothing of heads."""
        token_ids = self._head.token_ids
        if token_ids is None:
            head_product(normed, self.weights.head, out=logits)
            return
        known = logits.new_empty(normed.shape[0], token_ids.shape[0])
        head_product(normed, self.weights.head, out=known)
        logits.fill_(float("-inf"))
        logits.index_copy_(1, token_ids, known)
