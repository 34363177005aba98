"""Small arrays to the device and results back, in order with the current stream and with no other.

Pinned memory comes from torch's own cache, which gives a buffer out again only when the copies that were queued
from it have run: so buffers need no owner here, and threads with streams of their own do not get in each
other's way. On a torch CPU device the same functions simply copy.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy of the array; queued where the device is a GPU, not waited for."""
    if device.type != "cuda":
        return torch.from_numpy(array.copy())
    return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)


def copy_to_device(array: np.ndarray, target: torch.Tensor) -> None:
    """As to_device, into a tensor of the array's shape that is there already."""
    host = torch.from_numpy(array)
    target.copy_(host.pin_memory() if target.is_cuda else host, non_blocking=True)


def upload(block: torch.Tensor, fill: Callable[[np.ndarray], None]) -> None:
    """Lets `fill` write block.numel() bytes of host memory, and queues their copy to block (uint8, 1-D)."""
    area = torch.empty(block.numel(), dtype=torch.uint8, pin_memory=block.is_cuda)
    fill(area.numpy())
    block.copy_(area, non_blocking=True)


def to_host(*tensors: torch.Tensor) -> list[np.ndarray]:
    """Copies of tensors of one device, after one wait: for what the current stream has queued so far."""
    is_cuda = tensors[0].is_cuda
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_cuda) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    if is_cuda:
        done = torch.cuda.Event()
        done.record()
        done.synchronize()  # without the interpreter lock, so that the other lane goes on
        # Pinned memory records events on the streams that used it when it is freed: no result may keep it, or it could
        # outlive the stream of a share.
        return [copy.numpy().copy() for copy in copies]
    return [copy.numpy() for copy in copies]
