"""`TorchDraftLoop`: chains of draft tokens without asking the host between them; implements core.ports.DraftLoop.

What the host knows before a chain begins (positions, slots, lengths, sampling parameters) it uploads as one plan for
all steps; what it does not know, the tokens, each step takes from the one before on the device. Drawing and the
steps are one CUDA graph per shape, and what was drawn comes back in one copy. On a torch CPU device the same steps
run eagerly. Tokens, noise and margins are those of the runner and TorchSampler.sample_draft in turn.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from faser_backend.core.batch import RowBatch, SamplingRows
from faser_backend.core.ports import DraftTokens
from faser_backend.device.cuda.buffers import NO_SLOT
from faser_backend.device.cuda.choice import (
    NUM_WORDS,
    draw_draft,
    packed_parameters,
    perturbed,
    unpacked,
    unpacked_draws,
)
from faser_backend.device.cuda.graphs import CallCache, RepeatedLaunch
from faser_backend.device.cuda.noise import TorchNoise
from faser_backend.device.cuda.runner import CudaRunner
from faser_backend.device.cuda.sampler import TorchSampler
from faser_backend.device.cuda.segment import MIN_BLOCKS, CallBounds, bucketed_rows, clipped, power_of_two
from faser_backend.device.cuda.transfer import copy_to_device, to_host
from faser_backend.device.sampler import check_finite

MAX_CHAINS = 64  # shapes whose graphs are kept


class ChainShape(NamedTuple):
    """What is fixed under the graph of a chain."""

    num_sequences: int  # A, rounded up
    num_blocks: int  # MB, columns of the block table, rounded up
    num_steps: int  # K, tokens of the longest chain
    num_candidates: int  # C; 0 = none wanted
    is_random: bool  # else no row has noise
    has_filters: bool

    @property
    def plan_height(self) -> int:
        return NUM_WORDS + 2 * (self.num_steps - 1) + self.num_blocks


class TorchDraftLoop:
    """Drafts with one runner, on the calling thread's current stream, which is that of the runner's share."""

    def __init__(self, runner: CudaRunner, sampler: TorchSampler) -> None:
        self._runner = runner
        self._sampler = sampler
        is_cuda = sampler.device.type == "cuda"
        self._chains = CallCache[ChainShape, _Chain](
            lambda shape: _Chain(shape, runner, sampler.noise), is_cuda=is_cuda, max_calls=MAX_CHAINS
        )
        runner.clear_at_close(self._chains.clear)

    def can_draft(self, slots: np.ndarray) -> bool:
        """See core.ports.DraftLoop: rules need the tokens before each draw on the host."""
        return not self._sampler.parameters.has_rules[slots].any()

    def draft(
        self, rows: RowBatch, slots: np.ndarray, num_draft_tokens: np.ndarray, num_candidates: int
    ) -> DraftTokens:
        """See core.ports.DraftLoop. Raises FaserError as Sampler.sample_draft, for the earliest step."""
        self._sampler.check_num_candidates(num_candidates)
        known = self._sampler.parameters
        starts = rows.context_lens + rows.rows_per_sequence  # [A] position of each chain's first token
        fed_at, fed_slots = step_places(rows, num_draft_tokens, self._runner.pool.kv_block_size)
        shape = ChainShape(
            *self._rounded(rows, fed_at),
            num_steps=fed_at.shape[0] + 1,
            num_candidates=num_candidates,
            is_random=bool(known.is_random[slots].any()),
            has_filters=bool(known.has_filters[slots].any()),
        )
        chain = self._chains.get(shape)
        parameters = packed_parameters(known, slots, starts, shape.num_sequences)
        chain.run(self._first_logits(rows), plan_of(shape, parameters, fed_at, fed_slots, rows.block_tables))
        packed = to_host(chain.drawn)[0][:, : slots.size]  # [K, A, 1 + C]
        return _checked(packed, slots, starts, num_draft_tokens, num_candidates)

    def _rounded(self, rows: RowBatch, fed_at: np.ndarray) -> tuple[int, int]:
        """A and MB, rounded up as far as the runner's programs allow."""
        count = rows.num_sequences
        num_blocks = int(fed_at.max(initial=0)) // self._runner.pool.kv_block_size + 1
        needed = CallBounds(count, count, 1, num_blocks, count, 0)
        size = bucketed_rows(count)
        rounded = CallBounds(size, size, 1, max(power_of_two(num_blocks), MIN_BLOCKS), size, 0)
        if self._runner.limits is not None:
            rounded = clipped(needed, rounded, self._runner.limits)
        return min(rounded.num_rows, rounded.num_sequences, rounded.num_logit_rows), rounded.num_blocks

    def _first_logits(self, rows: RowBatch) -> torch.Tensor:
        """[A, V], behind what the draft had not seen of each sequence."""
        output = self._runner.run_segment(0, rows, None)
        for segment in range(1, self._runner.num_segments):
            output = self._runner.run_segment(segment, rows, output)
        return output


