"""Rows of trees in the kernels of the CPU: each has the bits of the same row in a chain, and sees nothing else."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import DTypeLike

from faser_backend.core.batch import RowBatch, TreeRows
from faser_backend.core.tree import Tree
from faser_backend.cpu.kv_pool import KvPool
from faser_backend.cpu.runner import LlvmRunner
from faser_backend.device.partition import CorePartition
from faser_backend.manifest import EngineManifest
from tests.cpu.test_host_attention import BOTH_DTYPES, Call, make_call
from tests.engines.test_families import BLOCK_SIZE, NUM_BLOCKS, build
from tests.support.tiny_models import VOCAB_SIZE, make_rows, run_all, write_checkpoint
from tests.support.trees import random_parents


def random_lines(rng: np.random.Generator, count: int) -> np.ndarray:
    """[count] ancestors of the rows of a tree, the anchor's first; int64 bits."""
    tree = Tree(np.array([random_parents(rng, count - 1)], np.int64).reshape(1, -1))
    return tree.lines.ancestors[0]


def cells_seen(trunk: int, bits: int) -> list[int]:
    return [*range(trunk), *(trunk + bit for bit in range(64) if bits >> bit & 1)]


def tree_call(rng: np.random.Generator, counts: list[int], earlier: list[int], **options) -> Call:
    """Trees of counts[b] nodes; the first earlier[b] of each are in the pool from a call before. 0 nodes: a chain."""
    trunks = rng.integers(0, 70, len(counts)).tolist()
    num_rows = [(count or 3) - first for count, first in zip(counts, earlier, strict=True)]
    contexts = [trunk + first for trunk, first in zip(trunks, earlier, strict=True)]
    lines = [random_lines(rng, count)[first:] if count else np.zeros(3, np.int64)
             for count, first in zip(counts, earlier, strict=True)]  # fmt: skip
    call = make_call(rng, num_rows, contexts, **options)
    return replace(call, trunk_lens=np.array(trunks), ancestors=np.concatenate(lines))


