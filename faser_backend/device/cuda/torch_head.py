"""An EAGLE-3 head in torch, over the project's kernels: what joins the target's hidden states, and the one layer.

The layer is a decoder's but for what queries, keys and values are made of, [norm(embedding), norm(hidden)], and for
the ids that its logits are of. On CPU tensors the kernels' references run.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from faser_backend.device.cuda.segment import CallBounds, Launch
from faser_backend.device.cuda.tensors import FEATURES
from faser_backend.device.cuda.torch_segment import SegmentCall, Tensors, TorchSegment, feature_slots, head_product
from faser_backend.device.cuda.torch_weights import HeadTensors
from faser_backend.manifest import ModelSpec, SegmentSpec
from plugins.add_rms_norm import add_rms_norm


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
