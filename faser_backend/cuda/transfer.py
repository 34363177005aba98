"""Copies small arrays to the device and results back, ordered with the current stream only.

Pinned memory comes from torch's cache, which reuses a buffer only after the copies queued from it have run: buffers
need no owner, whatever the threads and streams. On a torch CPU device the functions just copy.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from faser_backend.core.ports import Behind, run_behind


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Returns a copy of the array on the device; on a GPU the copy is queued, not waited for."""
    if device.type != "cuda":
        return torch.from_numpy(array.copy())
    return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)


def upload(block: torch.Tensor, fill: Callable[[np.ndarray], None]) -> None:
    """Lets `fill` write block.numel() bytes of host memory, and queues their copy to block (uint8, 1-D)."""
    area = torch.empty(block.numel(), dtype=torch.uint8, pin_memory=block.is_cuda)
    fill(area.numpy())
    block.copy_(area, non_blocking=True)


def to_host(*tensors: torch.Tensor, behind: Behind | None = None) -> list[np.ndarray]:
    """Copies tensors of one device to the host, after one wait for all work of the current stream.

    behind: what the host does first, while the device works.
    """
    is_cuda = tensors[0].is_cuda
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_cuda) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    if is_cuda:
        done = torch.cuda.Event()
        done.record()
        run_behind(behind)
        done.synchronize()  # without the interpreter lock, so that the other lane goes on
        # Freeing pinned memory records events on the streams that used it. So no result keeps it: it could outlive the
        # stream of a share.
        return [copy.numpy().copy() for copy in copies]
    run_behind(behind)
    return [copy.numpy() for copy in copies]
