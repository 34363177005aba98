"""Untrained models with the shapes of real pairs and weights drawn on the device, and an untrained EAGLE-3 head.

Their text is meaningless; their speed is real. Weights are scaled by fan-in, and by depth if they write to the residual
stream, so that hidden states stay near 1 and nothing overflows in bf16.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from faser_backend.core.model import ModelSpec, rotary_tables
from faser_backend.cuda.pool import DTYPES
from faser_backend.cuda.runtime import current_device, open_on_device
from faser_backend.cuda.torch_programs import TorchPrograms
from faser_backend.cuda.torch_weights import LayerTensors, ModelTensors
from faser_backend.device.runtime import ModelPair
from faser_backend.engines.weights_build import weight_segments
from faser_backend.lab.gpu.harness import Context
from faser_backend.lab.shapes import Pair, stored_count
from faser_backend.lab.train_head.checkpoint import head_spec, new_head, save_head
from faser_backend.lab.train_head.target import Target
from faser_backend.manifest import FileSpec, ModelEngine

DTYPE = {"cuda": "bf16", "cpu": "fp32"}  # by device: a CPU's bf16 products are slow
KV_BLOCK_SIZE = 16
KNOWN_IDS = 0.75  # share of the vocabulary that the untrained head covers


def opened_pair(context: Context, shape: Pair, stack: ExitStack) -> tuple[Any, ModelPair]:
    """Opens a runtime, which the stack closes, and its models."""
    dtype = DTYPE[context.device]
    device = checked_device(context)
    models = model_pair(shape, dtype)

    def load(model: ModelEngine) -> Any:
        return random_tensors(model.spec, dtype, device, context.seed + (model.spec is shape.draft))

    runtime = open_on_device(TorchPrograms(load), models, KV_BLOCK_SIZE, dtype=dtype)
    stack.callback(runtime.close)
    return runtime, models


def checked_device(context: Context) -> torch.device:
    """Returns the device of the project's runtime. Raises RuntimeError if it is not the one asked for."""
    device = current_device()
    if device.type != context.device:
        raise RuntimeError(f"device = {context.device!r}: torch {torch.__version__} would compute on {device.type!r}")
    return device


def model_pair(shape: Pair, dtype: str) -> ModelPair:
    """Returns both models as a manifest describes them; their weight files do not exist."""
    cuts = (*shape.exit_layers, shape.target.num_layers)
    draft = _model_engine("draft", shape.draft, (shape.draft.num_layers,), dtype)
    return ModelPair(_model_engine("target", shape.target, cuts, dtype), draft)


def _model_engine(name: str, spec: ModelSpec, cuts: tuple[int, ...], dtype: str) -> ModelEngine:
    file = FileSpec(f"{name}.synthetic", "", stored_count(spec) * DTYPES[dtype].itemsize)
    return ModelEngine(spec, file, weight_segments(spec, file, cuts, dtype))


def random_tensors(spec: ModelSpec, dtype: str, device: torch.device, seed: int) -> ModelTensors:
    """Draws a model's weights in place, without further memory."""
    generator = torch.Generator(device).manual_seed(seed)
    depth_scale = (2.0 * spec.num_layers) ** -0.5

    def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.empty(rows, columns, dtype=DTYPES[dtype], device=device)
        return values.normal_(0.0, scale * columns**-0.5, generator=generator)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.float32, device=device)

    hidden, wide, heads = spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim
    kv = spec.num_kv_heads * spec.head_dim
    layers = tuple(
        LayerTensors(
            input_norm=ones(hidden),
            qkv=matrix(heads + 2 * kv, hidden),
            attention_out=matrix(hidden, heads, depth_scale),
            mlp_norm=ones(hidden),
            gate_up=matrix(2 * wide, hidden),
            down=matrix(hidden, wide, depth_scale),
            q_norm=ones(spec.head_dim) if spec.has_qk_norm else None,
            k_norm=ones(spec.head_dim) if spec.has_qk_norm else None,
        )
        for _ in range(spec.num_layers)
    )
    embedding = matrix(spec.vocab_size, hidden, hidden**0.5)
    head = embedding if spec.tie_word_embeddings else matrix(spec.vocab_size, hidden)
    cos, sin = (torch.from_numpy(table).to(device) for table in rotary_tables(spec))
    return ModelTensors(embedding, layers, ones(hidden), head, cos, sin)


def write_untrained_head(target_dir: Path, directory: Path, seed: int) -> Path:
    """Writes a head as it is before training, which is right now and then. Returns its checkpoint's directory."""
    target = Target(target_dir, torch.device("cpu"), is_exact=True)
    spec = head_spec(target.spec, target.spec.num_kv_heads, target.spec.intermediate_size)
    token_ids = np.arange(int(KNOWN_IDS * spec.vocab_size))
    head = new_head(target, spec, token_ids, seed)
    save_head(directory, target.spec, spec, head.state_dict(), torch.from_numpy(token_ids))
    return directory
