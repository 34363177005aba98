"""A GGUF file as a checkpoint: its tensors by Hugging Face's names and in Hugging Face's order of rows.

Queries and keys of architecture `llama` are stored with the two halves of each head interleaved, experts of a layer
as one tensor. The tokenizer is written out as tokenizer.json into a folder that lives as long as the checkpoint.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from engines.arrays import CheckpointError
from engines.families import MAX_EXPERTS, MAX_HEADS
from engines.gguf_config import ROPE_FACTORS, read_config
from engines.gguf_file import GGUFFile
from engines.gguf_tokenizer import write_tokenizer_files
from engines.gguf_vocabulary import read_gguf_vocabulary

OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.([a-z_]+)\.(weight|bias)")
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",  # the router
}
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
HEADS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}


class _Source(NamedTuple):
    """One tensor of Hugging Face's: all of a tensor of the file, or one expert of it."""

    tensor: str
    expert: int | None = None
    num_heads: int = 0  # whose halves are interleaved; 0: rows are in order


class GGUFCheckpoint:
    """See engines.checkpoint.Checkpoint. Quantised tensors count as F16 and are read as float32."""

    def __init__(self, path: Path) -> None:
        self.origin = path
        self._file = GGUFFile(path)
        self.fields = read_config(self._file)  # first: an architecture that is unknown is told before its tokenizer
        vocabulary = read_gguf_vocabulary(path, self._file.metadata)
        self.config = self.fields.values
        self.config["eos_token_id"] = list(vocabulary.end_ids)
        self._sources: dict[str, _Source] = {}
        for tensor in self._file.tensors:
            for name, source in self._from(tensor):
                self._sources[name] = source
        self.directory = Path(tempfile.mkdtemp(prefix="faser-gguf."))
        weakref.finalize(self, shutil.rmtree, self.directory, ignore_errors=True)
        write_tokenizer_files(vocabulary, self.config.get("max_position_embeddings"), self.directory)

    @property
    def names(self) -> Collection[str]:
        return self._sources.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        source = self._sources[name]
        shape = self._file.tensors[source.tensor].shape
        return shape if source.expert is None else shape[1:]

    def dtype(self, name: str) -> str:
        """See Checkpoint."""
        return self._file.dtype(self._sources[name].tensor)

    def read(self, name: str) -> np.ndarray:
        """See Checkpoint."""
        return self._file.numbers(self._sources[name].tensor, self.read_stored(name)[1])

    def stored_type(self, name: str) -> str:
        """See Checkpoint."""
        return self._file.tensors[self._sources[name].tensor].type_name

    def read_stored(self, name: str) -> tuple[str, np.ndarray]:
        """See Checkpoint. Rows are in Hugging Face's order."""
        source = self._sources[name]
        rows = self._file.rows(source.tensor, source.expert)
        if source.num_heads:
            rows = _in_halves(rows, source.num_heads)
        return self.stored_type(name), rows

    def _from(self, tensor: str) -> Iterator[tuple[str, _Source]]:
        """What a tensor of the file is, or is made of, in Hugging Face's names."""
        match = LAYER.fullmatch(tensor)
        if tensor in OUTSIDE:
            yield OUTSIDE[tensor], _Source(tensor)
        elif match and match[2] in LAYER_NAMES:
            num_heads = self._num_heads(match[2], tensor)
            yield f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}", _Source(tensor, num_heads=num_heads)
        elif match and match[2] in EXPERTS and match[3] == "weight":
            shape = self._file.tensors[tensor].shape
            if len(shape) != 3 or shape[0] > MAX_EXPERTS:
                wanted = f"must be [experts, out, in] of at most {MAX_EXPERTS} experts"
                raise CheckpointError(f"{self.origin}: shape of {tensor} = {list(shape)}: {wanted}")
            for expert in range(shape[0]):
                name = f"model.layers.{match[1]}.mlp.experts.{expert}.{EXPERTS[match[2]]}.weight"
                yield name, _Source(tensor, expert)
        elif tensor != ROPE_FACTORS:
            raise CheckpointError(f"{self.origin}: tensor {tensor!r} belongs to no part of a model that is known")

    def _num_heads(self, kind: str, tensor: str) -> int:
        """Heads of a tensor whose rows are interleaved, 0 for others."""
        if self.config["model_type"] != "llama" or kind not in HEADS:
            return 0
        default = self.fields.count("num_attention_heads", MAX_HEADS)
        num_heads = self.fields.count(HEADS[kind], MAX_HEADS, default)
        num_rows = self._file.tensors[tensor].shape[0]
        if num_rows % (2 * num_heads):
            raise CheckpointError(
                f"{self.origin}: rows of {tensor} = {num_rows}: must be whole pairs of rows of {num_heads} heads"
            )
        return num_heads


def _in_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows [num_heads * (half * 2), ...] whose halves are interleaved -> [num_heads * (2 * half), ...]."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
