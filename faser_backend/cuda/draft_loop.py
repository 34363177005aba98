"""`TorchDraftLoop`: chains of draft tokens without asking the host between them; implements core.ports.DraftLoop.

What the host knows before a chain begins (positions, slots, lengths, sampling parameters) it uploads as one plan for
all steps; what it does not know, the tokens, each step takes from the one before on the device. A step is one CUDA
graph, which counts on the device which one it is: so graphs differ in their number of sequences, not in the length of
chains. What was drawn comes back in one copy. On a torch CPU device the same steps run eagerly. Tokens, noise and
margins are those of the runner and TorchSampler.sample_draft in turn.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from faser_backend.core.batch import RowBatch, SamplingRows
from faser_backend.core.ports import DraftTokens
from faser_backend.cpu.sampler import check_finite
from faser_backend.cuda.buffers import NO_SLOT
from faser_backend.cuda.call_shapes import CallBounds
from faser_backend.cuda.choice import (
    NUM_WORDS,
    draw_draft,
    packed_parameters,
    perturbed,
    unpacked,
    unpacked_draws,
)
from faser_backend.cuda.graphs import CallCache, RepeatedLaunch
from faser_backend.cuda.noise import TorchNoise
from faser_backend.cuda.runner import CudaRunner
from faser_backend.cuda.sampler import TorchSampler
from faser_backend.cuda.streams import on_share
from faser_backend.cuda.transfer import copy_to_device, to_host

MAX_STEPS = 64  # draft tokens of a chain
_STEPS = NUM_WORDS  # where a plan's positions and slots begin
PLAN_HEIGHT = NUM_WORDS + 2 * MAX_STEPS + 1  # the last row is the number of the step


class ChainShape(NamedTuple):
    """The sizes that are fixed under the graphs of a chain."""

    bounds: CallBounds  # of a step
    num_candidates: int  # C; 0 = none wanted
    has_filters: bool


class TorchDraftLoop:
    """Drafts with one runner, on the stream of its share, on any thread. Its graphs go when the runner is closed."""

    def __init__(self, runner: CudaRunner, sampler: TorchSampler) -> None:
        self._runner = runner
        self.on_share = runner.on_share
        self._sampler = sampler
        is_cuda = sampler.device.type == "cuda"
        self._chains = CallCache[ChainShape, _Chain](
            lambda shape, captures: _Chain(shape, runner, sampler.noise, captures=captures), is_cuda=is_cuda
        )
        runner.clear_at_close(self._chains.clear)

    @on_share
    def capture_menu(self, max_num_seqs: int, num_candidates: int) -> None:
        """Captures the steps of every chain that is known beforehand, of up to max_num_seqs sequences, with filters and
        without. num_candidates: of which a policy may ask, or 0. Of nobody."""
        counts = [0, num_candidates] if num_candidates else [0]
        known = [bounds for bounds in self._runner.shapes.menu(0) if bounds.num_logit_rows]
        largest = self._runner.shapes.of_decode(max_num_seqs, 1)
        for bounds in known:
            if bounds.num_rows <= largest.num_rows:
                for count in counts:
                    for has_filters in (False, True):
                        self._chains.get(ChainShape(bounds, count, has_filters)).warm_up()

    def can_draft(self, slots: np.ndarray) -> bool:
        """See core.ports.DraftLoop: rules need the tokens before each draw on the host."""
        return not self._sampler.parameters.has_rules[slots].any()

    @on_share
    def draft(
        self, rows: RowBatch, slots: np.ndarray, num_draft_tokens: np.ndarray, num_candidates: int
    ) -> DraftTokens:
        """See core.ports.DraftLoop. Raises FaserError as Sampler.sample_draft, for the earliest step."""
        self._sampler.check_num_candidates(num_candidates)
        known = self._sampler.parameters
        starts = rows.context_lens + rows.rows_per_sequence + self._runner.num_ahead  # [A] of each chain's first token
        fed_at, fed_slots = step_places(rows, num_draft_tokens, self._runner.pool.kv_block_size)
        num_steps = fed_at.shape[0] + 1
        if num_steps > MAX_STEPS:
            raise ValueError(f"num_draft_tokens = {num_steps}: must be at most {MAX_STEPS}")
        num_tokens = int(fed_at.max(initial=0)) + 1
        bounds = self._runner.shapes.of_decode(rows.num_sequences, num_tokens)
        chain = self._chains.get(ChainShape(bounds, num_candidates, bool(known.has_filters[slots].any())))
        parameters = packed_parameters(known, slots, starts, bounds.num_sequences)
        plan = plan_of(parameters, fed_at, fed_slots)
        num_columns = -(-num_tokens // self._runner.pool.kv_block_size)
        # Behind what the draft had not seen of each sequence.
        drawn = chain.run(*self._runner.run_unseen(rows), plan, rows.block_tables[:, :num_columns], num_steps)
        packed = to_host(drawn)[0][:, : slots.size]  # [K, A, 1 + C]
        return _checked(packed, slots, starts, num_draft_tokens, num_candidates)


def step_places(rows: RowBatch, num_draft_tokens: np.ndarray, kv_block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Where step k = 1, ... feeds token k - 1 of each chain: positions and flat slots, both [K - 1, A] int64; behind
    the rows, whatever positions these say that their tokens have.

    A chain that has ended stays where it was and writes nothing: it goes on reading what has been written.
    """
    starts = rows.context_lens + rows.rows_per_sequence
    steps = np.arange(1, int(num_draft_tokens.max()))[:, None]
    positions = starts + np.minimum(steps, num_draft_tokens - 1) - 1
    block, offset = np.divmod(positions, kv_block_size)
    slots = rows.block_tables[np.arange(starts.size), block] * kv_block_size + offset
    return positions, np.where(steps < num_draft_tokens, slots, NO_SLOT)


