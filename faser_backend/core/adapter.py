"""LoRA adapters as arrays, and the model runner that computes with them. Files and names are known elsewhere."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np

ADAPTED = ("q", "k", "v", "attention_out", "gate", "up", "down")  # matrices of a layer, in the order of kernels

# The matrices of an adapter by layer and name: rows x @ matrix become x @ matrix + (x @ a) @ b. float16, a [in, rank],
# b [rank, out]; the scale is part of b.
AdapterMatrices = dict[tuple[int, str], tuple[np.ndarray, np.ndarray]]


@runtime_checkable
class AdaptableRunner(Protocol):
    """A model runner that computes rows with adapters."""

    def store_adapter(self, matrices: AdapterMatrices) -> Any:
        """Returns the adapter for RowBatch.adapters, which compares it by identity."""
        ...
