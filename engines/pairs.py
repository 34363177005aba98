"""Pairs: everything that a draft and a target must share to be built together, and what may differ.

Speculation compares token ids: both models must mean the same token by each. Rows that pad a vocabulary may
differ; they are cut, so that no id without a token can ever be drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from faser_backend.core.model import ModelSpec
from faser_backend.engines.checkpoint import HuggingFaceCheckpoint, end_ids, open_checkpoint
from faser_backend.engines.checkpoint_base import TOKENIZER_FILE, CheckpointError
from faser_backend.engines.eagle3 import TOKEN_MAPS, Eagle3Head, is_eagle3, read_head
from faser_backend.engines.families import read_spec
from faser_backend.engines.prompts import special_tokens
from faser_backend.engines.weights import ModelWeights
from faser_backend.vocabulary import read_vocabulary, vocab_hash

SIDES = ("target", "draft")


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointPair:
    """Two checkpoints that fit together, or a target alone; specs and weights by "target" and "draft"."""

    specs: dict[str, ModelSpec]
    weights: dict[str, ModelWeights]
    tokenizer: Path
    vocab_hash: str
    end_ids: tuple[int, ...]
    head: Eagle3Head | None = None  # what the draft is where it is no decoder


def open_pair(
    target: Path,
    draft: Path | None,
    max_context: int | None,
    on_read: Callable[[str], object],
    *,
    joins_experts: bool = False,
) -> CheckpointPair:
    """Opens both and checks all that can be checked before a number is read.

    draft: None where no model is to draft; a head has its target's tokenizer unless it brings one.
    max_context: see matched_pair. on_read: called with the model and the name of each weight before it is read.
    joins_experts: see engines.weights.weight_sources.
    Raises CheckpointError naming file or field and value.
    """
    checkpoints, head = {"target": open_checkpoint(target)}, None
    specs = {"target": read_spec(checkpoints["target"].fields)}
    tokenizers = {"target": checkpoints["target"].directory / TOKENIZER_FILE}
    if draft is not None:
        checkpoint = checkpoints["draft"] = open_checkpoint(draft)
        own = checkpoint.directory / TOKENIZER_FILE
        if is_eagle3(checkpoint.fields.values):
            assert isinstance(checkpoint, HuggingFaceCheckpoint), "other layouts have no words for heads"
            head = read_head(checkpoint, specs["target"])
        specs["draft"] = read_spec(checkpoint.fields) if head is None else head.spec
        tokenizers["draft"] = own if head is None or own.exists() else tokenizers["target"]
    specs, vocabulary_hash = matched_pair(specs, tokenizers, max_context)
    if head is not None and "embedding" in head.sources:
        head.sources["embedding"] = replace(head.sources["embedding"], num_rows=specs["draft"].vocab_size)
    weights = {
        side: ModelWeights(
            checkpoint,
            specs[side],
            lambda name, side=side: on_read(f"{side}: {name}"),
            joins_experts=joins_experts,
            sources=head.sources if head is not None and side == "draft" else None,
            others=TOKEN_MAPS if head is not None and side == "draft" else (),
        )
        for side, checkpoint in checkpoints.items()
    }
    specs = {side: replace(specs[side], checkpoint_dtype=weights[side].checkpoint_dtype) for side in specs}
    if head is not None:
        specs["target"] = replace(specs["target"], feature_layers=head.feature_layers)
        head = replace(head, spec=specs["draft"])
    last_ids = end_ids(checkpoints["target"], specs["target"].vocab_size)
    return CheckpointPair(specs, weights, tokenizers["target"], vocabulary_hash, last_ids, head)


def matched_pair(
    specs: dict[str, ModelSpec], tokenizers: dict[str, Path], max_context: int | None
) -> tuple[dict[str, ModelSpec], str]:
    """specs and tokenizers by "target" and "draft" -> the specs to build, and the hash of their vocabulary.

    Both get the vocabulary of the tokenizer, whatever rows pad theirs (padded_vocab_size keeps the number), and
    the context that max_context limits them to. Raises CheckpointError naming the two values that differ.
    """
    vocabularies = {side: read_vocabulary(tokenizers[side]) for side in specs}
    _check_vocabularies(vocabularies, specs)
    if "draft" in specs:
        _check_special_tokens({side: special_tokens(tokenizers[side]) for side in SIDES})
    token, lowest = min(vocabularies["target"].items(), key=lambda entry: entry[1])
    if lowest < 0:
        raise CheckpointError(f"{tokenizers['target']}: token {token!r} has id {lowest}: must be at least 0")
    size = max(vocabularies["target"].values()) + 1
    for side, spec in specs.items():
        if spec.vocab_size < size:
            raise CheckpointError(f"vocab_size of {side} = {spec.vocab_size}: its tokenizer has ids up to {size - 1}")
    context = _common_context(specs, max_context)
    cut = {
        side: replace(spec, vocab_size=size, max_context=min(context, spec.max_context)) for side, spec in specs.items()
    }
    return cut, vocab_hash(vocabularies["target"])


def _check_vocabularies(vocabularies: dict[str, dict[str, int]], specs: dict[str, ModelSpec]) -> None:
    target, draft = vocabularies["target"], vocabularies.get("draft")
    if not target:
        raise CheckpointError("vocabulary of target: has no tokens")
    if draft is None or target == draft:
        return
    token = next(token for token in (*target, *draft) if target.get(token) != draft.get(token))
    said = " and ".join(
        f"of {side} ({len(vocabularies[side])} tokens, vocab_size {specs[side].vocab_size})" for side in SIDES
    )
    raise CheckpointError(
        f"vocabulary {said} must be equal: token {token!r} has id {target.get(token)} and {draft.get(token)}"
    )


def _check_special_tokens(special: dict[str, dict[int, str]]) -> None:
    target, draft = (special[side] for side in SIDES)
    if target != draft:
        token_id = min(token_id for token_id in target | draft if target.get(token_id) != draft.get(token_id))
        raise CheckpointError(
            f"special tokens of target and of draft must be equal: id {token_id} is "
            f"{target.get(token_id)!r} and {draft.get(token_id)!r}"
        )


def _common_context(specs: dict[str, ModelSpec], max_context: int | None) -> int:
    """The limit of all models. A draft may reach further than its target; a shorter reach has to be asked for."""
    target, shortest = specs["target"].max_context, min(spec.max_context for spec in specs.values())
    reach = "max_position_embeddings of " + " and of ".join(f"{side} = {s.max_context}" for side, s in specs.items())
    if max_context is not None:
        if not 1 <= max_context <= shortest:
            raise CheckpointError(f"max_context = {max_context}: must lie in [1, {shortest}]: {reach}")
        return max_context
    if shortest < target:
        raise CheckpointError(f"{reach}: the draft cannot follow so far; build with max_context = {shortest}, or less")
    return target
