"""Where the keys and values of a tree's accepted tokens lie, and their way to the cells of their positions.

Rows of a tree take cells in their order behind the context. Of the accepted path each one belongs to a position, and
goes to that position's cell, in both models' pools; what stays elsewhere is overwritten before anybody reads it.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from faser_backend.core.frontier import Acceptance, Frontier
from faser_backend.core.ports import ModelRunner, TreeRunner
from faser_backend.pipeline.phases import Partition
from faser_backend.pipeline.rows import DecodeBatch


def move_accepted(partition: Partition, batch: DecodeBatch, frontier: Frontier, acceptance: Acceptance) -> None:
    """To be called before the tokens are committed. Does nothing for chains, whose rows lie right."""
    if acceptance.path is None:
        return
    columns = acceptance.path.rows[:, 1:] - 1  # [B, D - 1] draft tokens; the i-th belongs to position num_tokens + i
    _move(partition.target, batch, columns, acceptance.num_emitted - 1)
    if partition.draft is not None:
        _move(partition.draft, batch, _draft_cells(frontier, acceptance), num_run_by_draft(frontier, acceptance))


def num_run_by_draft(frontier: Frontier, acceptance: Acceptance) -> np.ndarray:
    """[B] accepted tokens from the first on that the draft has run."""
    is_run = _draft_cells(frontier, acceptance) >= 0
    is_run &= np.arange(is_run.shape[1]) < acceptance.num_emitted[:, None] - 1
    return np.cumprod(is_run, axis=1).sum(axis=1)


def _draft_cells(frontier: Frontier, acceptance: Acceptance) -> np.ndarray:
    """[B, D - 1] of the rows of the path behind the anchor."""
    assert frontier.tree is not None and acceptance.path is not None
    columns = np.maximum(acceptance.path.rows[:, 1:] - 1, 0)
    return np.take_along_axis(frontier.tree.draft_cells, columns, axis=1)


def _move(runner: ModelRunner, batch: DecodeBatch, cells: np.ndarray, counts: np.ndarray) -> None:
    """cells [B, D - 1] behind the last token of each sequence become 0, 1, ...: the first counts [B] of each."""
    places = np.arange(cells.shape[1])
    sequence, place = np.nonzero((places < counts[:, None]) & (cells != places))
    if sequence.size:
        starts = batch.num_tokens[sequence]
        tables = batch.block_tables[sequence]
        cast(TreeRunner, runner).move_cells(tables, starts + cells[sequence, place], starts + place)
