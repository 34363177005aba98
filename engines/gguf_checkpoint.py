"""A GGUF file as a checkpoint: its header, config and tensors under Hugging Face's names, with rows in its order.

The package `gguf` reads the header and dequantises. A damaged file costs one error and little memory. Quantised rows
are dequantised in parts, when a tensor is read.

An unknown key of the architecture is refused by name, because a factor that is ignored would make another model.
Factors of rotary frequencies are a tensor. They are accepted only if they equal the scaling of Llama 3.1.

Architecture `llama` stores queries and keys with the two halves of each head interleaved, and the experts of a layer as
one tensor. The tokenizer is written as tokenizer.json into a temporary folder, removed with the checkpoint.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, ReaderTensor
from gguf.quants import dequantize, quant_shape_to_byte_shape

from faser_backend.core.model import MAX_CONTEXT, MAX_EXPERTS, MAX_HEADS, MAX_WIDTH, RopeScaling
from faser_backend.engines.checkpoint import DTYPES, Checkpoint, CheckpointError, ConfigFields, checked_finite
from faser_backend.engines.gguf_tokenizer import convert_tokenizer
from faser_backend.files import FileError, check_regular

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

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
NAMES = {  # Hugging Face's name: the file's key, behind the architecture's name and a dot
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "moe_intermediate_size": "expert_feed_forward_length",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
}
FIXED: dict[str, tuple[Any, ...]] = {  # the only variants that can be built
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "expert_shared_count": (0,),
    "expert_weights_norm": (True,),
    "leading_dense_block_count": (0,),
    "use_parallel_residual": (False,),
}
READ_SEPARATELY = {
    "vocab_size", "attention.value_length", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned",
}  # fmt: skip
ROPE_FACTORS = "rope_freqs.weight"
LLAMA3_CONTEXT = 8192  # every model with such factors was pretrained on it
LLAMA3_FACTORS = (1.0, 4.0)  # low_freq_factor, high_freq_factor

TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
READERS_OWN = "GGUF."  # keys that the package adds to the metadata
MAX_VALUES = 1 << 22  # of a header, with its lists' elements; two for each text
SCALES = "F16"  # the number format of all quantised types' scales
NUMBERS_AT_ONCE = 1 << 20


class _Source(NamedTuple):
    """Where one of Hugging Face's tensors is: a whole tensor of the file, or one expert of it."""

    tensor: str
    expert: int | None = None
    num_heads: int = 0  # heads with interleaved halves; 0 if rows are in order


class GGUFCheckpoint(Checkpoint):
    """A model in a GGUF file. Quantised tensors count as F16 and are read as float32."""

    def __init__(self, path: Path) -> None:
        self.origin = path
        self._file = GGUFFile(path)
        self.fields = read_config(self._file)  # first, because an unknown architecture may have an unknown tokenizer
        self._sources: dict[str, _Source] = {}
        for tensor in self._file.tensors:
            for name, source in self._from(tensor):
                self._sources[name] = source
        self.directory = Path(tempfile.mkdtemp(prefix="faser-gguf."))
        weakref.finalize(self, shutil.rmtree, self.directory, ignore_errors=True)
        config = self.fields.values
        end_ids = convert_tokenizer(path, self._file.metadata, config.get("max_position_embeddings"), self.directory)
        config["eos_token_id"] = list(end_ids)

    @property
    def names(self) -> Collection[str]:
        return self._sources.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        source = self._sources[name]
        shape = self._file.tensors[source.tensor].shape
        return shape if source.expert is None else shape[1:]

    def dtype(self, name: str) -> str:
        return self._file.dtype(self._sources[name].tensor)

    def read(self, name: str) -> np.ndarray:
        return self._file.numbers(self._sources[name].tensor, self.read_stored(name))

    def stored_type(self, name: str) -> str:
        return self._file.tensors[self._sources[name].tensor].type_name

    def read_stored(self, name: str) -> np.ndarray:
        source = self._sources[name]
        rows = self._file.rows(source.tensor, source.expert)
        return _in_halves(rows, source.num_heads) if source.num_heads else rows

    def _from(self, tensor: str) -> Iterator[tuple[str, _Source]]:
        """Yields the names under which a tensor of the file is read, and its sources."""
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
            raise CheckpointError(f"{self.origin}: tensor {tensor!r} belongs to no part of a supported model")

    def _num_heads(self, kind: str, tensor: str) -> int:
        """Returns the number of heads whose rows are interleaved, 0 for other tensors."""
        if self.fields.values["model_type"] != "llama" or kind not in HEADS:
            return 0
        default = self.fields.count("num_attention_heads", MAX_HEADS)
        num_heads = self.fields.count(HEADS[kind], MAX_HEADS, default)
        num_rows = self._file.tensors[tensor].shape[0]
        if num_rows % (2 * num_heads):
            wanted = f"must be a multiple of {2 * num_heads}, for {num_heads} heads"
            raise CheckpointError(f"{self.origin}: rows of {tensor} = {num_rows}: {wanted}")
        return num_heads


