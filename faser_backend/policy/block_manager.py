"""Paged KV bookkeeping: which block of the pools holds which tokens of which sequence.

One block table serves both models: block b indexes the target's pool and the draft's alike, so a
sequence's memory is allocated and freed in one move. Full blocks are published under a digest of
their whole prefix and shared by reference count.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import NamedTuple

import numpy as np


class PrefixMatch(NamedTuple):
    """Blocks that already hold a prefix. The draft's KV may cover less of it than the target's."""

    blocks: list[int]
    num_target_tokens: int
    num_draft_tokens: int
    digests: list[bytes]  # the root, which differs by adapter, and one of each block


class BlockManager:
    """Owner of all block ids and of `block_tables` [max_num_seqs, max_blocks] (unused entries 0).

    Every block is free, cached (published, nobody uses it, evicted in LRU order) or in use.
    """

    def __init__(
        self, num_blocks: int, block_size: int, max_num_seqs: int, max_context: int, *, can_reuse: bool = True
    ) -> None:
        max_blocks = -(-max_context // block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.can_reuse = can_reuse
        self.block_tables = np.zeros((max_num_seqs, max_blocks), np.int64)
        self._blocks: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self._digests: list[list[bytes]] = [[] for _ in range(max_num_seqs)]  # of a slot: root, then published blocks
        self._num_drafted = [0] * max_num_seqs  # a slot's blocks that hold the draft's KV too
        self._ref_counts = [0] * num_blocks
        self._is_free = bytearray(b"\1" * num_blocks)
        self._num_free = num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._published: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._has_draft = [False] * num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that an allocation can take: free ones and cached ones."""
        return self._num_free + len(self._cached)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_blocks_of(self, slot: int) -> int:
        return len(self._blocks[slot])

    def match(self, token_ids: np.ndarray, num_tokens: int, digests: list[bytes] | None = None) -> PrefixMatch:
        """Returns the longest published prefix within token_ids[: num_tokens - 1]; the anchor is always run.

        digests: the prefix's root, and what earlier matches of these tokens have appended to it.
        """
        blocks: list[int] = []
        num_draft_blocks, digests = 0, [b""] if digests is None else digests
        for index in range((num_tokens - 1) // self.block_size if self.can_reuse else 0):
            if len(digests) == index + 1:
                digests.append(self._digest(digests[index], token_ids, index))
            block = self._published.get(digests[index + 1])
            if block is None:
                break
            if self._has_draft[block] and num_draft_blocks == index:
                num_draft_blocks += 1
            blocks.append(block)
        size = self.block_size
        return PrefixMatch(blocks, len(blocks) * size, num_draft_blocks * size, digests[: len(blocks) + 1])

    def num_needed_blocks(self, match: PrefixMatch, num_tokens: int) -> int:
        """Returns the blocks that an admission with this match takes out of `num_free_blocks`."""
        num_revived = sum(self._ref_counts[block] == 0 for block in match.blocks)
        return self.num_blocks_for(num_tokens) - len(match.blocks) + num_revived

    def admit(self, slot: int, match: PrefixMatch, num_tokens: int) -> None:
        """Gives an empty slot the matched blocks and new ones up to num_tokens, which must be free."""
        assert not self._blocks[slot], f"slot {slot} still holds blocks"
        for block in match.blocks:
            self._cached.pop(block, None)
            self._ref_counts[block] += 1
        self._blocks[slot], self._digests[slot] = list(match.blocks), match.digests
        self._num_drafted[slot] = match.num_draft_tokens // self.block_size
        self.block_tables[slot, : len(match.blocks)] = match.blocks
        was_enough = self.grow(slot, num_tokens)
        assert was_enough, "admission must be checked against num_needed_blocks"

    def grow(self, slot: int, num_tokens: int) -> bool:
        """Allocates blocks up to num_tokens tokens. Returns False, allocating nothing, if blocks are short."""
        blocks = self._blocks[slot]
        num_new = -(-num_tokens // self.block_size) - len(blocks)
        if num_new <= 0:
            return True
        if num_new > self.num_free_blocks:
            return False
        table = self.block_tables[slot]
        for _ in range(num_new):
            block = self._take(blocks[-1] + 1 if blocks else self.num_blocks)
            table[len(blocks)] = block
            blocks.append(block)
        return True

    def truncate(self, slot: int, num_tokens: int) -> None:
        """Frees the blocks past num_tokens. Blocks of committed tokens and published blocks stay."""
        blocks = self._blocks[slot]
        keep = -(-num_tokens // self.block_size)
        while len(blocks) > keep:
            self._release(blocks.pop())
            self.block_tables[slot, len(blocks)] = 0

    def free(self, slot: int) -> None:
        """Frees all blocks of a slot, the end of the prefix first, so that it is evicted first."""
        self.truncate(slot, 0)
        self._digests[slot].clear()

    def publish(self, slot: int, token_ids: np.ndarray, target_len: int, draft_len: int) -> None:
        """Offers the slot's full blocks for reuse; called after tokens were committed. The draft's KV of a block is
        offered when the draft has read it, by whichever sequence: a request that reuses it need not read it again."""
        if not self.can_reuse:
            return
        digests, blocks, num_drafted = self._digests[slot], self._blocks[slot], draft_len // self.block_size
        for index in range(len(digests) - 1, target_len // self.block_size):
            digest = self._digest(digests[-1], token_ids, index)
            digests.append(digest)
            block = blocks[index]
            if digest not in self._published:
                self._published[digest] = block
                self._digest_of[block] = digest
                self._has_draft[block] = index < num_drafted
        for block in blocks[self._num_drafted[slot] : num_drafted]:
            self._has_draft[block] = True
        self._num_drafted[slot] = num_drafted

    def _digest(self, parent: bytes, token_ids: np.ndarray, index: int) -> bytes:
        # 128 bits over the whole prefix: two prefixes share a digest only if they are equal.
        tokens = token_ids[index * self.block_size : (index + 1) * self.block_size]
        return hashlib.blake2b(parent + tokens.tobytes(), digest_size=16).digest()

    def _take(self, wanted: int) -> int:
        """Allocates a block, the wanted one if free: attention reads neighbours twice as fast as scattered blocks."""
        if self._num_free == 0:
            block, _ = self._cached.popitem(last=False)
            del self._published[self._digest_of.pop(block)]
        else:
            block = wanted if wanted < self.num_blocks and self._is_free[wanted] else self._roomiest_block()
            self._is_free[block] = False
            self._num_free -= 1
        self._ref_counts[block] = 1
        return block

    def _roomiest_block(self) -> int:
        """Returns the middle of the longest run of free blocks, so that both neighbours can grow."""
        edges = np.flatnonzero(np.diff(np.frombuffer(self._is_free, np.int8), prepend=0, append=0))
        starts, stops = edges[::2], edges[1::2]
        longest = int((stops - starts).argmax())
        return int(starts[longest] + stops[longest]) // 2

    def _release(self, block: int) -> None:
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            if block in self._digest_of:
                self._cached[block] = None
            else:
                self._is_free[block] = True
                self._num_free += 1

    def check_integrity(self) -> None:
        """Asserts that free + cached + used = total and that every count is explained."""
        counts = [0] * self.num_blocks
        for slot, blocks in enumerate(self._blocks):
            assert list(self.block_tables[slot, : len(blocks)]) == blocks
            assert not self.block_tables[slot, len(blocks) :].any()
            assert len(set(blocks)) == len(blocks), "a sequence holds a block twice"
            for block in blocks:
                counts[block] += 1
        assert counts == self._ref_counts
        free, cached = set(np.flatnonzero(np.frombuffer(self._is_free, np.int8)).tolist()), set(self._cached)
        used = {block for block, count in enumerate(counts) if count}
        assert len(free) == self._num_free
        assert not (free & cached or free & used or cached & used)
        assert len(free) + len(cached) + len(used) == self.num_blocks
        assert self._published == {digest: block for block, digest in self._digest_of.items()}
        assert cached <= set(self._digest_of)
        assert not free & set(self._digest_of)