def plan_of(parameters: np.ndarray, positions: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """[PLAN_HEIGHT, num_sequences] int64: parameters [NUM_WORDS, num_sequences], positions and slots [K - 1, A], a
    column per sequence, and the number of the step, 0. Sequences that pad feed position 0 and write nothing."""
    plan = np.zeros((PLAN_HEIGHT, parameters.shape[1]), np.int64)
    num_fed, count = positions.shape
    plan[:NUM_WORDS] = parameters
    steps = plan[_STEPS:-1].reshape(MAX_STEPS, 2, -1)
    steps[:, 1] = NO_SLOT
    steps[:num_fed, 0, :count] = positions
    steps[:num_fed, 1, :count] = slots
    return plan


class _Chain:
    """The tensors and the graphs of one shape: that of a chain's first draw, and that of every further step."""

    def __init__(self, shape: ChainShape, runner: CudaRunner, noise: TorchNoise, *, captures: bool) -> None:
        self._shape = shape
        self._noise = noise
        self._call = runner.prepare_decode(shape.bounds)
        size, device = shape.bounds.num_sequences, self._call.tensors["logits"].device
        self._plan = torch.zeros((PLAN_HEIGHT, size), dtype=torch.int64, device=device)
        self._step = self._plan[-1, :1]
        num_words = 1 + max(shape.num_candidates, 1)
        # What `draw_draft` packs of each step: [MAX_STEPS, A, 1 + max(C, 1)] int64
        self._drawn = torch.zeros((MAX_STEPS, size, num_words), dtype=torch.int64, device=device)
        self._filtered = torch.arange(size, device=device) if shape.has_filters else None
        capturer = runner.capturer if captures else None
        self._start = RepeatedLaunch(self._draw, capturer, f"the first draw of {shape}")
        self._advance = RepeatedLaunch(self._queue_step, capturer, f"a step of {shape}")

    def run(
        self,
        first_logits: torch.Tensor,
        first_hidden: torch.Tensor | None,
        plan: np.ndarray,
        tables: np.ndarray,
        num_steps: int,
    ) -> torch.Tensor:
        """Queues the whole chain. first_logits: [A, V]; first_hidden: [A, hidden_size], of a draft head. Returns what
        was drawn, [num_steps, A, 1 + max(C, 1)]."""
        logits = self._call.tensors["logits"]
        if first_logits.data_ptr() != logits.data_ptr():  # calls of one model put them at the same place
            logits[: first_logits.shape[0]].copy_(first_logits)
        if first_hidden is not None:
            self._call.tensors["hidden"][: first_hidden.shape[0]].copy_(first_hidden)
        self._call.fill_tables(tables)
        copy_to_device(plan, self._plan)
        self._start()
        for _ in range(1, num_steps):
            self._advance()
        return self._drawn[:num_steps]

    def warm_up(self) -> None:
        """Captures both graphs, with a plan that writes nothing."""
        size = self._shape.bounds.num_sequences
        nothing = np.zeros((0, size), np.int64)
        plan = plan_of(np.zeros((NUM_WORDS, size), np.int64), nothing, nothing)
        plan[3] = 1  # top-k: no filter takes less
        for _ in range(2):
            self.run(self._call.tensors["logits"], None, plan, np.zeros((size, 1), np.int64), 3)

    def _queue_step(self) -> None:
        tensors = self._call.tensors
        tensors["token_ids"].copy_(self._drawn.index_select(0, self._step)[0, :, 1])
        fed = self._plan[_STEPS:-1].view(MAX_STEPS, 2, -1).index_select(0, self._step)[0]
        tensors["positions"].copy_(fed[0])
        tensors["context_lens"].copy_(fed[0])
        tensors["slot_mapping"].copy_(fed[1])
        self._step.add_(1)
        self._call.launch()
        self._draw()

    def _draw(self) -> None:
        rows = unpacked(self._plan[:NUM_WORDS])
        rows = rows._replace(positions=rows.positions + self._step)
        scores = perturbed(self._call.tensors["logits"], rows, self._noise, self._filtered)
        drawn = draw_draft(scores, rows.inverse_temperature, self._shape.num_candidates)
        self._drawn.index_copy_(0, self._step, drawn[None])


def _checked(
    packed: np.ndarray, slots: np.ndarray, starts: np.ndarray, num_draft_tokens: np.ndarray, num_candidates: int
) -> DraftTokens:
    """From packed [K, A, 1 + C]: tokens [A, K], margins [A, K], candidates [A, K, C] or None."""
    num_steps, count = packed.shape[:2]
    draws = unpacked_draws(packed.reshape(num_steps * count, -1))
    best, margins = draws.best.reshape(num_steps, count), draws.margins.reshape(num_steps, count)
    is_drawn = np.arange(num_steps)[:, None] < num_draft_tokens
    if not np.isfinite(best[is_drawn]).all():
        for step in range(num_steps):
            drawn = np.flatnonzero(is_drawn[step])
            nothing = np.zeros(drawn.size, np.int64)
            rows = SamplingRows(slots[drawn], starts[drawn] + step, drawn, nothing, nothing[:, None])
            check_finite(best[step, drawn], rows, None)
    ids = draws.ids.reshape(num_steps, count, -1).swapaxes(0, 1)
    return DraftTokens(ids[:, :, 0], margins.T, ids if num_candidates else None)
