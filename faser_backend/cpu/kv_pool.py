"""`KvPool`: the paged key/value storage of one model in host memory: one array, in blocks, head-major.

The block manager decides which sequence owns a block.
"""

from __future__ import annotations

import math

import numpy as np

from faser_backend.core.errors import ConfigError
from faser_backend.manifest import ModelSpec

DTYPES = {"fp32": np.float32, "fp16": np.float16}  # by the manifest's names


def aligned_zeros(shape: tuple[int, ...], dtype: type[np.generic], line: int = 64) -> np.ndarray:
    """Returns zeros that begin at a cache line; large arrays of numpy begin 16 bytes behind one."""
    memory = np.zeros(math.prod(shape) * np.dtype(dtype).itemsize + line, np.uint8)
    return memory[-memory.ctypes.data % line :][: memory.size - line].view(dtype).reshape(shape)


class KvPool:
    """Keys, values and features of one model; all start as zeros.

    storage: [num_layers, 2, num_kv_heads, num_blocks, kv_block_size, head_dim]. features: every token's input of the
    layers that a draft head reads, by layer, [num_blocks, kv_block_size, hidden_size] float32.
    """

    def __init__(self, spec: ModelSpec, num_blocks: int, kv_block_size: int, *, dtype: str = "fp32") -> None:
        """dtype: one of DTYPES. Raises ConfigError if the pool does not fit into memory."""
        self.num_blocks, self.kv_block_size = num_blocks, kv_block_size
        shape = (spec.num_layers, 2, spec.num_kv_heads, num_blocks, kv_block_size, spec.head_dim)
        try:
            self.storage = aligned_zeros(shape, DTYPES[dtype])
            self.keep_features(spec)
        except MemoryError:
            num_bytes = num_blocks * self.bytes_per_block(spec, kv_block_size, dtype)
            raise ConfigError(f"num_kv_blocks = {num_blocks}: {num_bytes} bytes do not fit into memory") from None

    def keep_features(self, spec: ModelSpec) -> None:
        """Allocates features of `spec`: of the pool's own model, or of a target if a head is timed alone."""
        shape = (self.num_blocks, self.kv_block_size, spec.hidden_size)
        self.features = {layer: np.zeros(shape, np.float32) for layer in spec.feature_layers}

    def keys(self, layer: int) -> np.ndarray:
        """Returns a view of a layer's keys, [num_kv_heads, num_blocks, kv_block_size, head_dim]."""
        return self.storage[layer, 0]

    def values(self, layer: int) -> np.ndarray:
        """Returns a view of a layer's values, in the shape of its keys."""
        return self.storage[layer, 1]

    @staticmethod
    def bytes_per_block(spec: ModelSpec, kv_block_size: int, dtype: str = "fp32") -> int:
        """Returns the bytes of one block: keys, values and features of all layers."""
        kv_bytes = spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * np.dtype(DTYPES[dtype]).itemsize
        return (kv_bytes + len(spec.feature_layers) * spec.hidden_size * 4) * kv_block_size

    def check_integrity(self) -> None:
        """Asserts that layers are contiguous views of the storage and that every value is finite."""
        for layer in range(self.storage.shape[0]):
            for view in (self.keys(layer), self.values(layer)):
                assert view.flags.c_contiguous and np.shares_memory(view, self.storage)
        assert np.isfinite(self.storage).all(), "a key or value in the pool is not finite"
