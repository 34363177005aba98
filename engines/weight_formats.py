"""How matrices lie in the weight file of runtime "onnxruntime", which computes in float32 whatever their format; and
which formats the runtimes of a CPU take, and choose.

"fp16" and "bf16" are cast back to float32, which ONNX Runtime does once, when it loads a segment. "int8" is ONNX
Runtime's own weight-only format: blocks of a matrix share a float32 scale, and its kernel rounds the other factor
of a product to 8 bits too. Norms, biases, routers and rotary tables are always float32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from engines.arrays import CheckpointError, converted_blocks
from engines.graph import FLOAT_TYPES, GraphBuilder, WeightStore
from engines.weights import ModelWeights
from faser_backend.core.model import WEIGHT_FORMATS, ModelSpec, WeightFormat
from faser_backend.manifest import CPU_KV_CACHE_DTYPES
from faser_backend.runtime_spec import RUNTIMES
from plugins.onnxruntime_import import onnxruntime_kernels

FLOAT32, INT8, INT4 = "fp32", "int8", "int4"
INT8_BLOCK = 64  # with blocks of 128 and more a row's result depends on how many rows the call has
INT8_ZERO = 128
INT8_PRODUCTS = 4  # MatMulNBits' accuracy_level for products of 8-bit numbers: float32 ones are slower than fp32
FLOAT16 = "fp16"
HALF_CHECKPOINTS = {"F16": FLOAT16, "BF16": "bf16"}  # names of safetensors files, and ours
FLOAT_CHECKPOINTS = {"F32": FLOAT32, **HALF_CHECKPOINTS}
# The stored types that a format holds number by number, the smallest format first; float32 holds all.
HELD = {INT4: ("Q4_0", "Q4_1"), INT8: ("Q8_0", "Q4_0"), FLOAT16: ("F16",), "bf16": ("BF16",)}
HELD_TYPES = {"F32"}.union(*HELD.values())
ENDS: tuple[str, str] = ("embedding", "lm_head")  # matrices beside the layers'
ROUTER = ".router"  # the end of its names
NUM_NAMED = 3  # of matrices of one kind, when they are reported
CONTRIB_DOMAIN = "com.microsoft"
# what matmul_nbits_quantizer calls for each matrix of a whole graph; that module wants onnx_ir, and graphs in memory
_quantize: Callable[..., None] = getattr(onnxruntime_kernels, "quantize_matmul_8bits")  # noqa: B009 (not in its stubs)


def check_formats(
    runtime: str, formats: Mapping[str, str | None], *, has_draft: bool = True, has_head: bool = False
) -> None:
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
        if weight_format not in RUNTIMES[runtime].weight_formats:
            able = (name for name, spec in RUNTIMES.items() if weight_format in spec.weight_formats)
            raise CheckpointError(f"{field}: for runtime {' or '.join(map(repr, able))} alone")
        if side == "draft" and not has_draft:
            raise CheckpointError(f"{field}: there is no draft model to build")
        if has_head and not RUNTIMES[runtime].keeps_formats:
            raise CheckpointError(f"{field}: pairs with an EAGLE-3 head, which may share matrices, take 'fp32' alone")


def choose_weights(runtime: str, asked: str | None, weights: ModelWeights) -> WeightFormat:
    """asked: None leaves the choice. Runtime "llvm" then keeps what the checkpoint holds, the embedding and the head in
    formats of their own; others, which would cast it, take float32."""
    if not RUNTIMES[runtime].keeps_formats:
        return WeightFormat(asked or FLOAT32)
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
    chosen = WeightFormat(layers, is_read_in_place=True, embedding=embedding, head=head)
    return replace(chosen, rounded=_rounded(chosen, matrices))


def format_of(name: str, weight_format: WeightFormat) -> str:
    """Of a matrix by its graph name; float32 of routers, for near experts are a step apart."""
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
    from plugins.host_attention import has_halves  # not above: it loads numba, which other runtimes do without

    is_half = all(spec.checkpoint_dtype in HALF_CHECKPOINTS for spec in specs.values())
    return "fp16" if is_half and has_halves() else "fp32"


def graph_builder(
    weight_format: str, store: WeightStore, dtype: str, weights: Mapping[str, np.ndarray]
) -> GraphBuilder:
    """A builder whose matrices have this format. dtype: of hidden states, and of matrices in format "fp32"."""
    if weight_format == FLOAT32:
        return GraphBuilder(store, dtype, weights)
    assert dtype == "float32", "formats are for graphs that compute in float32"
    if weight_format == INT8:
        return Int8GraphBuilder(store, weights)
    return HalfGraphBuilder(store, weights, FLOAT_TYPES[weight_format])


class HalfGraphBuilder(GraphBuilder):
    """Matrices of 16 bits a number, cast to float32 before they are used."""

    def __init__(self, store: WeightStore, weights: Mapping[str, np.ndarray], stored_dtype: str) -> None:
        """stored_dtype: "float16" or "bfloat16"."""
        super().__init__(store, "float32", weights)
        self._stored_dtype = stored_dtype

    def matrix(self, name: str) -> str:
        return self.op("Cast", self.stored(name, self._stored_dtype), to=self.FLOAT)

    def rows(self, name: str, indices: str) -> str:
        """Casts the rows that are taken: an embedding needs no float32 copy for them."""
        return self.op("Cast", self.op("Gather", self.stored(name, self._stored_dtype), indices), to=self.FLOAT)


class Int8GraphBuilder(GraphBuilder):
    """A matrix is NAME.int8 [num_outputs, num_blocks, INT8_BLOCK] and NAME.scales [num_outputs, num_blocks].

    A weight is (int8 - INT8_ZERO) * scale; the last block of an output's inputs is filled up.
    """

    def __init__(self, store: WeightStore, weights: Mapping[str, np.ndarray]) -> None:
        super().__init__(store, "float32", weights)
        self._int8_store, self._matrices = store, weights

    def product(self, x: str, name: str) -> str:
        return self._int8_product(x, name, is_transposed=True)

    def row_products(self, x: str, name: str, out: str | None = None) -> str:
        return self._int8_product(x, name, is_transposed=False, out=out)

    def rows(self, name: str, indices: str) -> str:
        numbers, scales, (_, num_inputs) = self._quantized(name, is_transposed=False)
        rows = self.op("Cast", self.op("Gather", numbers, indices), to=self.FLOAT)  # [..., num_blocks, INT8_BLOCK]
        rows = self.op("Sub", rows, self.scalar(float(INT8_ZERO)))
        rows = self.op("Mul", rows, self.op("Unsqueeze", self.op("Gather", scales, indices), self.ints(-1)))
        width = -(-num_inputs // INT8_BLOCK) * INT8_BLOCK  # said, not left open: there may be no rows
        rows = self.op("Reshape", rows, self.op("Concat", self.op("Shape", indices), self.ints(width), axis=0))
        return self.op("Slice", rows, self.ints(0), self.ints(num_inputs), self.ints(-1))

    def _int8_product(self, x: str, name: str, *, is_transposed: bool, out: str | None = None) -> str:
        numbers, scales, (num_outputs, num_inputs) = self._quantized(name, is_transposed=is_transposed)
        sizes = {"N": num_outputs, "K": num_inputs, "bits": 8, "block_size": INT8_BLOCK}
        inputs = (x, numbers, scales)
        return self.op("MatMulNBits", *inputs, domain=CONTRIB_DOMAIN, out=out, accuracy_level=INT8_PRODUCTS, **sizes)

    def _quantized(self, name: str, *, is_transposed: bool) -> tuple[str, str, tuple[int, int]]:
        """Names of the two tensors, and (num_outputs, num_inputs). is_transposed: the weight is the other way."""
        numbers, scales = f"{name}.int8", f"{name}.scales"
        weight = self._matrices[name].T if is_transposed else self._matrices[name]
        num_outputs, num_inputs = weight.shape
        if numbers not in self._int8_store:
            all_scales = np.empty((num_outputs, -(-num_inputs // INT8_BLOCK)), np.float32)
            blocks = int8_blocks(name, weight, all_scales)
            self._int8_store.add_blocks(numbers, (*all_scales.shape, INT8_BLOCK), blocks, "uint8")
            self._int8_store.add(scales, all_scales)
        return self.stored(numbers, "uint8"), self.stored(scales, "float32"), (num_outputs, num_inputs)


def int8_blocks(name: str, rows: np.ndarray, scales: np.ndarray) -> Iterator[np.ndarray]:
    """rows [num_outputs, num_inputs] -> parts of [num_outputs, num_blocks, INT8_BLOCK] in order, uint8.

    scales: [num_outputs, num_blocks], filled as the parts are taken.
    """
    first = 0
    for block in converted_blocks(name, rows, np.dtype(np.float32)):
        num_outputs, num_inputs = block.shape
        numbers = np.zeros((num_outputs, scales.shape[1], INT8_BLOCK), np.uint8)
        zero_points = np.zeros(numbers.shape[:2], np.uint8)  # none are written for a symmetric format
        part = scales[first : first + num_outputs]
        columns = np.ascontiguousarray(block.T)
        _quantize(numbers, columns, part, zero_points, INT8_BLOCK, num_outputs, num_inputs, True)
        yield numbers
        first += num_outputs
