"""Opens a target and its draft, and checks that they can be built together.

Three layouts of checkpoints are read: Hugging Face's, TensorRT-LLM's and GGUF files. Each checkpoint becomes a spec and
a table of tensors; its directory is not needed afterwards.

Speculation compares token ids, so both models must mean the same token by each id. Rows that only pad a vocabulary may
differ. They are cut, so that no id without a token can be drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from faser_backend.core.model import ModelSpec
from faser_backend.engines.checkpoint import CONFIG_FILE, Checkpoint, CheckpointError, read_json
from faser_backend.engines.dflash import VOCABULARIES, is_dflash, read_drafter
from faser_backend.engines.eagle3 import TOKEN_MAPS, DraftHead, is_eagle3, read_head
from faser_backend.engines.families import read_spec
from faser_backend.engines.gguf_checkpoint import GGUFCheckpoint
from faser_backend.engines.quantised_checkpoint import SECTION, QuantisedCheckpoint
from faser_backend.engines.safetensors_checkpoint import HuggingFaceCheckpoint
from faser_backend.engines.tensorrt_llm_checkpoint import TensorRTLLMCheckpoint
from faser_backend.engines.tokenizer_files import Prompts, TokenizerFile, read_end_ids, read_prompts, read_tokenizer
from faser_backend.engines.weights import ModelWeights, WeightSource, weight_sources

SIDES = ("target", "draft")


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointPair:
    """Two checkpoints that fit together, or a target alone; specs and weights by "target" and "draft"."""

    specs: dict[str, ModelSpec]
    weights: dict[str, ModelWeights]
    tokenizer: TokenizerFile  # the target's, like all that follows
    prompts: Prompts
    end_ids: tuple[int, ...]
    head: DraftHead | None = None  # set if the draft reads the target's hidden states


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a directory of any layout, or a GGUF file.

    Raises CheckpointError if config or weights are missing or malformed.
    """
    file = _find_gguf(path)
    if file is not None:
        return GGUFCheckpoint(file)
    config = read_json(path / CONFIG_FILE)
    if "architecture" in config and "model_type" not in config:
        return TensorRTLLMCheckpoint(path, config)
    return (QuantisedCheckpoint if config.get(SECTION) else HuggingFaceCheckpoint)(path, config)


def _find_gguf(path: Path) -> Path | None:
    """Returns the GGUF file that the path names, or the only one in a directory without a config; else None."""
    if path.is_file():
        return path
    if path.suffix == ".gguf" and not path.exists():
        raise CheckpointError(f"{path}: missing")
    found = sorted(path.glob("*.gguf")) if path.is_dir() and not (path / CONFIG_FILE).exists() else []
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:3])
        raise CheckpointError(f"{path}: holds {len(found)} GGUF files ({names}): name one of them")
    return found[0] if found else None


def open_pair(
    target: Path,
    draft: Path | None,
    max_context: int | None,
    on_read: Callable[[str], object],
    *,
    joins_experts: bool = False,
) -> CheckpointPair:
    """Opens both and checks all that can be checked before weights are read.

    draft: None builds a target alone. A head may come without a tokenizer: it uses its target's. max_context: see
    match_specs. on_read: called with the model and the name of each weight before it is read. joins_experts: see
    engines.weights.weight_sources. Raises CheckpointError naming file or field and value.
    """
    checkpoints, head = {"target": open_checkpoint(target)}, None
    if any(reads(checkpoints["target"].fields.values) for reads in (is_eagle3, is_dflash)):
        raise CheckpointError(f"{target}: drafts for a target: name that one, and this one as its draft")
    specs = {"target": read_spec(checkpoints["target"].fields)}
    if draft is not None:
        checkpoint = checkpoints["draft"] = open_checkpoint(draft)
        for is_own, read in ((is_eagle3, read_head), (is_dflash, read_drafter)):
            if head is None and is_own(checkpoint.fields.values):
                assert isinstance(checkpoint, HuggingFaceCheckpoint), "no other layout can describe a head"
                head = read(checkpoint, specs["target"])
        specs["draft"] = read_spec(checkpoint.fields) if head is None else head.spec
    tokenizers = {
        side: read_tokenizer(checkpoint.tokenizer_path)
        for side, checkpoint in checkpoints.items()
        if side == "target" or head is None or checkpoint.tokenizer_path.exists()
    }
    specs = match_specs(specs, tokenizers, max_context)
    prompts = read_prompts(tokenizers["target"])
    end_ids = read_end_ids(checkpoints["target"], specs["target"].vocab_size) or prompts.end_ids
    sources: dict[str, dict[str, WeightSource]] = {}
    if head is not None:
        specs["target"] = replace(specs["target"], feature_layers=head.feature_layers)
        sources = {"target": weight_sources(specs["target"], joins_experts=joins_experts), "draft": head.sources}
        own = sources["draft" if "embedding" in head.sources else "target"]
        # A block drafter's mask may be a row behind those of tokens.
        num_rows = max(specs["target"].vocab_size, specs["draft"].mask_id + 1)
        own["embedding"] = replace(own["embedding"], num_rows=num_rows)
        for name in {*head.sources}.intersection(VOCABULARIES if head.token_ids is None else ()):
            head.sources[name] = replace(head.sources[name], num_rows=specs["draft"].vocab_size)
    weights = {
        side: ModelWeights(
            checkpoint,
            specs[side],
            lambda name, side=side: on_read(f"{side}: {name}"),
            joins_experts=joins_experts,
            sources=sources.get(side),
            others=TOKEN_MAPS if head is not None and side == "draft" else (),
        )
        for side, checkpoint in checkpoints.items()
    }
    specs = {side: replace(specs[side], checkpoint_dtype=weights[side].checkpoint_dtype) for side in specs}
    return CheckpointPair(specs, weights, tokenizers["target"], prompts, end_ids, head)


