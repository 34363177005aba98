"""Rows of trees in the attention kernel of a GPU: its reference, the kernel interpreted, and what it compiles to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from plugins import reference
from plugins.attention_config import shared_limit
from plugins.compile import CAPABILITIES
from plugins.launch import TreeMask
from plugins.pruned_chunk_attention import pruned_chunk_attention
from tests.kernel_cases import check
from tests.test_kernels_compile import compile_attention
from tests.tree_cases import Piece, as_chain, tree_call, with_siblings

ROOT = Path(__file__).resolve().parents[1]
PIECES = [Piece(9, 7), Piece(12, 10, earlier=4), Piece(0, 5), Piece(6, 0, earlier=2, chain=3), Piece(3, 64, earlier=60)]


def test_interpreted_kernels_match_their_reference():
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-W", "ignore", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/interpreted_trees.py"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def rows_alone(tree: TreeMask, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """What a call of trees gives, and what its rows give as chains of one row behind all that they see."""
    call, right = tree_call(PIECES, seed, head_dim=16)
    found = []
    for sequence, (begin, end) in enumerate(zip(call.cu_rows[:-1].tolist(), call.cu_rows[1:].tolist(), strict=True)):
        for row in range(begin, end):
            alone = as_chain(call, right, sequence, row)
            reference.pruned_chunk_attention(*alone, 0.25)
            found.append(alone.out)
    pruned_chunk_attention(*call, max_rows=8, tree=tree)
    return call.out, torch.cat(found)


def test_a_row_of_a_tree_is_a_row_of_its_path():
    """An independent statement of what the reference says."""
    _, tree = tree_call(PIECES, 0, head_dim=16)
    torch.testing.assert_close(*rows_alone(tree), atol=1e-5, rtol=0)


def test_a_mask_that_shows_siblings_is_noticed():
    _, tree = tree_call(PIECES, 0, head_dim=16)
    found, expected = rows_alone(with_siblings(tree))
    assert (found - expected).abs().max() > 0.01


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("trunk_lens", torch.zeros(4, dtype=torch.int32), r"trunk_lens: shape \[4\], expected \[5\]"),
        ("trunk_lens", torch.zeros(5, dtype=torch.int64), r"trunk_lens: dtype torch.int64, expected torch.int32"),
        ("ancestors", torch.zeros(3, dtype=torch.int64), r"ancestors: shape \[3\], expected \[25\]"),
    ],
)
def test_bad_masks_are_named(field, value, message):
    call, tree = tree_call(PIECES, 0, head_dim=16)
    with pytest.raises(ValueError, match=message):
        check(call, lambda call: pruned_chunk_attention(*call, max_rows=8, tree=tree._replace(**{field: value})), tree)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("variant", [("bf16", 128, 4, 5, True)])
def test_the_kernel_of_trees_compiles_and_that_of_chains_knows_no_mask(capability, variant):
    dtype, head_dim, group, max_rows, is_split = variant
    shape = (dtype, head_dim, group, max_rows, capability)
    tree, chain = (compile_attention(*shape, is_split=is_split, is_tree=is_tree) for is_tree in (True, False))
    mask = {("trunk_lens", "*i32"), ("ancestors", "*i64")}
    assert mask <= set(tree.parameters) and not mask & set(chain.parameters)
    assert tree.spill_bytes <= 64 and tree.shared_bytes <= shared_limit(capability)
    assert tree.ptx.count("b64") > chain.ptx.count("b64")
