"""LoRA adapters as arrays, and the model runner that computes with them. Files and names are known elsewhere."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np

from faser_backend.core.errors import RequestError
from faser_backend.core.model import ModelSpec

ADAPTED = ("q", "k", "v", "attention_out", "gate", "up", "down")  # matrices of a layer, in the order of kernels

# The matrices of an adapter by layer and name: rows x @ matrix become x @ matrix + (x @ a) @ b. float16, a [in, rank],
# b [rank, out]; the scale is part of b.
AdapterMatrices = dict[tuple[int, str], tuple[np.ndarray, np.ndarray]]


@runtime_checkable
class AdaptableRunner(Protocol):
    """A model runner that computes rows with adapters."""

    spec: ModelSpec

    def store_adapter(self, matrices: AdapterMatrices) -> Any:
        """Returns the adapter for RowBatch.adapters, which compares it by identity; it has `num_bytes`."""
        ...


# By TensorRT-LLM's id: attn_qkv, attn_q, attn_k, attn_v, attn_dense, mlp_h_to_4h (activated), mlp_4h_to_h, mlp_gate.
MODULES = (("q", "k", "v"), ("q",), ("k",), ("v",), ("attention_out",), ("gate",), ("down",), ("up",))


def read_tensors(weights: np.ndarray, config: np.ndarray, spec: ModelSpec, max_rank: int) -> AdapterMatrices:
    """Reads an adapter that a request holds as TensorRT-LLM's `lora_weights` and `lora_config`.

    weights: [modules, width] float16, of each module A [rank, inputs], then B [outputs, rank] with the scale in it;
    the rest of a row is padding. config: [modules, 3] with id, layer and rank of each. A batch of one may lead.
    Raises RequestError for the first module that does not fit the model.
    """
    rows, modules = weights.reshape(-1, weights.shape[-1]), config.reshape(-1, config.shape[-1])
    if modules.shape != (len(rows), 3):
        raise RequestError("lora_config", list(config.shape), f"must be [{len(rows)}, 3], a row for each module")
    shapes, largest = module_shapes(spec), min(int(modules[:, 2].max()), max_rank)
    found: AdapterMatrices = {}
    for row, (module, layer, rank) in zip(rows, modules.tolist(), strict=True):
        if not (0 <= module < len(MODULES) and 0 <= layer < spec.num_layers and 1 <= rank <= max_rank):
            limit = f"must be module 0 to {len(MODULES) - 1}, layer 0 to {spec.num_layers - 1}, rank 1 to {max_rank}"
            raise RequestError("lora_config", [module, layer, rank], limit)
        names = MODULES[module]
        if any((layer, name) in found or name not in shapes for name in names):
            raise RequestError("lora_config", [module, layer, rank], "this module is given twice, or cannot be adapted")
        num_inputs, sizes = shapes[names[0]][0], [shapes[name][1] for name in names]
        middle, end = rank * num_inputs, rank * (num_inputs + sum(sizes))
        if row.size < end or not np.isfinite(row[:end]).all():
            limit = f"module {module} of layer {layer} needs {end} finite numbers in its row"
            raise RequestError("lora_weights", list(weights.shape), limit)
        # Runners take one rank: more columns and rows of zeros change no sum.
        a = np.pad(row[:middle].reshape(rank, num_inputs).T, ((0, 0), (0, largest - rank)))
        b = np.pad(row[middle:end].reshape(-1, rank).T, ((0, largest - rank), (0, 0)))
        parts = np.split(b, np.cumsum(sizes)[:-1], axis=1)
        found |= {(layer, name): (a, part) for name, part in zip(names, parts, strict=True)}
    return found


def module_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Returns inputs and outputs of the matrices of a layer that can be adapted, not those of experts."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    num_q, num_kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes = {"q": (hidden, num_q), "k": (hidden, num_kv), "v": (hidden, num_kv), "attention_out": (num_q, hidden)}
    mlp = {} if spec.num_experts else {"gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden)}
    return shapes | mlp