def match_specs(
    specs: dict[str, ModelSpec], tokenizers: dict[str, TokenizerFile], max_context: int | None
) -> dict[str, ModelSpec]:
    """Returns the specs to build, by "target" and "draft".

    Both get the vocabulary of the tokenizer, whatever rows pad theirs (padded_vocab_size keeps the number), and
    the context that max_context limits them to. Raises CheckpointError naming the two values that differ.
    """
    target, draft = tokenizers["target"], tokenizers.get("draft")
    if not target.vocabulary:
        raise CheckpointError("vocabulary of target: has no tokens")
    if draft is not None:
        _check_vocabularies(target.vocabulary, draft.vocabulary, specs)
        ours, theirs = target.special_tokens, draft.special_tokens
        if ours != theirs:
            token_id = min(token_id for token_id in ours | theirs if ours.get(token_id) != theirs.get(token_id))
            raise CheckpointError(
                f"special tokens of target and of draft must be equal: id {token_id} is "
                f"{ours.get(token_id)!r} and {theirs.get(token_id)!r}"
            )
    size = max(target.vocabulary.values()) + 1
    for side, spec in specs.items():
        if spec.vocab_size < size:
            raise CheckpointError(f"vocab_size of {side} = {spec.vocab_size}: its tokenizer has ids up to {size - 1}")
    context = _common_context(specs, max_context)
    return {
        side: replace(spec, vocab_size=size, max_context=min(context, spec.max_context)) for side, spec in specs.items()
    }


def _check_vocabularies(target: dict[str, int], draft: dict[str, int], specs: dict[str, ModelSpec]) -> None:
    if target == draft:
        return
    token = next(token for token in (*target, *draft) if target.get(token) != draft.get(token))
    sizes = " and ".join(
        f"of {side} ({len(vocabulary)} tokens, vocab_size {specs[side].vocab_size})"
        for side, vocabulary in zip(SIDES, (target, draft), strict=True)
    )
    raise CheckpointError(
        f"vocabulary {sizes} must be equal: token {token!r} has id {target.get(token)} and {draft.get(token)}"
    )


def _common_context(specs: dict[str, ModelSpec], max_context: int | None) -> int:
    """Returns the context limit of all models.

    A draft may have a longer context than its target. A shorter one must be allowed by max_context.
    """
    target, shortest = specs["target"].max_context, min(spec.max_context for spec in specs.values())
    limits = "max_position_embeddings of " + " and of ".join(f"{side} = {s.max_context}" for side, s in specs.items())
    if max_context is not None:
        if not 1 <= max_context <= shortest:
            raise CheckpointError(f"max_context = {max_context}: must lie in [1, {shortest}]: {limits}")
        return max_context
    if shortest < target:
        raise CheckpointError(f"{limits}: the draft is too short; build with max_context = {shortest}, or less")
    return target
