"""Attention over rows of trees in the Triton-language interpreter, against the reference.

In a process of its own, which test_tree_kernels.py starts with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plugins import pruned_chunk_attention as attention
from plugins.attention_config import LaunchConfig
from plugins.launch import TreeMask, runs_kernel
from plugins.split_combine import workspace_numel
from tests.kernel_cases import NAN, SENTINEL, Call, check
from tests.tree_cases import Piece, random_pieces, tree_call, with_siblings

torch.set_num_threads(1)
DTYPES = (torch.float32, torch.float16)
SMALL = LaunchConfig(16, 16, 16, 4, 2)


def run(call: Call, tree: TreeMask | None, *, num_splits: int = 1, **options) -> None:
    """The launcher, with a workspace of NaN."""
    num_rows, num_heads, head_dim = call.q.shape
    workspace = torch.full((workspace_numel(num_rows, num_heads, head_dim, num_splits),), NAN)
    rows = max(1, int(call.cu_rows.diff().max()))
    launch = {"max_rows": rows, "num_splits": num_splits, "workspace": workspace, "tree": tree}
    attention.pruned_chunk_attention(*call, **launch, **options)


@pytest.mark.parametrize(("dtype", "seed"), [(DTYPES[seed % 3 == 2], seed) for seed in range(10)])
def test_random_trees(monkeypatch, dtype, seed):
    assert runs_kernel(attention.pruned_chunk_attention_kernel, torch.zeros(1))
    rng = np.random.default_rng(seed)
    pieces = random_pieces(rng)
    group = int(rng.choice([1, 2, 3]))
    call, tree = tree_call(pieces, seed, num_kv_heads=1, group=group, head_dim=32, dtype=dtype, num_padding_rows=2)
    monkeypatch.setattr(attention, "launch_config", lambda *_: SMALL)
    num_splits = 3 if call.q.shape[0] * group <= 40 else 1
    check(call, lambda call: run(call, tree, num_splits=num_splits), tree)


def test_a_tree_of_sixty_four_rows_under_the_launch_of_a_verification():
    """The last row's bit is the sign; tiles are those of real launches, the context is in parts."""
    call, tree = tree_call([Piece(70, 64, earlier=40), Piece(0, 5)], 3, num_kv_heads=1, group=1, head_dim=16)
    assert int(tree.ancestors.min()) < 0
    check(call, lambda call: run(call, tree, num_splits=2), tree)


def test_a_mask_of_chains_has_the_bits_of_no_mask(monkeypatch):
    """Without a bit, and with those of all rows before."""
    monkeypatch.setattr(attention, "launch_config", lambda *_: SMALL)
    call, tree = tree_call([Piece(20, 0, chain=3), Piece(7, 0, chain=5)], 1, num_kv_heads=1)
    full = torch.tensor([(2 << row) - 1 for row in (*range(3), *range(5))])
    plain = call.with_own_results()
    run(plain, None)
    for masked in (tree, tree._replace(ancestors=full)):
        found = call.with_own_results()
        run(found, masked)
        torch.testing.assert_close(found.out, plain.out, atol=1e-6, rtol=0)
        assert torch.equal(found.k_pool.view(torch.int32), plain.k_pool.view(torch.int32))


def test_rows_that_see_nothing_for_some_iterations():
    """A trunk of nothing, and rows whose first visible cell lies in a later iteration."""
    call, _ = tree_call([Piece(0, 40)], 2, num_kv_heads=1, group=1, head_dim=16)
    roots = torch.tensor([1 << row for row in range(40)])  # each sees itself alone
    tree = TreeMask(torch.zeros(1, dtype=torch.int32), roots)
    check(call, lambda call: run(call, tree), tree)
    found = call.with_own_results()
    run(found, tree)
    torch.testing.assert_close(found.out, call.v_new, atol=1e-6, rtol=0)


def test_rows_of_nobody_are_left(monkeypatch):
    monkeypatch.setattr(attention, "launch_config", lambda *_: SMALL)
    call, tree = tree_call([Piece(9, 6, earlier=2)], 4, num_padding_rows=3, head_dim=16)
    tree.ancestors[4:] = -1
    run(call, tree)
    assert (call.out[4:] == SENTINEL).all() and call.out[:4].isfinite().all()


@pytest.mark.parametrize("mistake", ["siblings see each other", "bits one cell off", "trunk taken for the context"])
def test_a_wrong_mask_fails_the_check(monkeypatch, mistake):
    monkeypatch.setattr(attention, "launch_config", lambda *_: SMALL)
    call, tree = tree_call([Piece(11, 12, earlier=5)], 8, num_kv_heads=1, head_dim=16)
    check(call, lambda call: run(call, tree), tree)
    wrong = {
        "siblings see each other": with_siblings(tree),
        "bits one cell off": tree._replace(ancestors=tree.ancestors << 1),
        "trunk taken for the context": tree._replace(trunk_lens=call.context_lens),
    }[mistake]
    with pytest.raises(AssertionError):
        check(call, lambda call: run(call, wrong), tree)
