"""Small random Llama checkpoints and their engines, for tests that need a real model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from faser_backend.core.batch import RowBatch
from faser_backend.core.ports import ModelRunner

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


def write_tokenizer(directory: Path, vocab_size: int = VOCAB_SIZE, first: str = "token0") -> None:
    vocab = {f"token{i}" if i else first: i for i in range(vocab_size)}
    content = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": vocab, "unk_token": first}}
    (directory / "tokenizer.json").write_text(json.dumps(content))


def write_checkpoint(directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A random checkpoint with weights large enough that every part of the model shows in the logits."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**DEFAULTS, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.25)
            if name.endswith("norm.weight"):
                parameter.add_(1.0)
    directory.mkdir(parents=True, exist_ok=True)
    model.to(dtype).save_pretrained(directory)
    write_tokenizer(directory, model.config.vocab_size)
    return directory


def write_draft(source: Path, directory: Path, *, noise: float = 0.05, seed: int = 1) -> Path:
    """The checkpoint `source` with noisy weights: a draft that is often right, but not always."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    model.save_pretrained(directory)
    write_tokenizer(directory, model.config.vocab_size)
    return directory


def reference_model(directory: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def reference_logits(model: LlamaForCausalLM, token_ids: np.ndarray) -> np.ndarray:
    """Logits [num_tokens, vocab_size] of one sequence in a single dense pass."""
    with torch.no_grad():
        return model(torch.from_numpy(token_ids)[None]).logits[0].numpy()


def make_rows(
    sequences: list[np.ndarray],
    starts: list[int],
    counts: list[int],
    block_tables: np.ndarray,
    logit_rows: np.ndarray | None = None,
) -> RowBatch:
    """Rows [start, start + count) of each sequence; logits of all rows unless given."""
    cu_rows = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    parts = [tokens[s : s + n] for tokens, s, n in zip(sequences, starts, counts, strict=True)]
    return RowBatch(
        token_ids=np.concatenate(parts),
        cu_rows=cu_rows,
        context_lens=np.array(starts, np.int64),
        block_tables=block_tables,
        logit_rows=np.arange(cu_rows[-1]) if logit_rows is None else logit_rows,
    )


def run_all(runner: ModelRunner, rows: RowBatch) -> np.ndarray:
    """Every segment in order; a copy of the logits [R, vocab_size]."""
    hidden = None
    for segment in range(runner.num_segments):
        hidden = runner.run_segment(segment, rows, hidden)
    assert hidden is not None
    return np.array(hidden)
