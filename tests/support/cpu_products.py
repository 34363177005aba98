"""References for the CPU's products: stored matrices read back, and the error that products may have."""

import numpy as np

from faser_backend.cpu.kernels.layouts import LANES, LAYOUTS, num_blocks
from faser_backend.cpu.kernels.matrix_units import has_matrix_units

UNIT_ERROR = 1e-3  # of logits near 1 from a CPU's matrix units; weights that are off by a step give more


def restore_matrix(stored: np.ndarray, num_inputs: int, num_outputs: int, weight_format: str) -> np.ndarray:
    """Returns uint8 [stored_bytes] as [num_inputs, num_outputs] float32.

    Exact except for int4, where number * scale + minimum is rounded here and not in a product.
    """
    layout = LAYOUTS[weight_format]
    units = stored.reshape(num_blocks(num_outputs), -1, layout.unit_bytes)  # [block, unit, bytes]
    number_bytes = layout.unit_rows * layout.row_bytes
    numbers = np.ascontiguousarray(units[:, :, :number_bytes]).view(layout.dtype)
    if weight_format == "int4":
        numbers = np.stack([numbers & 15, numbers >> 4], axis=3)
    elif layout.is_paired:
        numbers = numbers.reshape(*numbers.shape[:2], -1, 2)
    if layout.is_paired:  # [..., pairs of rows * LANES, 2]
        numbers = numbers.reshape(*numbers.shape[:2], -1, LANES, 2).swapaxes(3, 4)
    rows = numbers.reshape(*numbers.shape[:2], layout.unit_rows, LANES).astype(np.float32)
    if layout.num_scales:
        halves = np.ascontiguousarray(units[:, :, number_bytes:]).view(np.float16).astype(np.float32)
        scales, *minimums = np.split(halves[:, :, None], layout.num_scales, axis=3)
        rows = rows * scales + (minimums[0] if minimums else 0)
    weight = rows.reshape(len(rows), -1, LANES).transpose(1, 0, 2).reshape(-1, len(rows) * LANES)
    return weight[:num_inputs, :num_outputs]


def assert_computed_alike(found: np.ndarray, wanted: np.ndarray, error: float = 0.0) -> None:
    """Asserts equal results. error: of vector kernels; 0 by default, as they widen weights and compute in float32."""
    error = UNIT_ERROR if has_matrix_units() else error
    np.testing.assert_allclose(found, wanted, rtol=0, atol=error)
