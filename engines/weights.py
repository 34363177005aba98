"""The weights of a decoder under the names of its graph, read from a checkpoint one at a time, when accessed.

A table made from the spec gives the sources of each weight, so that a whole checkpoint is checked before anything is
built. Matrices multiply rows from the right: [in, out].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from faser_backend.core.model import ModelSpec
from faser_backend.engines.checkpoint import Checkpoint, CheckpointError

Shape = tuple[int, ...]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ENDS: tuple[str, str] = ("embedding", "lm_head")  # matrices outside the layers, [vocab_size, hidden_size]
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # buffers of old checkpoints, which are computed, not learned


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The tensors of a checkpoint that make one weight: joined along an axis, then cut or transposed."""

    parts: tuple[tuple[str, Shape], ...]
    axis: int = 0
    num_rows: int | None = None  # rows to keep of a padded vocabulary; None: all
    is_transposed: bool = False

    @property
    def shape(self) -> Shape:
        joined = list(self.parts[0][1])
        joined[self.axis] = sum(shape[self.axis] for _, shape in self.parts)
        joined[0] = self.num_rows or joined[0]
        return tuple(reversed(joined)) if self.is_transposed else tuple(joined)


class ModelWeights(Mapping[str, np.ndarray]):
    """A read-only mapping from graph names to arrays, in the checkpoint's dtype.

    Nothing is cached: each access reads the array again. Names in order: embedding, layers.0.input_norm, ...,
    norm, lm_head (absent if it is the embedding).
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        on_read: Callable[[str], object] | None = None,
        *,
        joins_experts: bool = False,
        sources: dict[str, WeightSource] | None = None,
        others: Collection[str] = (),
    ) -> None:
        """on_read: called with the name of each weight before it is read. joins_experts: see weight_sources.

        sources: for a model that is not a whole decoder. others: tensors of its checkpoint that are not weights.
        Raises CheckpointError for the first tensor that is missing, misshapen, unreadable or unexpected.
        """
        self.origin = checkpoint.origin
        self.sources = sources or weight_sources(spec, joins_experts=joins_experts)
        self._checkpoint = checkpoint
        self._on_read = on_read
        self.checkpoint_dtype = _check_tensors(checkpoint, self.sources, others)

    def __getitem__(self, name: str) -> np.ndarray:
        """Reads a weight. Raises CheckpointError if a number is not finite."""
        array = self._joined(name, self._checkpoint.read)
        return array.T if self.sources[name].is_transposed else array

    def __iter__(self) -> Iterator[str]:
        return iter(self.sources)

    def __len__(self) -> int:
        return len(self.sources)

    def shape(self, name: str) -> Shape:
        return self.sources[name].shape

    def stored_types(self, name: str) -> frozenset[str]:
        """Returns the types in which the parts of a weight are stored, see Checkpoint.stored_type."""
        return frozenset(self._checkpoint.stored_type(part) for part, _ in self.sources[name].parts)

    def read_blocks(self, name: str) -> np.ndarray:
        """Reads a matrix of one quantised type as it is stored: bytes of blocks [num_outputs, row_bytes]."""
        return self._joined(name, self._checkpoint.read_stored)

    def with_separate_qkv(self) -> ModelWeights:
        """Returns the same weights, with q, k and v in place of qkv, also of its bias."""
        sources: dict[str, WeightSource] = {}
        for name, source in self.sources.items():
            layer, _, part = name.rpartition(".")
            if part not in ("qkv", "qkv_bias"):
                sources[name] = source
                continue
            for own, piece in zip("qkv", source.parts, strict=True):
                sources[f"{layer}.{own}{part.removeprefix('qkv')}"] = replace(source, parts=(piece,))
        weights = copy(self)
        weights.sources = sources
        return weights

    def _joined(self, name: str, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """Joins the parts of a weight, read by `read`. Rows of a matrix are its outputs."""
        source = self.sources[name]
        if self._on_read is not None:
            self._on_read(name)
        parts = [read(part) for part, _ in source.parts]
        common = None if len({part.dtype for part in parts}) == 1 else np.float32  # numpy joins no bfloat16 and float16
        array = parts[0] if len(parts) == 1 else np.concatenate(parts, source.axis, dtype=common)
        return array[: source.num_rows]


def weight_sources(spec: ModelSpec, *, joins_experts: bool = False) -> dict[str, WeightSource]:
    """Returns the sources of every weight of a decoder.

    joins_experts: the experts of a layer form one matrix, for runtimes that compute all of them at once.
    """
    padded = (spec.padded_vocab_size or spec.vocab_size, spec.hidden_size)
    sources = {"embedding": WeightSource(((EMBEDDING, padded),), num_rows=spec.vocab_size)}
    for layer in range(spec.num_layers):
        own = _attention_sources(spec) | _mlp_sources(spec, joins_experts=joins_experts)
        for name, source in own.items():
            parts = tuple((f"model.layers.{layer}.{part}", shape) for part, shape in source.parts)
            sources[f"layers.{layer}.{name}"] = replace(source, parts=parts)
    sources["norm"] = _vector(("model.norm", spec.hidden_size))
    if not spec.tie_word_embeddings:
        sources["lm_head"] = WeightSource(((HEAD, padded),), num_rows=spec.vocab_size)
    return sources


def _attention_sources(spec: ModelSpec) -> dict[str, WeightSource]:
    hidden, num_q, num_kv = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    projections = [("self_attn.q_proj", num_q), ("self_attn.k_proj", num_kv), ("self_attn.v_proj", num_kv)]
    sources = {
        "input_norm": _vector(("input_layernorm", hidden)),
        "qkv": _matrix(hidden, *projections),
        "attention_out": _matrix(num_q, ("self_attn.o_proj", hidden)),
    }
    if spec.has_qkv_bias:
        sources["qkv_bias"] = _vector(*projections, kind="bias")
    if spec.has_qk_norm:
        sources["q_norm"] = _vector(("self_attn.q_norm", spec.head_dim))
        sources["k_norm"] = _vector(("self_attn.k_norm", spec.head_dim))
    if spec.has_attention_out_bias:
        sources["attention_out_bias"] = _vector(("self_attn.o_proj", hidden), kind="bias")
    return sources


def _mlp_sources(spec: ModelSpec, *, joins_experts: bool) -> dict[str, WeightSource]:
    hidden, inner, experts = spec.hidden_size, spec.intermediate_size, range(spec.num_experts)
    sources = {"mlp_norm": _vector(("post_attention_layernorm", hidden))}
    if not experts:
        sources |= _gated_mlp("", ["mlp"], hidden, inner)
        for name, out in (("gate", inner), ("up", inner), ("down", hidden)) if spec.has_mlp_bias else ():
            sources[f"{name}_bias"] = _vector((f"mlp.{name}_proj", out), kind="bias")
        return sources
    sources["router"] = _matrix(hidden, ("mlp.gate", len(experts)))
    if joins_experts:
        return sources | _gated_mlp("experts.", [f"mlp.experts.{expert}" for expert in experts], hidden, inner)
    for expert in experts:
        sources |= _gated_mlp(f"experts.{expert}.", [f"mlp.experts.{expert}"], hidden, inner)
    return sources


def _gated_mlp(prefix: str, modules: list[str], hidden: int, inner: int) -> dict[str, WeightSource]:
    """Returns gate and up [hidden, modules * inner], and down [modules * inner, hidden]."""
    gate, up = (_matrix(hidden, *((f"{module}.{name}_proj", inner) for module in modules)) for name in ("gate", "up"))
    down = _matrix(inner, *((f"{module}.down_proj", hidden) for module in modules))
    return {f"{prefix}gate": gate, f"{prefix}up": up, f"{prefix}down": replace(down, axis=1)}


def _matrix(num_inputs: int, *modules: tuple[str, int]) -> WeightSource:
    """Returns the source of a matrix of linear modules (name, number of outputs) that share their input."""
    return WeightSource(tuple((f"{name}.weight", (out, num_inputs)) for name, out in modules), is_transposed=True)


def _vector(*modules: tuple[str, int], kind: str = "weight") -> WeightSource:
    return WeightSource(tuple((f"{name}.{kind}", (size,)) for name, size in modules))


def _check_tensors(checkpoint: Checkpoint, sources: dict[str, WeightSource], others: Collection[str]) -> str:
    """Checks names, shapes and dtypes without reading weights. Returns the dtype of the first tensor."""
    wanted = {part: shape for source in sources.values() for part, shape in source.parts}
    for name, shape in wanted.items():
        if name not in checkpoint.names:
            raise CheckpointError(f"{checkpoint.origin}: tensor {name} is missing")
        if checkpoint.shape(name) != shape:
            raise CheckpointError(
                f"{checkpoint.origin}: {name} has shape {list(checkpoint.shape(name))}, its config wants {list(shape)}"
            )
        checkpoint.dtype(name)
    for name in checkpoint.names:
        is_known = name in wanted or name in others or name == HEAD or name.endswith(IGNORED_SUFFIXES)
        # tools of GPTQ write biases of zeros for modules without a bias
        if not is_known and not (name.endswith("_proj.bias") and not checkpoint.read(name).any()):
            raise CheckpointError(
                f"{checkpoint.origin}: tensor {name} belongs to no part of the model that its config describes"
            )
    if HEAD in checkpoint.names and HEAD not in wanted and EMBEDDING in wanted:
        head, embedding = checkpoint.read(HEAD), checkpoint.read(EMBEDDING)
        if not np.array_equal(head, embedding):
            raise CheckpointError(f"{checkpoint.origin}: {HEAD} is not the embedding: tie_word_embeddings is wrong")
    return checkpoint.dtype(next(iter(wanted)))
