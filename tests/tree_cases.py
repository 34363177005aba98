"""Random calls of attention over rows of trees, for kernels of a GPU: some nodes in the pool, others in the chunk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from faser_backend.core.tree import MAX_TREE_ROWS, Tree
from plugins.launch import TreeMask
from tests.kernel_cases import Call, Shape, make_call
from tests.trees import random_parents


@dataclass(frozen=True)
class Piece:
    """A sequence: num_nodes rows of a tree behind `trunk` tokens, the first `earlier` of them in the pool already. Of a
    chain num_nodes is 0: `chain` rows behind the trunk and `earlier` further tokens."""

    trunk: int
    num_nodes: int
    earlier: int = 0
    chain: int = 0


def random_lines(rng: np.random.Generator, count: int) -> np.ndarray:
    """[count] ancestors of the rows of a tree, the anchor's first; int64 bits."""
    parents = np.array([random_parents(rng, count - 1)], np.int64).reshape(1, -1)
    return Tree(parents, np.zeros_like(parents)).lines.ancestors[0]


def tree_call(pieces: list[Piece], seed: int, **options) -> tuple[Call, TreeMask]:
    """options: of Shape, rows and contexts aside."""
    rng = np.random.default_rng(seed)
    rows = tuple(piece.num_nodes - piece.earlier if piece.num_nodes else piece.chain for piece in pieces)
    shape = Shape(rows=rows, contexts=tuple(piece.trunk + piece.earlier for piece in pieces), **options)
    call = make_call(shape, seed)
    ancestors = torch.zeros(call.q.shape[0], dtype=torch.int64)
    for piece, first, count in zip(pieces, call.cu_rows.tolist(), rows, strict=False):
        if piece.num_nodes:
            lines = random_lines(rng, piece.num_nodes)[piece.earlier :]
            ancestors[first : first + count] = torch.from_numpy(lines)
    return call, TreeMask(torch.tensor([piece.trunk for piece in pieces], dtype=torch.int32), ancestors)


def random_pieces(rng: np.random.Generator) -> list[Piece]:
    """Verifications, levels of a draft, chains beside them, and trees of 64 rows."""
    pieces = []
    for _ in range(int(rng.integers(1, 4))):
        trunk, kind = int(rng.choice([0, 1, 7, 8, 15, 16, 33, 40])), rng.choice(["verify", "level", "full", "chain"])
        count = MAX_TREE_ROWS if kind == "full" else int(rng.integers(1, 24))
        earlier = int(rng.integers(0, count)) if kind != "verify" else 0
        if kind == "chain":
            pieces.append(Piece(trunk, 0, earlier=int(rng.integers(0, 3)), chain=int(rng.integers(0, 5))))
        else:
            pieces.append(Piece(trunk, count, earlier=max(earlier, count - 24)))
    return pieces


def as_chain(call: Call, tree: TreeMask, sequence: int, row: int) -> Call:
    """The row alone, behind what it sees in the order of positions; `call` has not run, so the chunk is not in the
    pools. Results of its own."""
    first, context, trunk = (int(x[sequence]) for x in (call.cu_rows, call.context_lens, tree.trunk_lens))
    bits = int(tree.ancestors[row]) % 2**64
    own = context + row - first
    seen = [cell for cell in range(own) if cell < trunk or not bits or bits >> (cell - trunk) & 1]
    size = call.k_pool.shape[2]
    num_kv_heads, _, _, head_dim = call.k_pool.shape
    mine_k, mine_v = torch.zeros(2, num_kv_heads, -(-(len(seen) + 1) // size), size, head_dim, dtype=call.q.dtype)
    for pool, mine, new in ((call.k_pool, mine_k, call.k_new), (call.v_pool, mine_v, call.v_new)):
        for place, cell in enumerate(seen):
            block = call.block_table[sequence, cell // size]
            found = pool[:, block, cell % size] if cell < context else new[first + cell - context]
            mine[:, place // size, place % size] = found
    table = torch.arange(mine_k.shape[1], dtype=torch.int32)[None]
    q, k_new, v_new = (x[row : row + 1].contiguous() for x in (call.q, call.k_new, call.v_new))
    cu_rows, context_lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([len(seen)], dtype=torch.int32)
    return Call(
        q, k_new, v_new, mine_k, mine_v, table, cu_rows, context_lens, context_lens.clone(), torch.zeros_like(q)
    )


def with_siblings(tree: TreeMask) -> TreeMask:
    """The mask of a chain in the place of each tree's: siblings see each other."""
    return tree._replace(ancestors=torch.zeros_like(tree.ancestors))
