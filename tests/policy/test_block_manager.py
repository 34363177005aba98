"""Block bookkeeping under random operations, and reuse of shared prefixes."""

import numpy as np
import pytest

from faser_backend.policy.block_manager import BlockManager

SIZE = 4


def manager(num_blocks: int = 12, num_slots: int = 4, max_context: int = 40) -> BlockManager:
    return BlockManager(num_blocks, SIZE, num_slots, max_context)


def admit(blocks: BlockManager, slot: int, tokens: np.ndarray) -> int:
    match = blocks.match(tokens, tokens.size)
    blocks.admit(slot, match, tokens.size)
    return match.num_target_tokens


def test_published_prefix_is_shared_and_survives_its_owner():
    blocks = manager()
    tokens = np.arange(10)
    assert admit(blocks, 0, tokens) == 0
    blocks.publish(0, tokens, 9, 9)
    assert admit(blocks, 1, tokens) == 8
    assert blocks.block_tables[0, 0] == blocks.block_tables[1, 0]
    blocks.free(0)
    blocks.free(1)
    blocks.check_integrity()
    assert blocks.num_free_blocks == blocks.num_blocks
    assert admit(blocks, 2, tokens) == 8


def test_the_anchor_is_never_reused():
    blocks = manager()
    tokens = np.arange(8)
    admit(blocks, 0, tokens)
    blocks.publish(0, tokens, 8, 8)
    assert blocks.match(tokens, 8).num_target_tokens == 4


def test_a_prefix_that_any_sequence_s_draft_has_read_is_offered_to_drafts():
    blocks, tokens = manager(), np.arange(13)
    admit(blocks, 0, tokens)
    for draft_len, expected in ((0, 0), (5, 4)):
        blocks.publish(0, tokens, 12, draft_len)
        match = blocks.match(tokens, 13)
        assert (match.num_target_tokens, match.num_draft_tokens) == (12, expected)
    admit(blocks, 1, tokens)
    blocks.free(0)
    blocks.publish(1, tokens, 12, 12)
    assert blocks.match(tokens, 13).num_draft_tokens == 12


def test_eviction_takes_the_end_of_the_oldest_prefix_first():
    blocks = manager(num_blocks=4)
    tokens = np.arange(12)
    admit(blocks, 0, tokens)
    blocks.publish(0, tokens, 12, 12)
    blocks.free(0)
    assert blocks.match(tokens, 13).num_target_tokens == 12
    assert blocks.grow(1, 2 * SIZE)
    assert blocks.match(tokens, 12).num_target_tokens == 8
    blocks.check_integrity()


@pytest.mark.parametrize("seed", range(10))
def test_random_operations_keep_every_block_accounted_for(seed: int):
    rng = np.random.default_rng(seed)
    blocks = manager(num_blocks=14)
    held: dict[int, np.ndarray] = {}
    draft_lens: dict[int, int] = {}
    content: dict[int, tuple[int, ...]] = {}  # what each published block was filled with
    drafted: dict[int, tuple[int, ...]] = {}  # what the draft has read into it
    for _ in range(400):
        slot = int(rng.integers(4))
        if slot not in held:
            tokens = rng.integers(0, 2, size=int(rng.integers(1, 33)))  # two ids: prefixes often meet
            match = blocks.match(tokens, tokens.size)
            for index, block in enumerate(match.blocks):
                assert content[block] == tuple(tokens[: (index + 1) * SIZE])
            has_draft = [drafted.get(block) == content[block] for block in match.blocks]
            assert match.num_draft_tokens == SIZE * [*has_draft, False].index(False)
            if blocks.num_needed_blocks(match, tokens.size) <= blocks.num_free_blocks:
                blocks.admit(slot, match, tokens.size)
                held[slot], draft_lens[slot] = tokens, match.num_draft_tokens
        else:
            tokens = held[slot]
            action = rng.integers(4)
            if action == 0:
                blocks.free(slot)
                del held[slot]
            elif action == 1:
                draft_lens[slot] = int(rng.integers(draft_lens[slot], tokens.size + 1))
                blocks.publish(slot, tokens, tokens.size, draft_lens[slot])
                for known, num_tokens in ((content, tokens.size), (drafted, draft_lens[slot])):
                    for index in range(num_tokens // SIZE):
                        known[int(blocks.block_tables[slot, index])] = tuple(tokens[: (index + 1) * SIZE])
            elif action == 2:
                blocks.grow(slot, min(40, tokens.size + int(rng.integers(1, 9))))
            else:
                blocks.truncate(slot, tokens.size)
        blocks.check_integrity()
    for slot in held:
        blocks.free(slot)
    blocks.check_integrity()
    assert blocks.num_free_blocks == blocks.num_blocks


def test_sequences_that_grow_together_get_neighbouring_blocks():
    """32 of them, a token at a time and in turn, as in a batch that decodes."""
    blocks = manager(num_blocks=32 * 32, num_slots=32, max_context=16 * SIZE)
    for num_tokens in range(1, 16 * SIZE + 1):
        for slot in range(32):
            assert blocks.grow(slot, num_tokens)
    assert (np.diff(blocks.block_tables, axis=1) == 1).all()
    blocks.check_integrity()


def test_a_sequence_that_gave_blocks_back_grows_into_them_again():
    blocks = manager(num_blocks=64, num_slots=2, max_context=16 * SIZE)
    for slot in (0, 1):
        blocks.grow(slot, 4 * SIZE)
    table = blocks.block_tables.copy()
    blocks.truncate(0, 2 * SIZE)
    blocks.grow(1, 5 * SIZE)
    blocks.grow(0, 4 * SIZE)
    np.testing.assert_array_equal(blocks.block_tables[0], table[0])
    blocks.check_integrity()


@pytest.mark.parametrize("seed", range(5))
def test_the_last_blocks_are_taken_wherever_they_lie(seed: int):
    """Free blocks lie apart, some of them cached: each is found, and then there is none."""
    rng = np.random.default_rng(seed)
    blocks = manager(num_blocks=40, num_slots=41)
    for slot in range(40):
        admit(blocks, slot, rng.integers(0, 1000, SIZE))
    given_back = rng.permutation(40)[:10]
    for slot in given_back[:3]:
        blocks.publish(int(slot), np.full(SIZE, slot), SIZE, SIZE)
    expected = {int(blocks.block_tables[slot, 0]) for slot in given_back}
    for slot in given_back:
        blocks.free(int(slot))
    assert blocks.num_free_blocks == 10
    assert not blocks.grow(40, 10 * SIZE + 1)
    for num_tokens in range(1, 10 * SIZE + 1):
        assert blocks.grow(40, num_tokens)
        blocks.check_integrity()
    assert set(blocks.block_tables[40].tolist()) == expected
    assert blocks.num_free_blocks == 0 and not blocks.grow(40, 10 * SIZE + 1)