def step_places(rows: RowBatch, num_draft_tokens: np.ndarray, kv_block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Where step k = 1, ... feeds token k - 1 of each chain: positions and flat slots, both [K - 1, A] int64.

    A chain that has ended stays where it was and writes nothing: it goes on reading what has been written.
    """
    starts = rows.context_lens + rows.rows_per_sequence
    steps = np.arange(1, int(num_draft_tokens.max()))[:, None]
    positions = starts + np.minimum(steps, num_draft_tokens - 1) - 1
    block, offset = np.divmod(positions, kv_block_size)
    slots = rows.block_tables[np.arange(starts.size), block] * kv_block_size + offset
    return positions, np.where(steps < num_draft_tokens, slots, NO_SLOT)


def plan_of(
    shape: ChainShape, parameters: np.ndarray, positions: np.ndarray, slots: np.ndarray, block_tables: np.ndarray
) -> np.ndarray:
    """[plan_height, num_sequences] int64: parameters [NUM_WORDS, num_sequences], positions and slots [K - 1, A],
    block tables [A, any], one column per sequence. Sequences that pad feed position 0 and write nothing."""
    plan = np.zeros((shape.plan_height, shape.num_sequences), np.int64)
    count, width = positions.shape[1], min(block_tables.shape[1], shape.num_blocks)
    plan[:NUM_WORDS] = parameters
    steps = plan[NUM_WORDS : NUM_WORDS + 2 * (shape.num_steps - 1)].reshape(-1, 2, shape.num_sequences)
    steps[:, 1] = NO_SLOT
    steps[:, 0, :count] = positions
    steps[:, 1, :count] = slots
    plan[shape.plan_height - shape.num_blocks :][:width, :count] = block_tables[:, :width].T
    return plan


class _Chain:
    """The tensors and the graph of one shape. `drawn` [K, A, 1 + max(C, 1)] int64 is what `draw_draft` packs."""

    def __init__(self, shape: ChainShape, runner: CudaRunner, noise: TorchNoise) -> None:
        self._shape = shape
        self._noise = noise
        self._call = runner.prepare_decode(shape.num_sequences, shape.num_blocks)
        device = self._call.tensors["logits"].device
        num_words = 1 + max(shape.num_candidates, 1)
        self._plan = torch.zeros((shape.plan_height, shape.num_sequences), dtype=torch.int64, device=device)
        self.drawn = torch.zeros((shape.num_steps, shape.num_sequences, num_words), dtype=torch.int64, device=device)
        self._filtered = torch.arange(shape.num_sequences, device=device) if shape.has_filters else None
        self._launch = RepeatedLaunch(self._queue, runner.capturer, f"drafting {shape}")

    def run(self, first_logits: torch.Tensor, plan: np.ndarray) -> None:
        """Queues the whole chain. first_logits: [A, V]."""
        logits = self._call.tensors["logits"]
        if first_logits.data_ptr() != logits.data_ptr():  # calls of one shape put them at the same place
            logits[: first_logits.shape[0]].copy_(first_logits)
        copy_to_device(plan, self._plan)
        self._launch()

    def _queue(self) -> None:
        tensors, shape = self._call.tensors, self._shape
        tensors["block_table"].copy_(self._plan[shape.plan_height - shape.num_blocks :].t())
        self._draw(0)
        for step in range(1, shape.num_steps):
            position, slot = self._plan[NUM_WORDS + 2 * (step - 1) : NUM_WORDS + 2 * step]
            tensors["token_ids"].copy_(self.drawn[step - 1, :, 1])
            tensors["positions"].copy_(position)
            tensors["context_lens"].copy_(position)
            tensors["slot_mapping"].copy_(slot)
            self._call.launch()
            self._draw(step)

    def _draw(self, step: int) -> None:
        scores, shape, inverse_temperature = self._call.tensors["logits"], self._shape, None
        if shape.is_random:
            rows = unpacked(self._plan[:NUM_WORDS])
            rows = rows._replace(positions=rows.positions + step)
            scores = perturbed(scores, rows, self._noise, self._filtered)
            inverse_temperature = rows.inverse_temperature
        self.drawn[step].copy_(draw_draft(scores, inverse_temperature, shape.num_candidates))


def _checked(
    packed: np.ndarray, slots: np.ndarray, starts: np.ndarray, num_draft_tokens: np.ndarray, num_candidates: int
) -> DraftTokens:
    """Of packed [K, A, 1 + C]: tokens [A, K], margins [A, K], candidates [A, K, C] or None."""
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
