"""Quantised checkpoints of small random models, packed as their formats were published, and the weights they encode."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.support.gguf_models import with_weights
from tests.support.tiny_models import write_model

Tensors = dict[str, torch.Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output in each nibble, the lowest first


@dataclass(frozen=True)
class Case:
    """A scheme, and what runtime llvm makes of it."""

    config: dict[str, Any]
    layout: str  # "awq", "gptq", "packed" or "plain"
    bits: int = 4
    block: tuple[int, int] = (1, 0)  # outputs and inputs that share a scale; 0: all
    has_zeros: bool = False
    scale_dtype: torch.dtype = torch.float16
    stored: str = "int4"  # format of the layers
    rounded: str = ""  # what the manifest says
    exactness: float = 0.0  # largest error of a stored weight, relative to the largest weight
    more: dict[str, Any] = field(default_factory=dict)


def packed(numbers: np.ndarray, bits: int, order: Sequence[int] = ()) -> torch.Tensor:
    """Packs numbers [n, m] along the last axis: int32 [n, m * bits / 32]."""
    per_word = 32 // bits
    words = numbers.astype(np.uint32).reshape(len(numbers), -1, per_word)
    shifted = [words[..., index] << np.uint32(bits * at) for at, index in enumerate(order or range(per_word))]
    return torch.from_numpy(np.bitwise_or.reduce(shifted).view(np.int32))


def encode(case: Case, shape: tuple[int, int], rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    """Returns random tensors of a module, by the ends of their names, and the weight [out, in] that they encode."""
    bits, middle = case.bits, 1 << (case.bits - 1)
    steps = [step or size for step, size in zip(case.block, shape, strict=True)]
    rows, columns = (np.arange(size) // step for size, step in zip(shape, steps, strict=True))
    groups = (rows[-1] + 1, columns[-1] + 1)
    factors = case.more.get("factor", 1.0) * rng.uniform(0.02, 0.06, groups) / (16 if bits == 8 else 1)
    scales = torch.from_numpy(2.0 ** np.rint(np.log2(factors)) if "powers" in case.more else factors)
    scales = scales.to(case.scale_dtype)
    zeros = rng.integers(0, 1 << bits, groups) if case.has_zeros else np.full(groups, middle)
    if case.config.get("desc_act"):
        columns = rng.permutation(columns)
    own = np.ix_(rows, columns)
    if "fp8" in case.more:
        numbers = torch.from_numpy(rng.normal(0, 30, shape)).to(torch.float8_e4m3fn)
        weight = numbers.float().numpy() * scales.float().numpy()[own]
    else:
        values = rng.integers(0, 1 << bits, shape)
        weight = (values - zeros[own]).astype(np.float32) * scales.float().numpy()[own]
    match case.layout:
        case "awq":
            tensors = {".qweight": packed(values.T, 4, AWQ_ORDER), ".qzeros": packed(zeros.T, 4, AWQ_ORDER)}
            tensors[".scales"] = scales.T
        case "gptq":
            is_first = case.config.get("checkpoint_format") != "gptq_v2"
            ones = (0x11111111 if bits == 4 else 0x01010101) * is_first
            tensors = {".qweight": packed(values, bits).T, ".qzeros": packed(zeros.T, bits) - ones}
            tensors |= {".scales": scales.T, ".g_idx": torch.from_numpy(columns.astype(np.int32))}
        case "packed":
            tensors = {".weight_packed": packed(values, bits), ".weight_shape": torch.tensor(shape)}
            tensors[".weight_scale"] = scales
            if case.has_zeros:
                as_bytes = torch.from_numpy(zeros - 8).to(torch.int8)
                tensors[".weight_zero_point"] = as_bytes if "bytes" in case.more else packed(zeros.T, bits).T
        case _:
            numbers = numbers if "fp8" in case.more else torch.from_numpy((values - middle).astype(np.int8))
            name = ".weight_scale_inv" if "weight_block_size" in case.config else ".weight_scale"
            tensors = {".weight": numbers, name: scales.reshape(()) if "scalar" in case.more else scales}
    return tensors, weight


def write_quantised(
    model: PreTrainedModel,
    directory: Path,
    case: Case,
    *,
    ignored: tuple[str, ...] = ("lm_head",),
    edit: Callable[[Tensors], object] = lambda tensors: None,
) -> PreTrainedModel:
    """Writes the checkpoint with quantised projections, sets the model's weights to theirs, and returns the model.

    ignored: modules, by parts of their names, that stay as they are. edit: changes the tensors of the file.
    """
    rng = np.random.default_rng(7)
    write_model(model, directory)
    path, config = directory / "model.safetensors", directory / "config.json"
    tensors = load_file(path)
    weights = {name: tensor.numpy() for name, tensor in tensors.items()}
    for name in sorted(tensors):
        if name.endswith("_proj.weight") and not any(part in name for part in ignored):
            own, weights[name] = encode(case, tuple(tensors.pop(name).shape), rng)
            tensors |= {name.removesuffix(".weight") + end: part for end, part in own.items()}
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": case.config}))
    return with_weights(model, weights)


def compressed(kind: str, bits: int, strategy: str, **weights: Any) -> dict[str, Any]:
    """Returns the section of a config that llm-compressor writes."""
    own = {"num_bits": bits, "type": "float" if kind == FLOATS else "int", "strategy": strategy, **weights}
    activations = None if kind == PACKED else {"num_bits": 8, "type": own["type"], "dynamic": True}
    group = {"targets": ["Linear"], "weights": own, "input_activations": activations, "output_activations": None}
    section = {"quant_method": "compressed-tensors", "format": kind, "quantization_status": "compressed"}
    return section | {"kv_cache_scheme": None, "ignore": ["lm_head"], "config_groups": {"group_0": group}}


def gptq(bits: int, group_size: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, "lm_head": False, **more}


AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
FP8_BLOCKS = FP8 | {"weight_block_size": [128, 128]}
PACKED, INTEGERS, FLOATS = "pack-quantized", "int-quantized", "float-quantized"
BF16, F32 = {"scale_dtype": torch.bfloat16}, {"scale_dtype": torch.float32}
ZEROS = {"has_zeros": True, "rounded": "Q4_ZP", "exactness": 2.0**-11}
INT8, HALVES = {"stored": "int8"}, {"stored": "fp16", "exactness": 2.0**-11}
OF_FP8 = {**HALVES, "rounded": "FP8", "more": {"fp8": True}}
CASES = {
    "awq_32": Case(AWQ | {"group_size": 32}, "awq", 4, (1, 32), **ZEROS),
    "awq_128": Case(AWQ | {"group_size": 128, "backend": "autoawq"}, "awq", 4, (1, 128), **ZEROS),
    "awq_columns": Case(AWQ | {"group_size": -1, "version": "GEMM"}, "awq", 4, (1, 0), **ZEROS),
    "gptq_4": Case(gptq(4, 128, sym=True), "gptq", 4, (1, 128)),
    "gptq_4_zeros": Case(gptq(4, 32, sym=False), "gptq", 4, (1, 32), **ZEROS),
    "gptq_4_v2": Case(gptq(4, 64, checkpoint_format="gptq_v2"), "gptq", 4, (1, 64), **ZEROS),
    "gptq_8": Case(gptq(8, 128, checkpoint_format="gptq_v2"), "gptq", 8, (1, 128), **INT8),
    "gptq_8_zeros": Case(gptq(8, 64), "gptq", 8, (1, 64), **HALVES, has_zeros=True, rounded="GPTQ of 8 bits with zero"),
    "gptq_act_order": Case(gptq(4, 32, desc_act=True), "gptq", 4, (1, 32), **HALVES, rounded="in act-order"),
    "packed_4_groups": Case(compressed(PACKED, 4, "group", group_size=128), "packed", 4, (1, 128), **BF16),
    "packed_4_zeros": Case(
        compressed(PACKED, 4, "group", group_size=32, symmetric=False), "packed", 4, (1, 32), **ZEROS
    ),
    "packed_4_byte_zeros": Case(compressed(PACKED, 4, "channel"), "packed", **ZEROS, more={"bytes": True}),
    "packed_8": Case(compressed(PACKED, 8, "channel"), "packed", 8, **INT8),
    "tiny_scales": Case(
        compressed(PACKED, 4, "channel"), "packed", **BF16, **HALVES, rounded="no halves", more={"factor": 2**-16}
    ),
    "int8_channels": Case(compressed(INTEGERS, 8, "channel"), "plain", 8, **BF16, **INT8),
    "int8_tensor": Case(compressed(INTEGERS, 8, "tensor"), "plain", 8, (0, 0), **INT8),
    "fp8_tensor": Case(compressed(FLOATS, 8, "tensor"), "plain", 8, (0, 0), **BF16, **OF_FP8),
    "fp8_channels": Case(compressed(FLOATS, 8, "channel"), "plain", 8, **BF16, **OF_FP8),
    "fp8_blocks": Case(compressed(FLOATS, 8, "block", block_structure=[64, 32]), "plain", 8, (64, 32), **F32, **OF_FP8),
    "hugging_face_fp8": Case(FP8_BLOCKS, "plain", 8, (128, 128), **F32, **OF_FP8),
    "fp8_powers": Case(FP8_BLOCKS, "plain", 8, (128, 128), **F32, stored="bf16", more={"fp8": True, "powers": True}),
    "fp8_scalar": Case(FP8, "plain", 8, (0, 0), **F32, **OF_FP8 | {"more": {"fp8": True, "scalar": True}}),
}