def _in_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Separates interleaved halves: rows [num_heads * (half * 2), ...] -> [num_heads * (2 * half), ...]."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def read_config(file: GGUFFile) -> ConfigFields:
    """Translates metadata to fields of config.json. Errors name the file's own keys.

    Raises CheckpointError for metadata that has no counterpart there.
    """
    found = ConfigFields(file.metadata, file.path)
    architecture = found.choice("general.architecture", ARCHITECTURES)
    found.must_be("split.count", 0, 1)
    _check_keys(found, architecture)
    keys = {name: f"{architecture}.{key}" for name, key in NAMES.items()}
    config = {name: file.metadata[key] for name, key in keys.items() if key in file.metadata}
    embedding = file.tensors.get("token_embd.weight")
    config |= {
        "model_type": ARCHITECTURES[architecture],
        "vocab_size": file.metadata.get(f"{architecture}.vocab_size", embedding and embedding.shape[0]),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }
    if architecture == "qwen3moe":
        config.setdefault("intermediate_size", config.get("moe_intermediate_size"))
        config["norm_topk_prob"] = True
    else:
        found.must_be(keys["num_experts"], 0)
    config["rope_scaling"] = _rope_scaling(file, found, architecture)
    rope_names = {"rope_type": "rope.scaling.type", "factor": "rope.scaling.factor", "vocab_size": "vocab_size"}
    keys |= {name: f"{architecture}.{key}" for name, key in rope_names.items()}
    return ConfigFields(config, file.path, keys)


def _check_keys(found: ConfigFields, architecture: str) -> None:
    """Refuses unknown keys, and variants that cannot be built."""
    known = {*NAMES.values(), *FIXED, *READ_SEPARATELY}
    for key, value in found.values.items():
        if key.startswith(f"{architecture}.") and key.removeprefix(f"{architecture}.") not in known:
            raise found.error(repr(key)[1:-1], value, "unknown key: its effect on the model is not known")
    for key, values in FIXED.items():
        found.must_be(f"{architecture}.{key}", *values)
    head_dim = _head_dim(found, architecture)
    for key in ("attention.value_length", "rope.dimension_count"):
        found.must_be(f"{architecture}.{key}", head_dim)


def _head_dim(found: ConfigFields, architecture: str) -> int:
    hidden_size = found.count(f"{architecture}.embedding_length", MAX_WIDTH)
    num_heads = found.count(f"{architecture}.attention.head_count", MAX_HEADS)
    return found.count(f"{architecture}.attention.key_length", MAX_WIDTH, default=max(hidden_size // num_heads, 1))


def _rope_scaling(file: GGUFFile, found: ConfigFields, architecture: str) -> dict[str, Any] | None:
    """Returns rope_scaling as in config.json, or None if frequencies are not scaled."""
    prefix = f"{architecture}.rope.scaling"
    kind = file.metadata.get(f"{prefix}.type", "none")
    if ROPE_FACTORS not in file.tensors:
        return None if kind == "none" else {"rope_type": kind, "factor": file.metadata.get(f"{prefix}.factor")}
    if kind != "none":
        raise found.error(f"{prefix}.type", kind, f"must be 'none', because the file has a tensor {ROPE_FACTORS}")
    rows = file.rows(ROPE_FACTORS)
    factors = file.numbers(ROPE_FACTORS, rows).astype(np.float64)
    half = _head_dim(found, architecture) // 2
    if factors.shape != (half,) or factors.min() <= 0:
        raise found.error(ROPE_FACTORS, factors.tolist(), f"must be {half} numbers above 0")
    if (factors == 1.0).all():
        return None
    theta = found.number(f"{architecture}.rope.freq_base", 1.0, 1e12, 10000.0)
    context = found.count(f"{prefix}.original_context_length", MAX_CONTEXT, default=LLAMA3_CONTEXT)
    scaling = RopeScaling("llama3", float(factors.max()), *LLAMA3_FACTORS, context)
    frequencies = theta ** (-np.arange(half) / half)
    wanted = frequencies / scaling.scaled(frequencies)
    if not np.allclose(factors, wanted, rtol=1e-4):
        index = int(np.abs(factors / wanted - 1).argmax())
        reason = f"must be {wanted[index]:g}, as in Llama 3.1; no other factors can be built"
        raise found.error(f"{ROPE_FACTORS}[{index}]", float(factors[index]), reason)
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": context,
    }


class GGUFTensor(NamedTuple):
    """The type, shape and position of a tensor. A row is the last axis, and consists of whole blocks."""

    type_name: str  # one of TYPES
    shape: tuple[int, ...]  # outermost axis first
    first_byte: int  # in the file


class _Reader(GGUFReader):
    """The package's reader, which otherwise reads past the end of a file, for as long as its header says."""

    _num_values = 0

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: str | None = None) -> np.ndarray:
        """Returns numbers of the file, or raises ValueError."""
        if self.byte_order != "I":
            raise ValueError("its bytes are in the other order")
        end, num_bytes = int(offset) + int(count) * np.dtype(dtype).itemsize, len(self.data)
        if end > num_bytes:
            raise ValueError(f"it ends at byte {num_bytes}, but its header promises {end} or more")
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise ValueError(f"its header has more than {MAX_VALUES} values")
        return np.frombuffer(self.data, dtype, int(count), int(offset))


