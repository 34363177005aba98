"""Reads block drafters, which guess a block of tokens in one call: z-lab's DFlash (arXiv 2602.06036) and DSpark (arXiv
2607.05147), as DeepSpec writes it.

Hidden states of some layers of the target, joined by `fc` and normalised, make every layer's keys and values of the
positions that the target has run. A block is the last token and masks; its rows see those positions and each other. The
config is a Qwen3 decoder's. Embedding and output head are the target's unless the checkpoint has its own.

A mask of DFlash predicts its own position. A row of DSpark, the last token's too, predicts the next: its logits get the
bias w2(w1[token drawn before]), and a linear layer on [its hidden state, w1[that token]] gives the logit of its chance
of acceptance. What DeepSpec names DFlash is DSpark with rank 0, without bias and confidence.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from faser_backend.core.model import DFLASH, DSPARK, MAX_BLOCK, ModelSpec
from faser_backend.engines.checkpoint import ConfigFields
from faser_backend.engines.eagle3 import DraftHead, draft_sources, inputs_after
from faser_backend.engines.families import read_spec
from faser_backend.engines.safetensors_checkpoint import HuggingFaceCheckpoint
from faser_backend.engines.weights import WeightSource

SECTION = "dflash_config"  # of DFlash; DSpark has these fields beside the others
DSPARK_MODEL = "Qwen3DSparkModel"
VOCABULARIES = ("lm_head", "markov_w1", "markov_w2")  # weights with a row per token
FIXED_FIELDS: dict[str, tuple[Any, ...]] = {  # in the section or beside it; other values describe other models
    "causal": (False,),
    "is_causal": (False,),
    "use_swa": (False,),
    "attention_sink_bias": (False,),
    "input_embedding_scale": (1, 1.0),
    "output_multiplier": (1, 1.0),
    "final_logit_softcapping": (),
    "sample_from_anchor": (False,),
    "markov_head_type": ("vanilla",),
    "confidence_head_with_markov": (True,),
}


def is_dflash(config: dict[str, Any]) -> bool:
    """Returns whether a config.json describes a block drafter, of a known kind or not, rather than a decoder."""
    names = config.get("architectures")
    return SECTION in config or (isinstance(names, list) and any(kind in str(names) for kind in ("DFlash", "DSpark")))


def read_drafter(checkpoint: HuggingFaceCheckpoint, target: ModelSpec) -> DraftHead:
    """Reads and checks the config of a drafter. target: its spec as in the checkpoint.

    Raises CheckpointError naming file, field, value and limit.
    """
    fields = checkpoint.fields
    is_dspark = fields.values.get("architectures") == [DSPARK_MODEL]
    section = fields if is_dspark else fields.section(SECTION)
    fields.must_be("architectures", ["DFlashDraftModel"], [DSPARK_MODEL])
    fields.must_be("model_type", "qwen3")
    for name, wanted in FIXED_FIELDS.items():
        for holder in (section, fields):
            holder.must_be(name, *wanted)
    spec = read_spec(fields)
    sizes = {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size}
    fields.must_be_target_s(**sizes, num_target_layers=target.num_layers)
    mask = section.count("mask_token_id", target.vocab_size - 1, least=0)
    block_size = (section if "block_size" in section.values else fields).count("block_size", MAX_BLOCK, 16)
    if block_size < 2:
        raise fields.error("block_size", block_size, "must be at least 2: the last token and one more")
    layers = inputs_after(section, "target_layer_ids", section.values.get("target_layer_ids"), target)
    family = DSPARK if is_dspark else DFLASH
    spec = replace(spec, family=family, max_context=target.max_context, block_size=block_size, mask_id=mask)
    sources = draft_sources(spec, checkpoint, len(layers) * spec.hidden_size)
    sources["hidden_norm"] = WeightSource((("hidden_norm.weight", (spec.hidden_size,)),))
    return DraftHead(spec, layers, sources | _dspark_sources(spec, fields) if is_dspark else sources)


def _dspark_sources(spec: ModelSpec, fields: ConfigFields) -> dict[str, WeightSource]:
    """Returns the sources of DSpark's bias and of the confidence that a drafter may have; none with rank 0."""
    rank, sources = fields.count("markov_rank", spec.hidden_size, least=0), dict[str, WeightSource]()
    if rank == 0:
        fields.must_be("enable_confidence_head", False)
        return sources
    for name, is_transposed in (("markov_w1", False), ("markov_w2", True)):
        part = f"markov_head.{name}.weight", (spec.padded_vocab_size, rank)
        sources[name] = WeightSource((part,), is_transposed=is_transposed)
    if fields.flag("enable_confidence_head", False):
        for kind, shape in (("weight", (1, spec.hidden_size + rank)), ("bias", (1,))):
            sources[f"confidence_{kind}"] = WeightSource(((f"confidence_head.proj.{kind}", shape),))
    return sources
