"""Reads LoRA adapters as PEFT writes them: adapter_config.json and adapter_model.safetensors.

An adapter is checked against the model that it is for. Variants that change more than the product of a linear module
(DoRA, biases, embeddings, experts, whole modules) are refused by the field or tensor that asks for them.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from faser_backend.core.adapter import AdapterMatrices
from faser_backend.core.model import ModelSpec
from faser_backend.engines.checkpoint import CheckpointError, ConfigFields, read_json
from faser_backend.engines.safetensors_checkpoint import SafetensorsFile
from faser_backend.engines.weights import weight_sources

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MAX_ALPHA = 1e6
MAX_NUMBER = float(np.finfo(np.float16).max)
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")
_ONLY: dict[str, tuple[Any, ...]] = {  # values of fields that leave an adapter a plain one; null always does
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),  # others train a changed base
    **dict.fromkeys(("use_dora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out"), (False,)),
    **dict.fromkeys(("modules_to_save", "target_parameters", "trainable_token_indices", "layer_replication"), ([],)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern", "exclude_modules", "alora_invocation_tokens"), ({}, [])),
}


def read_adapter(directory: Path, spec: ModelSpec, max_rank: int) -> AdapterMatrices:
    """Reads an adapter for a model. Raises CheckpointError for the first field or tensor that does not fit."""
    fields = ConfigFields(read_json(directory / CONFIG_FILE), directory / CONFIG_FILE)
    for name, values in _ONLY.items():
        fields.must_be(name, *values)
    rank = fields.count("r", max_rank)
    alpha = fields.number("lora_alpha", -MAX_ALPHA, MAX_ALPHA)
    scale = alpha / (math.sqrt(rank) if fields.flag("use_rslora", False) else rank)
    file, modules = SafetensorsFile(directory / WEIGHTS_FILE), _modules(spec)
    parts: dict[tuple[int, str], dict[str, np.ndarray]] = {}
    for name in file.names:
        match = _TENSOR.fullmatch(name)
        if match is None or match[1] not in modules:
            raise CheckpointError(f"{file.path}: tensor {name}: must be A or B of a linear module of the layers")
        key, (num_outputs, num_inputs) = modules[match[1]]
        wanted = (rank, num_inputs) if match[2] == "A" else (num_outputs, rank)
        if file.shape(name) != wanted:
            raise CheckpointError(f"{file.path}: {name} has shape {list(file.shape(name))}: must be {list(wanted)}")
        part = file.read(name).astype(np.float32).T * (scale if match[2] == "B" else 1)
        if not (np.abs(part) <= MAX_NUMBER).all():
            raise CheckpointError(f"{file.path}: {name}: its scaled numbers must be finite, and at most {MAX_NUMBER:g}")
        parts.setdefault(key, {})[match[2]] = part.astype(np.float16)
    halves = [f"A or B of {name} of layer {layer}" for (layer, name), pair in parts.items() if len(pair) < 2]
    if halves or not parts:
        raise CheckpointError(f"{file.path}: {halves[0] if halves else 'every A and B'} is missing")
    return {key: (pair["A"], pair["B"]) for key, pair in parts.items()}


def _modules(spec: ModelSpec) -> dict[str, tuple[tuple[int, str], tuple[int, ...]]]:
    """Returns the modules that can be adapted, by name: layer and matrix, and their shape [outputs, inputs]."""
    found = {}
    for key, source in weight_sources(spec).items():
        if match := re.fullmatch(r"layers\.(\d+)\.(qkv|attention_out|gate|up|down)", key):
            for matrix, (tensor, shape) in zip("qkv" if match[2] == "qkv" else [match[2]], source.parts, strict=True):
                found[tensor.removesuffix(".weight")] = (int(match[1]), matrix), shape
    return found
