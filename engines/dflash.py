"""Reads DFlash drafters, which guess a block of tokens in one call (arXiv 2602.06036), in the public layout of z-lab.

Hidden states of some layers of the target, joined by `fc` and normalised, make every layer's keys and values of the
positions that the target has run. A block is the last token and masks; its rows see those positions and each other. The
config is a Qwen3 decoder's. Embedding and output head are the target's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from faser_backend.core.model import DFLASH, MAX_BLOCK, ModelSpec
from faser_backend.engines.eagle3 import inputs_after
from faser_backend.engines.families import read_spec
from faser_backend.engines.safetensors_checkpoint import HuggingFaceCheckpoint
from faser_backend.engines.weights import WeightSource, weight_sources

SECTION = "dflash_config"
FIXED_FIELDS: dict[str, tuple[Any, ...]] = {  # in the section or beside it; other values describe other models
    "causal": (False,),
    "is_causal": (False,),
    "use_swa": (False,),
    "attention_sink_bias": (False,),
    "input_embedding_scale": (1, 1.0),
    "output_multiplier": (1, 1.0),
    "final_logit_softcapping": (),
    "sample_from_anchor": (False,),
}


@dataclass(frozen=True, slots=True, eq=False)
class BlockDrafter:
    """A checked drafter. spec: a decoder with its target's vocabulary and context."""

    spec: ModelSpec
    feature_layers: tuple[int, ...]  # target layers whose inputs it reads, ascending
    sources: dict[str, WeightSource]  # "fc" first; no embedding and no lm_head


def is_dflash(config: dict[str, Any]) -> bool:
    """Returns whether a config.json describes a block drafter, of a known kind or not, rather than a decoder."""
    names = config.get("architectures")
    return SECTION in config or (isinstance(names, list) and any(kind in str(names) for kind in ("DFlash", "DSpark")))


def read_drafter(checkpoint: HuggingFaceCheckpoint, target: ModelSpec) -> BlockDrafter:
    """Reads and checks the config of a drafter. target: its spec as in the checkpoint.

    Raises CheckpointError naming file, field, value and limit.
    """
    fields = checkpoint.fields
    section = fields.section(SECTION)
    fields.must_be("architectures", ["DFlashDraftModel"])
    fields.must_be("model_type", "qwen3")
    for name, wanted in FIXED_FIELDS.items():
        for holder in (section, fields):
            holder.must_be(name, *wanted)
    spec = read_spec(fields)
    for name, value, wanted in (
        ("vocab_size", spec.vocab_size, target.vocab_size),
        ("hidden_size", spec.hidden_size, target.hidden_size),
        ("num_target_layers", fields.values.get("num_target_layers"), target.num_layers),
    ):
        if value is not None and value != wanted:
            raise fields.error(name, value, f"must be the target's, {wanted}")
    mask = section.values.get("mask_token_id")
    if type(mask) is not int or not 0 <= mask < target.vocab_size:
        raise fields.error(f"{SECTION}.mask_token_id", mask, f"must be an integer in [0, {target.vocab_size - 1}]")
    block_size = (section if "block_size" in section.values else fields).count("block_size", MAX_BLOCK, 16)
    if block_size < 2:
        raise fields.error("block_size", block_size, "must be at least 2: the last token and one more")
    layers = inputs_after(fields, f"{SECTION}.target_layer_ids", section.values.get("target_layer_ids"), target)
    spec = replace(spec, family=DFLASH, max_context=target.max_context, block_size=block_size, mask_id=mask)
    return BlockDrafter(spec, layers, _sources(spec, len(layers)))


def _sources(spec: ModelSpec, num_features: int) -> dict[str, WeightSource]:
    """Returns the sources of a decoder without ends, of the matrix that joins features and of the norm behind it."""
    features = (("fc.weight", (spec.hidden_size, num_features * spec.hidden_size)),)
    sources = {
        "fc": WeightSource(features, is_transposed=True),
        "hidden_norm": WeightSource((("hidden_norm.weight", (spec.hidden_size,)),)),
    }
    for name, source in weight_sources(spec).items():
        if name not in ("embedding", "lm_head"):
            parts = tuple((part.removeprefix("model."), shape) for part, shape in source.parts)
            sources[name] = replace(source, parts=parts)
    return sources