class GGUFFile:
    """A checked file, its tensors under the file's names."""

    metadata: dict[str, Any]  # numbers, booleans, text, lists of numbers or of text
    tensors: dict[str, GGUFTensor]

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError naming the file."""
        self.path = path
        try:
            check_regular(path)
            reader = _Reader(path)
            entries = {key: field.contents() for key, field in reader.fields.items()}
        except FileError as error:
            raise CheckpointError(str(error)) from None
        except OSError as error:
            raise CheckpointError(f"{path}: not readable ({error})") from None
        except Exception as error:  # a damaged header leads to errors of many types
            raise CheckpointError(f"{path}: damaged, or no GGUF file: {str(error)!r:.200}") from None
        self.metadata = {key: value for key, value in entries.items() if not key.startswith(READERS_OWN)}
        self.tensors = {tensor.name: self._checked(tensor) for tensor in reader.tensors}

    def _checked(self, tensor: ReaderTensor) -> GGUFTensor:
        shape, type_name = tuple(reversed(tensor.shape.tolist())), tensor.tensor_type.name
        for field, value, is_right, wanted in (
            ("type", type_name, type_name in TYPES, f"one of {', '.join(TYPES)}"),
            ("shape", list(shape), bool(shape) and min(shape) > 0, "one axis or more, none of them empty"),
        ):
            if not is_right:
                raise CheckpointError(
                    f"{self.path}: {field} of {repr(tensor.name)[1:-1]:.100} = {value}: must be {wanted}"
                )
        return GGUFTensor(type_name, shape, tensor.data_offset)

    def dtype(self, name: str) -> str:
        """Returns the format of a tensor's numbers, or of its scales if they are quantised."""
        type_name = self.tensors[name].type_name
        return type_name if type_name in DTYPES else SCALES

    def rows(self, name: str, part: int | None = None) -> np.ndarray:
        """Maps a tensor as it is stored: as numbers, or as bytes of blocks [..., row_bytes] if it is quantised.

        part: an index along the first axis, or None for the whole tensor.
        """
        tensor = self.tensors[name]
        dtype, shape = DTYPES.get(tensor.type_name), tensor.shape
        if dtype is None:
            dtype, shape = np.dtype(np.uint8), quant_shape_to_byte_shape(shape, GGMLQuantizationType[tensor.type_name])
        mapped = np.memmap(self.path, dtype, "r", tensor.first_byte, shape)
        return mapped if part is None else mapped[part]

    def numbers(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Returns the numbers of some rows of a tensor: as they are stored, or dequantised to float32.

        Raises CheckpointError if a number is not finite.
        """
        type_name = self.tensors[name].type_name
        found = rows if type_name in DTYPES else _dequantised(rows, type_name)
        return checked_finite(found, f"{self.path}: {name}")


def _dequantised(rows: np.ndarray, type_name: str) -> np.ndarray:
    """Dequantises blocks [..., row_bytes] -> float32 [..., row size], exactly."""
    kind = GGMLQuantizationType[type_name]
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    flat = rows.reshape(-1, rows.shape[-1])
    found = np.empty((len(flat), rows.shape[-1] // block_bytes * block_size), np.float32)
    step = max(NUMBERS_AT_ONCE // found.shape[1], 1)
    with np.errstate(all="ignore"):  # the caller checks that numbers are finite
        for first in range(0, len(flat), step):
            found[first : first + step] = dequantize(flat[first : first + step], kind)
    return found.reshape(*rows.shape[:-1], -1)
