"""How near products of stored weights come to those of the same weights in float32."""

from __future__ import annotations

import numpy as np

from faser_backend.cpu.kernels.matrix_units import has_matrix_units

UNIT_ERROR = 1e-3  # of logits near 1, where a CPU's matrix units compute; weights that are off by a step give more


def assert_computed_alike(found: np.ndarray, wanted: np.ndarray, error: float = 0.0) -> None:
    """error: that vectors may make; by default none, for they widen weights and compute in float32."""
    error = UNIT_ERROR if has_matrix_units() else error
    np.testing.assert_allclose(found, wanted, rtol=0, atol=error)
