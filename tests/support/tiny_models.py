"""Small random checkpoints of every model family, and the logits that transformers computes for them."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from faser_backend.core.batch import RowBatch
from faser_backend.core.ports import ModelRunner
from faser_backend.engines.build import build_engines
from faser_backend.pipeline.rows import piece_rows, run_model

torch.set_num_threads(1)

VOCAB_SIZE = 97
DEFAULTS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": 3,
}


CONFIGS: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
# Heads have 8 numbers everywhere, because each width is compiled; more heads make them wider than the hidden states.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3_rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear_rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama_attention_bias": ("llama", {"attention_bias": True, "num_key_value_heads": 4}),
    "llama_all_biases_tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None, "num_attention_heads": 8}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("qwen3", {"num_attention_heads": 8}),
    "qwen3_tied_bias": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True, "num_attention_heads": 8}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "qwen3_moe_plain_shares": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": False, "num_experts_per_tok": 3}),
}


def write_tokenizer(directory: Path, vocab_size: int = VOCAB_SIZE, first: str = "token0") -> None:
    vocab = {f"token{i}" if i else first: i for i in range(vocab_size)}
    content = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": vocab, "unk_token": first}}
    (directory / "tokenizer.json").write_text(json.dumps(content))


def random_model(variant: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Returns a model of a variant, or of a plain family. Its weights are large enough to show in the logits."""
    family, own = VARIANTS.get(variant, (variant, {}))
    torch.manual_seed(seed)
    config = CONFIGS[family](**{**DEFAULTS, **own, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.25)
            if name.endswith("norm.weight"):
                parameter.add_(1.0)
    return model


def write_model(model: PreTrainedModel, directory: Path, **options: Any) -> Path:
    """Writes a Hugging Face checkpoint, and a tokenizer of as many tokens as the model reads."""
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, **options)
    write_tokenizer(directory, model.config.vocab_size)
    return directory


def write_checkpoint(directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Writes a random Llama with a tokenizer."""
    return write_model(random_model("llama", seed=seed, **changes).to(dtype), directory)  # pyright: ignore[reportArgumentType]


def write_draft(source: Path, directory: Path, *, noise: float = 0.05, seed: int = 1) -> Path:
    """Writes the checkpoint `source` with noise on its weights: a draft that is often right, but not always."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    model.save_pretrained(directory)
    write_tokenizer(directory, model.config.vocab_size)
    return directory


def build_with_draft(root: Path, *, sizes: dict[str, Any] | None = None, **options: Any) -> Path:
    """Builds the engine directory of a random checkpoint, root/source, and a draft of it."""
    source = write_checkpoint(root / "source", **(sizes or {}))
    build_engines(source, write_draft(source, root / "draft"), root / "engine", **{"kv_block_size": 4, **options})
    return root / "engine"


def reference_model(directory: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def reference_logits(model: LlamaForCausalLM, token_ids: np.ndarray) -> np.ndarray:
    """Returns logits [num_tokens, vocab_size] of one sequence in a single dense pass."""
    with torch.no_grad():
        return model(torch.from_numpy(token_ids)[None]).logits[0].numpy()


def make_rows(
    sequences: list[np.ndarray],
    starts: list[int],
    counts: list[int],
    block_tables: np.ndarray,
    logit_rows: np.ndarray | None = None,
) -> RowBatch:
    """Returns rows [start, start + count) of each sequence. logit_rows: by default all."""
    pieces = [tokens[s : s + n] for tokens, s, n in zip(sequences, starts, counts, strict=True)]
    rows = piece_rows(pieces, starts, block_tables, with_logits=False)
    return replace(rows, logit_rows=np.arange(rows.num_rows) if logit_rows is None else logit_rows)


def run_all(runner: ModelRunner, rows: RowBatch) -> np.ndarray:
    """Runs every segment in order. Returns a copy of the logits [R, vocab_size]."""
    return np.array(run_model(runner, rows))


RaggedCall = tuple[list[np.ndarray], list[int], list[int], np.ndarray]  # arguments of make_rows


def ragged_calls(
    rng: np.random.Generator, sequences: list[np.ndarray], expected: list[np.ndarray], tables: np.ndarray, most: int = 9
) -> Iterator[tuple[RaggedCall, np.ndarray]]:
    """Yields calls of 1 to `most` rows of each sequence and their logits, until all rows of `expected` have run."""
    starts, lengths = np.zeros(len(expected), np.int64), np.array([len(logits) for logits in expected])
    while (live := np.flatnonzero(starts < lengths)).size:
        counts = [int(rng.integers(1, min(left, most) + 1)) for left in lengths[live] - starts[live]]
        wanted = [expected[i][start : start + n] for i, start, n in zip(live, starts[live], counts, strict=True)]
        yield ([sequences[i] for i in live], starts[live].tolist(), counts, tables[live]), np.concatenate(wanted)
        starts[live] += counts


def largest_error(runner: ModelRunner, reference: Any, seed: int, num_blocks: int = 60) -> float:
    """Runs three sequences in ragged chunks and shuffled blocks. Returns the largest error of their logits."""
    rng, width = np.random.default_rng(seed), num_blocks // 3
    sequences = [rng.integers(0, VOCAB_SIZE, int(n)) for n in rng.integers(10, 3 * width, 3)]
    expected = [reference_logits(reference, tokens) for tokens in sequences]
    tables = rng.permutation(num_blocks)[: 3 * width].reshape(3, width)
    calls = ragged_calls(rng, sequences, expected, tables, 17)
    return max(float(np.abs(run_all(runner, make_rows(*call)) - wanted).max()) for call, wanted in calls)
