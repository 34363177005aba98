"""`Workspace`: buffers that calls of a runner use again."""

from __future__ import annotations

import numpy as np


class Workspace:
    """Float buffers by name, as large as the largest call needed."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}

    def view(self, name: str, *shape: int) -> np.ndarray:
        """The first numbers of the buffer of this name, in this shape."""
        size = int(np.prod(shape))
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            capacity = size if buffer is None else max(size, 2 * buffer.size)
            buffer = self._buffers[name] = np.zeros(capacity, np.float32)
        return buffer[:size].reshape(shape)
