"""Random LoRA adapters in PEFT's layout, and checkpoints with one merged into their weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from faser_backend.core.adapter import MODULES, AdapterMatrices

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERY_MODULE = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
WEIGHTS = "adapter_model.safetensors"


def write_adapter(
    source: Path,
    directory: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    modules: tuple[str, ...] = EVERY_MODULE,
    layers: tuple[int, ...] = (0, 1, 2),
    scale: float = 0.3,
    **fields: Any,
) -> Path:
    """Writes an adapter for the checkpoint `source`, in halves with the deviation `scale`."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, module in LlamaForCausalLM.from_pretrained(source).named_modules():
        if name.endswith(modules) and int(name.split(".")[2]) in layers:
            num_outputs, num_inputs = module.weight.shape
            for part, shape in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
                numbers = torch.randn(shape, generator=generator) * scale
                tensors[f"base_model.model.{name}.lora_{part}.weight"] = numbers.half()
    directory.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8.0, "bias": "none", "target_modules": list(modules)}
    (directory / "adapter_config.json").write_text(json.dumps(config | fields))
    save_file(tensors, directory / WEIGHTS)
    return directory


def merged(source: Path, adapter: Path) -> LlamaForCausalLM:
    """Returns the checkpoint with the adapter in its weights."""
    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = {name: tensor.float() for name, tensor in load_file(adapter / WEIGHTS).items()}
    with torch.no_grad():
        for name in [name for name in tensors if ".lora_A." in name]:
            module = model.get_submodule(name.removeprefix("base_model.model.").partition(".lora_A")[0])
            product = tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
            module.weight += config["lora_alpha"] / config["r"] * product
    return model


def as_tensors(matrices: AdapterMatrices) -> dict[str, np.ndarray]:
    """Returns `lora_weights` and `lora_config` of an adapter, as TensorRT-LLM's converter writes them."""
    rows, config = [], []
    for (layer, name), (a, b) in matrices.items():
        rows.append(np.concatenate([a.T.reshape(-1), b.T.reshape(-1)]))
        config.append([MODULES.index((name,)), layer, b.shape[0]])
    width = max(map(len, rows)) + 3  # rows are padded
    weights = np.stack([np.pad(row, (0, width - len(row))) for row in rows])
    return {"lora_weights": weights, "lora_config": np.array(config, np.int32)}
