"""Reads EAGLE-3 heads: drafts of one layer that take hidden states of their target, in the public layout.

A row of the head pairs the token at position i + 1 with the hidden state of position i, from the target or, later in a
chain, from the head itself. The head's logits cover a few frequent tokens; tensor d2t maps them to ids of the target.
The layout is Hugging Face's, with the config of a one-layer Llama, as SpecForge writes and SGLang reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from faser_backend.core.model import EAGLE3, ModelSpec
from faser_backend.engines.checkpoint import CheckpointError, ConfigFields
from faser_backend.engines.families import read_spec
from faser_backend.engines.safetensors_checkpoint import HuggingFaceCheckpoint
from faser_backend.engines.weights import ENDS, WeightSource, weight_sources

NUM_FEATURES = 3
LAYER_PREFIXES = ("midlayer.", "layers.0.")  # SpecForge's and vLLM's
TOKEN_MAPS = ("d2t", "t2d")
LAYERS_FIELD = "eagle_aux_hidden_state_layer_ids"
FIXED_FIELDS: dict[str, tuple[Any, ...]] = {  # other values describe other models
    "model_type": ("llama",),
    "num_hidden_layers": (1,),
    "tie_word_embeddings": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "bias": (False,),
    "sliding_window": (),
    "norm_before_residual": (False,),
    "parallel_drafting": (False,),
    "num_aux_hidden_states": (NUM_FEATURES,),
    "logit_scale": (1, 1.0),
    LAYERS_FIELD: (),  # readers interpret it differently here; see _feature_layers
}


@dataclass(frozen=True, slots=True, eq=False)
class DraftHead:
    """A checked draft that reads its target: an EAGLE-3 head or, without token_ids, a block drafter (dflash.py)."""

    spec: ModelSpec  # with the target's vocabulary and context
    feature_layers: tuple[int, ...]  # target layers whose inputs it reads, ascending
    sources: dict[str, WeightSource]  # "fc" first; no "embedding" or "lm_head" where the target's is used
    token_ids: np.ndarray | None = None  # [draft_vocab_size] int64: the target's id of each logit


def is_eagle3(config: dict[str, Any]) -> bool:
    """Returns whether a config.json describes a head rather than a decoder."""
    names = config.get("architectures")
    return config.get("draft_vocab_size") is not None or (
        isinstance(names, list) and any("Eagle3" in str(name) for name in names)
    )


def read_head(checkpoint: HuggingFaceCheckpoint, target: ModelSpec) -> DraftHead:
    """Reads and checks config and token map of a head. target: its spec as in the checkpoint.

    Raises CheckpointError naming file, field or tensor, value and limit.
    """
    fields = checkpoint.fields
    for field, wanted in FIXED_FIELDS.items():
        fields.must_be(field, *wanted)
    spec = read_spec(fields)
    fields.must_be_target_s(vocab_size=target.vocab_size, target_hidden_size=target.hidden_size)
    if "embed_tokens.weight" not in checkpoint.names and spec.hidden_size != target.hidden_size:
        reason = f"must be the target's, {target.hidden_size}, because the head has no embedding"
        raise fields.error("hidden_size", spec.hidden_size, reason)
    num_ids = fields.count("draft_vocab_size", spec.vocab_size, default=spec.vocab_size)
    return DraftHead(
        spec=replace(spec, family=EAGLE3, max_context=target.max_context),
        feature_layers=_feature_layers(fields, target),
        token_ids=_token_ids(checkpoint, num_ids, spec.vocab_size),
        sources=_head_sources(spec, checkpoint, target.hidden_size, num_ids),
    )


def _feature_layers(fields: ConfigFields, target: ModelSpec) -> tuple[int, ...]:
    """Returns the target layers whose inputs the head reads. eagle_config lists the layers before these."""
    section = fields.section("eagle_config")
    section.must_be("use_aux_hidden_state", True)
    layers = section.values.get(LAYERS_FIELD)
    if layers is None:
        layers = [1, target.num_layers // 2 - 1, target.num_layers - 4]
    return inputs_after(section, LAYERS_FIELD, layers, target, NUM_FEATURES)


def inputs_after(
    fields: ConfigFields, name: str, layers: Any, target: ModelSpec, count: int | None = None
) -> tuple[int, ...]:
    """Returns the target layers behind those that a field lists, whose inputs a draft reads. count: None is any."""
    last = target.num_layers - 2
    is_rising = isinstance(layers, list) and all(type(layer) is int for layer in layers)
    is_rising = is_rising and layers == sorted(set(layers)) and len(layers) == (count or max(len(layers), 1))
    if not is_rising or layers[0] < 0 or layers[-1] > last:
        raise fields.error(name, layers, f"must be {count or 'some'} ascending layers of the target in [0, {last}]")
    return tuple(layer + 1 for layer in layers)


def _token_ids(checkpoint: HuggingFaceCheckpoint, num_ids: int, vocab_size: int) -> np.ndarray:
    """Returns ids [num_ids] from d2t, which holds the target's id minus the head's."""
    where, own_ids = checkpoint.directory, np.arange(num_ids)
    if "d2t" not in checkpoint.names:
        if num_ids != vocab_size:
            raise CheckpointError(f"{where}: tensor d2t is missing: draft_vocab_size = {num_ids} of {vocab_size} ids")
        return own_ids
    if (shape := checkpoint.shape("d2t")) != (num_ids,):
        raise CheckpointError(f"{where}: d2t has shape {list(shape)}, config.json wants {[num_ids]}")
    ids = own_ids + checkpoint.read_integers("d2t")
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        raise CheckpointError(
            f"{where}: d2t[{outside[0]}] makes id {ids[outside[0]]}: must lie in [0, {vocab_size - 1}]"
        )
    distinct, counts = np.unique(ids, return_counts=True)
    if distinct.size < num_ids:
        raise CheckpointError(f"{where}: d2t: id {distinct[counts > 1][0]} is listed more than once")
    return ids


def _head_sources(
    spec: ModelSpec, checkpoint: HuggingFaceCheckpoint, target_hidden_size: int, num_ids: int
) -> dict[str, WeightSource]:
    """Returns the sources of a one-layer Llama, with a qkv for rows of twice the width and num_ids rows of lm_head."""
    prefix = next((p for p in LAYER_PREFIXES if f"{p}hidden_norm.weight" in checkpoint.names), LAYER_PREFIXES[0])
    hidden = spec.hidden_size
    sources = draft_sources(spec, checkpoint, NUM_FEATURES * target_hidden_size, prefix)
    qkv = sources["layers.0.qkv"]
    doubled = tuple((part, (num_out, 2 * hidden)) for part, (num_out, _) in qkv.parts)
    sources["layers.0.qkv"] = replace(qkv, parts=doubled)
    sources["layers.0.hidden_norm"] = WeightSource(((f"{prefix}hidden_norm.weight", (hidden,)),))
    return sources | {"lm_head": WeightSource((("lm_head.weight", (num_ids, hidden)),))}


def draft_sources(
    spec: ModelSpec, checkpoint: HuggingFaceCheckpoint, num_inputs: int, prefix: str = "layers.0."
) -> dict[str, WeightSource]:
    """Returns the sources of a draft: the matrix that joins num_inputs features, the layers, the ends that it has.

    prefix: of the first layer's names.
    """
    sources = {"fc": WeightSource((("fc.weight", (spec.hidden_size, num_inputs)),), is_transposed=True)}
    for name, source in weight_sources(spec).items():
        parts = tuple((p.removeprefix("model.").replace("layers.0.", prefix, 1), shape) for p, shape in source.parts)
        if name not in ENDS or (parts[0][0] in checkpoint.names and not spec.tie_word_embeddings):
            sources[name] = replace(source, parts=parts)
    return sources