def as_chain(call: Call, sequence: int, row: int) -> Call:
    """The row alone, behind what it sees in the order of positions. The pools of `call` hold all its rows."""
    bits = int(call.ancestors[row]) % 2**64
    cells = np.array(cells_seen(int(call.trunk_lens[sequence]), bits)[:-1], np.int64)
    if not bits:
        cells = np.arange(call.context_lens[sequence] + row - call.cu_rows[sequence])
    block = call.k_pool.shape[2]
    table = np.arange(-(-(cells.size + 1) // block))[::-1].copy()
    pools = [np.full_like(pool[:, : table.size], np.nan) for pool in (call.k_pool, call.v_pool)]
    at, old = np.arange(cells.size), call.block_table[sequence]
    for mine, pool in zip(pools, (call.k_pool, call.v_pool), strict=True):
        mine[:, table[at // block], at % block] = pool[:, old[cells // block], cells % block]
    packed = [x[row : row + 1].copy() for x in (call.q, call.k, call.v)]
    return Call(*packed, *pools, table[None], np.array([0, 1]), np.array([cells.size]), call.scale)


@BOTH_DTYPES
@pytest.mark.parametrize(("heads_per_kv", "head_dim", "block"), [(1, 64, 16), (2, 24, 4), (3, 8, 1), (16, 24, 6)])
def test_a_row_of_a_tree_has_the_bits_that_it_has_in_a_chain(
    heads_per_kv: int, head_dim: int, block: int, dtype: DTypeLike
) -> None:
    rng = np.random.default_rng(head_dim + block)
    options = {"heads_per_kv": heads_per_kv, "head_dim": head_dim, "block": block, "dtype": dtype}
    call = tree_call(rng, [1, 5, 0, 12, 64, 20], [0, 0, 0, 7, 0, 19], **options)
    attended = call.run()
    for sequence, (begin, end) in enumerate(pairwise(call.cu_rows)):
        for row in range(begin, end):
            np.testing.assert_array_equal(as_chain(call, sequence, row).run()[0], attended[row])
    num_units = call.k.shape[1] * len(call.context_lens)
    np.testing.assert_array_equal(call.run(list(range(num_units + 1))), attended)


def test_a_row_does_not_read_what_it_does_not_see() -> None:
    rng = np.random.default_rng(3)
    call = tree_call(rng, [40], [0])
    call.k[17] = call.v[17] = np.nan
    sees = (call.ancestors >> 17 & 1).astype(bool)
    assert 0 < sees.sum() < 40
    attended = call.run()
    assert np.isnan(attended[sees]).all() and np.isfinite(attended[~sees]).all()


def test_the_mask_of_a_chain_is_a_chain() -> None:
    """Rows without a bit, among trees and alone, are those of a call without a mask."""
    call = tree_call(np.random.default_rng(5), [0, 0], [0, 0])
    masked = call.run()
    none = np.zeros(0, np.int64)
    np.testing.assert_array_equal(replace(call, trunk_lens=none, ancestors=none).run(), masked)
    all_before = np.array([0b1, 0b11, 0b111] * 2)
    np.testing.assert_array_equal(replace(call, ancestors=all_before).run(), masked)


def test_a_wrong_mask_is_noticed() -> None:
    """The comparison above fails for one bit too many."""
    call = tree_call(np.random.default_rng(6), [9], [0])
    attended = call.run()
    row = int(np.flatnonzero(call.ancestors != (1 << np.arange(1, 10)) - 1)[0])
    missing = next(bit for bit in range(row) if not call.ancestors[row] >> bit & 1)
    call.ancestors[row] |= 1 << missing
    assert (call.run()[row] != attended[row]).any()


# -- whole models --------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["fp32", "fp16"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LlvmRunner:
    root = tmp_path_factory.mktemp("trees")
    build(
        write_checkpoint(root / "source"),
        root / "engine",
        runtime="llvm",
        exit_layers=(1,),
        kv_cache_dtype=request.param,
    )
    manifest = EngineManifest.load(root / "engine")
    pool = KvPool(manifest.target.spec, NUM_BLOCKS, BLOCK_SIZE, dtype=request.param)
    return LlvmRunner(manifest.target, root / "engine", CorePartition("test", (0, 1)), pool)


def test_a_mask_that_shows_siblings_changes_logits(runner: LlvmRunner) -> None:
    rng = np.random.default_rng(2)
    prompt, tokens, table = rng.integers(0, VOCAB_SIZE, 9), rng.integers(0, VOCAB_SIZE, 6), np.arange(5)[None]
    context = np.array([prompt.size])
    found = []
    for bits in ([1, 3, 5, 9, 17, 33], [1, 3, 7, 15, 31, 63]):
        run_all(runner, make_rows([prompt], [0], [prompt.size], table))
        tree = TreeRows(context, np.array(bits), prompt.size + np.array([0, 1, 1, 1, 1, 1]))
        found.append(run_all(runner, RowBatch(tokens, np.array([0, 6]), context, table, np.arange(6), tree)))
    differences = np.abs(found[0] - found[1]).max(axis=1)
    assert (differences[:2] < 1e-5).all() and (differences[2:] > 1e-3).all()


def test_a_path_of_a_tree_is_plain_decoding(runner: LlvmRunner) -> None:
    """Logits of every row, and of what follows an accepted path once its cells are where they belong."""
    rng = np.random.default_rng(8)
    tables = rng.permutation(NUM_BLOCKS)[:20].reshape(2, 10)
    prompts = [rng.integers(0, VOCAB_SIZE, 11), rng.integers(0, VOCAB_SIZE, 6)]
    lines = [random_lines(rng, count) for count in (9, 5)]
    tokens = [rng.integers(0, VOCAB_SIZE, line.size) for line in lines]
    context_lens = np.array([prompt.size for prompt in prompts])
    run_all(runner, make_rows(prompts, [0, 0], context_lens.tolist(), tables))
    depths = [np.array([bin(bits).count("1") for bits in line.tolist()]) for line in lines]
    positions = np.concatenate([context + depth - 1 for context, depth in zip(context_lens, depths, strict=True)])
    tree = TreeRows(context_lens, np.concatenate(lines), positions)
    rows = RowBatch(np.concatenate(tokens), np.array([0, 9, 14]), context_lens, tables, np.arange(14), tree)
    logits = np.split(run_all(runner, rows), [9])
    for b in range(2):
        deepest = int(depths[b].argmax())
        path = np.array([bit for bit in range(64) if lines[b][deepest] >> bit & 1])
        text = np.concatenate([prompts[b], tokens[b][path], [7]])
        start, count = prompts[b].size, path.size + 1
        at = context_lens[b] + np.arange(path.size)
        runner.move_kv(np.repeat(tables[b : b + 1], path.size, axis=0), context_lens[b] + path, at)
        follow = run_all(runner, make_rows([text], [text.size - 1], [1], tables[b : b + 1]))
        plain = [run_all(runner, make_rows([text], [start + i], [1], tables[b : b + 1]))[0] for i in range(count)]
        found = np.concatenate([logits[b][path], follow])
        np.testing.assert_array_equal(found, plain)
