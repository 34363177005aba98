"""Matrices read back from the layout of the CPU's products: the reference of what their kernels multiply with."""

from __future__ import annotations

import numpy as np

from faser_backend.cpu.kernels.layouts import LANES, LAYOUTS, num_blocks


def restore_matrix(stored: np.ndarray, num_inputs: int, num_outputs: int, weight_format: str) -> np.ndarray:
    """uint8 [stored_bytes] -> [num_inputs, num_outputs] float32.

    They are exact but for int4, where number * scale + minimum is rounded here and not in a product.
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
