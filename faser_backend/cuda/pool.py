"""`CudaKvPool`: the paged key/value storage of one model on a GPU: one tensor, in blocks, head-major.

It is the counterpart of cpu.kv_pool, in the engine's dtype.
"""

from __future__ import annotations

import torch

from faser_backend.core.errors import ConfigError
from faser_backend.cuda.call_shapes import MAX_GRAPH_ROWS
from faser_backend.cuda.memory_plan import block_bytes
from faser_backend.manifest import ModelSpec

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}  # by the manifest's names


def pool_slots(slot_mapping: torch.Tensor, pool: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Returns rows' indices into a pool whose dimensions `first` and the next are blocks and positions, int64.

    Rows without a position, which have -1, get the last one: it belongs to no sequence.
    """
    return slot_mapping.remainder(pool.shape[first] * pool.shape[first + 1]).long()


def write_kv(
    k_new: torch.Tensor, v_new: torch.Tensor, slot_mapping: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor
) -> None:
    """Writes k_new and v_new [T, Hkv, hd] to the pools, for engines whose attention does not. See pool_slots."""
    slots = pool_slots(slot_mapping, k_pool, 1)
    for rows, pool in ((k_new, k_pool), (v_new, v_pool)):
        pool.flatten(1, 2).index_copy_(1, slots, rows.transpose(0, 1))


class CudaKvPool:
    """Keys, values and features of one model; all start as zeros.

    storage: [num_layers, 2, num_kv_heads, num_blocks + 1, kv_block_size, head_dim]. features: every token's input of
    the layers that a draft head reads, [num_blocks + 1, kv_block_size, num_features, hidden_size]. The last block
    belongs to no sequence: programs that must write every row write padding rows there.
    """

    def __init__(
        self, spec: ModelSpec, num_blocks: int, kv_block_size: int, *, dtype: str, device: torch.device
    ) -> None:
        """dtype: the manifest's. Raises ConfigError if the pool does not fit on the device."""
        self.num_blocks = num_blocks
        # Runners that share a pool share these.
        self.logits: torch.Tensor | None = None
        self.captures_adapters = False  # calls with adapters are captured too
        self.kv_block_size = kv_block_size
        shape = (spec.num_layers, 2, spec.num_kv_heads, num_blocks + 1, kv_block_size, spec.head_dim)
        try:
            self.storage = torch.zeros(shape, dtype=DTYPES[dtype], device=device)
            self.keep_features(spec)
        except RuntimeError:  # includes torch.OutOfMemoryError; the CPU's allocator has no error class of its own
            num_bytes = (num_blocks + 1) * block_bytes(spec, kv_block_size, DTYPES[dtype].itemsize)
            raise ConfigError(f"num_kv_blocks = {num_blocks}: {num_bytes} bytes do not fit on {device}") from None

    def keep_features(self, spec: ModelSpec) -> None:
        """Allocates features of `spec`: of the pool's own model, or of a target if a head is timed alone."""
        shape = (self.num_blocks + 1, self.kv_block_size, len(spec.feature_layers), spec.hidden_size)
        self.features = torch.zeros(shape, dtype=self.storage.dtype, device=self.storage.device)

    def keys(self, layer: int) -> torch.Tensor:
        """Returns a view of a layer's keys, [num_kv_heads, num_blocks + 1, kv_block_size, head_dim]."""
        return self.storage[layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        """Returns a view of a layer's values, in the shape of its keys."""
        return self.storage[layer, 1]

    def logits_of(self, num_rows: int, vocab_size: int) -> torch.Tensor:
        """Returns memory for the logits of a call, [num_rows, vocab_size] float32.

        Calls of up to MAX_GRAPH_ROWS rows share it: they are serial, and their logits are read before the next.
        """
        if num_rows > MAX_GRAPH_ROWS:
            return torch.zeros((num_rows, vocab_size), device=self.storage.device)
        if self.logits is None:
            self.logits = torch.zeros((MAX_GRAPH_ROWS, vocab_size), device=self.storage.device)
        return self.logits[:num_rows]

    def check_integrity(self) -> None:
        """Asserts that every value is finite, layer by layer. Waits for the device."""
        for layer in range(self.storage.shape[0]):
            assert self.storage[layer, :, :, :-1].isfinite().all(), (
                f"the pool holds a key or value of layer {layer} that is not finite"
            )
