"""`TorchDraftLevels`: trees of draft tokens, level by level on the device, without asking the host between levels.

A level is one CUDA graph: the draft runs the rows that the level before it chose, children are drawn, the likeliest of
all nodes stay (level_choice.py), and the next level's rows are written where the next launch reads them. So graphs
differ in the rows that a level has at most, all nodes of the batch, and in nothing else; rows of nobody pad it.
The host queues as many levels as the last trees had and waits once; where a tree is not done yet it queues more.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from faser_backend.core.batch import RowBatch, SamplingRows
from faser_backend.core.ports import DraftTrees
from faser_backend.core.tree import MAX_TREE_TOKENS, MOST_CHILDREN, TreeLaw
from faser_backend.device.cuda.buffers import ANCESTORS, NO_SLOT, TRUNKS
from faser_backend.device.cuda.choice import NUM_WORDS, best_children, packed_parameters, perturbed, unpacked
from faser_backend.device.cuda.graphs import CallCache, RepeatedLaunch
from faser_backend.device.cuda.level_choice import (
    FAULTS,
    LAW_WORDS,
    NO_FAULT,
    Level,
    Nodes,
    anchors,
    child_log_chances,
    cu_of,
    faults_of,
    law_of,
    law_words,
    next_level,
    no_nodes,
    with_children,
)
from faser_backend.device.cuda.noise import TorchNoise
from faser_backend.device.cuda.runner import CudaRunner
from faser_backend.device.cuda.sampler import TorchSampler
from faser_backend.device.cuda.segment import CallBounds
from faser_backend.device.cuda.transfer import copy_to_device, to_host
from faser_backend.device.sampler import check_finite

_TRUNK, _LAW, _SLOTS = NUM_WORDS, NUM_WORDS + 1, NUM_WORDS + 1 + LAW_WORDS  # where a plan's parts begin
PLAN_HEIGHT = _SLOTS + MAX_TREE_TOKENS


class LevelShape(NamedTuple):
    """What is fixed under the graphs of a level."""

    bounds: CallBounds
    has_filters: bool


class TorchDraftLevels:
    """Drafts trees with one runner, on the calling thread's current stream, which is that of the runner's share."""

    def __init__(self, runner: CudaRunner, sampler: TorchSampler) -> None:
        self._runner = runner
        self._sampler = sampler
        is_cuda = sampler.device.type == "cuda"
        self._levels = CallCache[LevelShape, _Levels](
            lambda shape, captures: _Levels(shape, runner, sampler.noise, captures=captures), is_cuda=is_cuda
        )
        self._num_levels = 1  # that the last trees had: how many are queued before the host looks
        runner.clear_at_close(self._levels.clear)

    def capture_menu(self) -> None:
        """Captures levels of every number of rows, with filters and without. Rows of nobody."""
        for bounds in self._runner.shapes.menu(0, has_trees=True):
            if bounds.has_trees:
                for has_filters in (False, True):
                    self._levels.get(LevelShape(bounds, has_filters)).warm_up()

    def can_draft(self, slots: np.ndarray, num_draft_tokens: np.ndarray) -> bool:
        """See core.ports.DraftLoop.can_draft_trees: rules need the tokens before each draw on the host, and programs
        that are told by the host which rows are whose take no rows of the device's."""
        return (
            int(num_draft_tokens.max()) <= MAX_TREE_TOKENS
            and self._runner.shapes.of_level(int(num_draft_tokens.sum())) is not None
            and not self._sampler.parameters.has_rules[slots].any()
        )

    def draft(self, rows: RowBatch, slots: np.ndarray, law: TreeLaw) -> DraftTrees:
        """See core.ports.DraftLoop.draft_trees. Raises FaserError as Sampler.sample, for the first sequence whose
        logits are unusable, and ValueError for more children than MOST_CHILDREN."""
        if not 1 <= law.num_children <= (most := min(MOST_CHILDREN, self._runner.vocab_size)):
            raise ValueError(f"num_children = {law.num_children}: must be in [1, {most}]")
        known, block_size = self._sampler.parameters, self._runner.pool.kv_block_size
        bounds = self._runner.shapes.of_level(int(law.num_wanted.sum()))
        assert bounds is not None, "asked without can_draft"
        levels = self._levels.get(LevelShape(bounds, bool(known.has_filters[slots].any())))
        trunks = rows.context_lens + rows.rows_per_sequence  # [A] cells before the trees
        starts = trunks + self._runner.num_ahead  # [A] positions behind the anchors
        parameters = packed_parameters(known, slots, starts, bounds.num_sequences)
        plan = plan_of(parameters, law, trunks, tree_slots(rows, law.num_wanted, block_size))
        num_columns = -(-int((trunks + law.num_wanted).max()) // block_size)
        levels.begin(*self._runner.run_unseen(rows), plan, rows.block_tables[:, :num_columns])
        num_queued = self._num_levels
        while True:
            levels.advance(num_queued)
            faults, (num_open, num_levels), chances, words = levels.fetch(slots.size)
            _check(faults, slots, starts)
            if not num_open:
                break
            num_queued = 1
        self._num_levels = int(num_levels)
        return _trees(chances, words)


def tree_slots(rows: RowBatch, num_wanted: np.ndarray, kv_block_size: int) -> np.ndarray:
    """[MAX_TREE_TOKENS, A] int64 flat slots of the cells behind the rows, num_wanted [A] of each sequence."""
    cells = np.arange(MAX_TREE_TOKENS)[:, None]
    at = rows.context_lens + rows.rows_per_sequence + np.minimum(cells, num_wanted - 1)
    block, offset = np.divmod(at, kv_block_size)
    slots = rows.block_tables[np.arange(num_wanted.size), block] * kv_block_size + offset
    return np.where(cells < num_wanted, slots, NO_SLOT)


def plan_of(parameters: np.ndarray, law: TreeLaw, trunks: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """[PLAN_HEIGHT, num_sequences] int64: parameters [NUM_WORDS, num_sequences], trunks [A], the law, and the slots of
    cells [MAX_TREE_TOKENS, A], a column per sequence. Sequences that pad want no nodes."""
    plan = np.zeros((PLAN_HEIGHT, parameters.shape[1]), np.int64)
    plan[:NUM_WORDS] = parameters
    plan[_TRUNK, : trunks.size] = trunks
    plan[_LAW:_SLOTS] = law_words(law, parameters.shape[1])
    plan[_SLOTS:] = NO_SLOT
    plan[_SLOTS:, : trunks.size] = slots
    return plan


class _Levels:
    """The tensors and the graphs of one shape: what follows the anchors, and every further level."""

    def __init__(self, shape: LevelShape, runner: CudaRunner, noise: TorchNoise, *, captures: bool) -> None:
        self._noise = noise
        self._call = runner.prepare_decode(shape.bounds)
        size, tensors = shape.bounds.num_rows, self._call.tensors
        device = tensors["logits"].device
        self._plan = torch.zeros((PLAN_HEIGHT, size), dtype=torch.int64, device=device)
        self._law = law_of(self._plan[_LAW:_SLOTS])
        self._num_children = min(MOST_CHILDREN, runner.vocab_size)
        self._nodes = no_nodes(size, device)
        self._level = Level(*(tensor.clone() for tensor in anchors(self._law)))
        self._num_run = torch.zeros(size, dtype=torch.int64, device=device)
        self._faults = torch.zeros(size, dtype=torch.int64, device=device)
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)  # rows of the next level; levels with rows
        self._filtered = torch.arange(size, device=device) if shape.has_filters else None
        self._hidden = tensors.get("hidden") if runner.spec.reads_target else None
        # What a head made of each cell, a sequence's behind the one's before it; of each anchor; of rows of nobody.
        made = None if self._hidden is None else self._hidden.new_zeros(2 * size + 1, self._hidden.shape[1])
        self._made = made
        capturer = runner.capturer if captures else None
        self._start = RepeatedLaunch(self._queue_start, capturer, f"the first level of {shape}")
        self._advance = RepeatedLaunch(self._queue_level, capturer, f"a level of {shape}")

    def begin(
        self, first_logits: torch.Tensor, first_hidden: torch.Tensor | None, plan: np.ndarray, tables: np.ndarray
    ) -> None:
        """Queues what follows the anchors: first_logits [A, V]; first_hidden [A, hidden_size], of a draft head."""
        logits = self._call.tensors["logits"]
        if first_logits.data_ptr() != logits.data_ptr():  # calls of one model put them at the same place
            logits[: first_logits.shape[0]].copy_(first_logits)
        if self._made is not None and first_hidden is not None:
            size = self._num_run.numel()
            self._made[size : size + first_hidden.shape[0]].copy_(first_hidden)
        self._call.fill_tables(tables)
        copy_to_device(plan, self._plan)
        self._start()

    def advance(self, num_levels: int) -> None:
        """Queues levels; one of no rows changes nothing."""
        for _ in range(num_levels):
            self._advance()

    def fetch(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Of the first `count` = A sequences, after one wait: faults [A]; rows of the level to come and levels so far
        [2]; log chances [A, M]; and the words of nodes, [5, A, M]."""
        words = torch.stack([tensor[:count] for tensor in self._nodes[1:]])
        faults, counts, chances, words = to_host(
            self._faults[:count], self._counts, self._nodes.log_chances[:count], words
        )
        return faults, counts, chances, words

    def warm_up(self) -> None:
        """Captures both graphs, with a plan that wants no nodes."""
        size = self._num_run.numel()
        parameters = np.zeros((NUM_WORDS, size), np.int64)
        parameters[3] = 1  # top-k: no filter takes less
        nobody = np.zeros(0, np.int64)
        law = TreeLaw(nobody, 1, 1.0, 0.0, np.zeros(0), 0.0, 0.0)
        plan = plan_of(parameters, law, nobody, np.zeros((MAX_TREE_TOKENS, 0), np.int64))
        for _ in range(2):
            self.begin(self._call.tensors["logits"], None, plan, np.zeros((size, 1), np.int64))
            self.advance(2)

    def _queue_start(self) -> None:
        _assign(self._nodes, no_nodes(self._num_run.numel(), self._plan.device))
        _assign(self._level, anchors(self._law))
        self._num_run.zero_()
        self._counts.zero_()
        self._faults.fill_(NO_FAULT)
        self._choose()

    def _queue_level(self) -> None:
        self._call.launch()
        if self._made is not None and self._hidden is not None:
            self._made.index_copy_(0, self._made_at(self._level.cells), self._hidden)
        self._choose()

    def _choose(self) -> None:
        """From the logits of the level's rows to the rows of the next level."""
        level, law = self._level, self._law
        rows = unpacked(self._plan[:NUM_WORDS]).take(level.sequences)
        rows = rows._replace(positions=rows.positions + level.depths)
        scores = perturbed(self._call.tensors["logits"], rows, self._noise, self._filtered)
        best, ids, found = best_children(scores, rows.inverse_temperature, self._num_children)
        self._faults.copy_(torch.minimum(self._faults, faults_of(best[:, 0], level)))
        chances = child_log_chances(
            found, law.difference.index_select(0, level.sequences), law.num_children.index_select(0, level.sequences)
        )
        nodes = with_children(self._nodes, level, ids, chances, law)
        cells, coming = next_level(nodes, self._num_run, law, level.tokens.numel())
        _assign(self._nodes, nodes._replace(cells=cells))
        _assign(self._level, coming)
        self._fill_call()
        self._num_run.add_(coming.cu_rows.diff())
        self._counts[:1].copy_(coming.cu_rows[-1:])
        self._counts[1:].add_(coming.cu_rows[-1:] > 0)

    def _fill_call(self) -> None:
        """Writes the level's rows where the next launch reads them. num_run: before this level."""
        tensors, level, trunks = self._call.tensors, self._level, self._plan[_TRUNK]
        is_row = self._is_row
        positions = trunks.index_select(0, level.sequences) + level.depths - 1
        slots = self._plan[_SLOTS:][level.cells, level.sequences]
        tensors["token_ids"].copy_(level.tokens)
        tensors["positions"].copy_(torch.where(is_row, positions, 0))
        tensors["slot_mapping"].copy_(torch.where(is_row, slots, NO_SLOT))
        tensors["cu_rows"].copy_(level.cu_rows)
        tensors["context_lens"].copy_(trunks + self._num_run)
        tensors[TRUNKS].copy_(trunks)
        tensors[ANCESTORS].copy_(level.bits)
        if self._made is not None and self._hidden is not None:
            self._hidden.copy_(self._made.index_select(0, self._made_at(level.parents)))

    def _made_at(self, cells: torch.Tensor) -> torch.Tensor:
        """[T] where `_made` holds cells [T] of the level's sequences, -1 the anchor's."""
        size, sequences = self._num_run.numel(), self._level.sequences
        before = cu_of(self._law.num_wanted).index_select(0, sequences)
        places = torch.where(cells < 0, size + sequences, before + cells)
        return torch.where(self._is_row, places, 2 * size)

    @property
    def _is_row(self) -> torch.Tensor:
        return torch.arange(self._num_run.numel(), device=self._plan.device) < self._level.cu_rows[-1]


def _assign(targets: Nodes | Level, values: Nodes | Level) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


def _trees(chances: np.ndarray, words: np.ndarray) -> DraftTrees:
    """chances: [A, M]; words: [5, A, M], tokens, parents' cells, depths and cells first."""
    counts = np.isfinite(chances).sum(axis=1)
    width = int(counts.max())
    tokens, parents, _, cells = words[:4, :, :width]
    is_node = np.arange(width) < counts[:, None]
    # A parent was run, and lies before its children.
    is_parent = (parents[:, :, None] == cells[:, None, :]) & (is_node & (cells >= 0))[:, None, :]
    rows = np.where(parents < 0, 0, is_parent.argmax(axis=2) + 1)
    return DraftTrees(tokens, counts, rows, cells, chances[:, :width])


def _check(faults: np.ndarray, slots: np.ndarray, starts: np.ndarray) -> None:
    """Raises FaserError for the first of sequences [A] with a fault."""
    is_bad = faults < NO_FAULT
    if is_bad.any():
        depths, kinds = np.divmod(np.where(is_bad, faults, 0), len(FAULTS))
        best = np.where(is_bad, np.array(FAULTS)[kinds], 0.0)
        every, nothing = np.arange(slots.size), np.zeros(slots.size, np.int64)
        check_finite(best, SamplingRows(slots, starts + depths, every, nothing, nothing[:, None]), None)
