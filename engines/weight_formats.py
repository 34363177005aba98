"""How the matrices of runtime "llvm" are stored: formats that are asked for, or chosen by what the checkpoint holds.

Norms, biases, routers and rotary tables are always float32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from faser_backend.core.model import WEIGHT_FORMATS, ModelSpec, WeightFormat
from faser_backend.engines.checkpoint_base import CheckpointError
from faser_backend.engines.weights import ModelWeights
from faser_backend.manifest import CPU_KV_CACHE_DTYPES
from faser_backend.runtime_spec import RUNTIMES

FLOAT32, FLOAT16, INT8, INT4 = "fp32", "fp16", "int8", "int4"
HALF_CHECKPOINTS = {"F16": FLOAT16, "BF16": "bf16"}  # names of safetensors files, and ours
FLOAT_CHECKPOINTS = {"F32": FLOAT32, **HALF_CHECKPOINTS}
# The stored types that a format holds number by number, the smallest format first; float32 holds all.
HELD = {INT4: ("Q4_0", "Q4_1"), INT8: ("Q8_0", "Q4_0"), FLOAT16: ("F16",), "bf16": ("BF16",)}
HELD_TYPES = {"F32"}.union(*HELD.values())
ENDS: tuple[str, str] = ("embedding", "lm_head")  # matrices beside the layers'
ROUTER = ".router"  # the end of its names
NUM_NAMED = 3  # of matrices of one kind, when they are reported


def check_formats(runtime: str, formats: Mapping[str, str | None], *, has_draft: bool) -> None:
    """formats: by "target" and "draft", None where none was asked for.

    Raises CheckpointError for one that is unknown or not for this pair.
    """
    for side, weight_format in formats.items():
        if weight_format is None:
            continue
        field = f"weights of {side} = {weight_format!r}"
        if weight_format not in WEIGHT_FORMATS:
            raise CheckpointError(f"{field}: must be one of {', '.join(WEIGHT_FORMATS)}")
        if weight_format == FLOAT32:
            continue
        if not RUNTIMES[runtime].is_cpu:
            raise CheckpointError(f"{field}: for runtimes of a CPU alone; on {runtime!r} choose the dtype")
        if side == "draft" and not has_draft:
            raise CheckpointError(f"{field}: there is no draft model to build")


def choose_weights(runtime: str, asked: str | None, weights: ModelWeights) -> WeightFormat:
    """asked: None leaves the choice. Runtime "llvm" then keeps what the checkpoint holds, the embedding and the head in
    formats of their own; on a GPU matrices have the engine's dtype."""
    if not RUNTIMES[runtime].is_cpu:
        return WeightFormat(FLOAT32)
    weights = weights.with_queries_keys_and_values_apart()
    matrices = {
        name: weights.stored_types(name)
        for name in weights
        if len(weights.shape(name)) > 1 and not name.endswith(ROUTER)
    }
    of_layers = frozenset[str]().union(*(types for name, types in matrices.items() if name not in ENDS))
    layers = asked or smallest_format(of_layers)
    embedding, head = (asked or smallest_format(matrices[name]) if name in matrices else layers for name in ENDS)
    if ENDS[1] not in matrices:
        head = embedding
    chosen = WeightFormat(layers, embedding=embedding, head=head)
    return replace(chosen, rounded=_rounded(chosen, matrices))


def format_of(name: str, weight_format: WeightFormat) -> str:
    """The format of a matrix by its graph name; float32 of routers, for near experts are a step apart."""
    if name.endswith(ROUTER):
        return FLOAT32
    return dict(zip(ENDS, weight_format.formats[1:], strict=True)).get(name, weight_format.name)


def is_held(stored_types: Iterable[str], weight_format: str) -> bool:
    """Whether the format stores exactly the numbers of these types."""
    return weight_format == FLOAT32 or all(kind in HELD[weight_format] for kind in stored_types)


def smallest_format(stored_types: Iterable[str]) -> str:
    """The smallest format that holds all of these types exactly, types that no format does counting as halves.

    Where only float32 held a mixture of types that are quantised, halves do: they round by 1 in 2,048 at most.
    """
    kinds = {kind if kind in HELD_TYPES else "F16" for kind in stored_types}
    for weight_format in HELD:
        if is_held(kinds, weight_format):
            return weight_format
    return FLOAT32 if kinds & {"F32", "BF16"} else FLOAT16


def _rounded(chosen: WeightFormat, matrices: Mapping[str, frozenset[str]]) -> str:
    """Counts and names matrices that are quantised in the checkpoint and not held as they are, by type."""
    found = defaultdict[str, list[str]](list)
    for name, types in matrices.items():
        quantised = types - FLOAT_CHECKPOINTS.keys()
        if quantised and not is_held(types, format_of(name, chosen)):
            found["/".join(sorted(quantised))].append(name)
    return ", ".join(
        f"{len(names)} of {kind} ({', '.join(names[:NUM_NAMED])}{', ...' * (len(names) > NUM_NAMED)})"
        for kind, names in found.items()
    )


def choose_kv_cache_dtype(runtime: str, dtype: str, asked: str | None, specs: Mapping[str, ModelSpec]) -> str:
    """asked: None leaves the choice: on a CPU fp16, as precise as the weights are, where both checkpoints hold 16
    bits a number and this machine's CPU has instructions for halves, else fp32. Other runtimes keep keys and values
    in the engine's dtype. Raises CheckpointError."""
    choices = CPU_KV_CACHE_DTYPES if RUNTIMES[runtime].is_cpu else (dtype,)
    if asked is not None and asked not in choices:
        raise CheckpointError(f"kv_cache_dtype = {asked!r}: on {runtime!r} must be one of {', '.join(choices)}")
    if asked is not None or len(choices) == 1:
        return asked or dtype
    from faser_backend.cpu.kernels.attention import (
        has_halves,  # not above: it loads numba, which other runtimes do without
    )

    is_half = all(spec.checkpoint_dtype in HALF_CHECKPOINTS for spec in specs.values())
    return "fp16" if is_half and has_halves() else "fp32"
