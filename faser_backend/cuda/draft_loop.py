"""`TorchDraftLoop`: drafts chains of tokens without the host between them; implements core.ports.DraftLoop.

The host uploads one plan for all steps (positions, slot mapping, lengths, sampling parameters); each step reads its
tokens from the step before on the device. A step is one CUDA graph that counts steps on the device, so graphs differ in
their number of sequences but not in the length of chains. The drawn tokens return in one copy. On a torch CPU device
the same steps run eagerly. Tokens, noise and margins equal those of TorchSampler.sample_draft, step by step.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np
import torch

from faser_backend.core.batch import RowBatch
from faser_backend.core.ports import DraftTokens
from faser_backend.cuda.buffers import NO_SLOT, to_host, upload
from faser_backend.cuda.call_shapes import MAX_GRAPH_ROWS, CallBounds
from faser_backend.cuda.graphs import CallCache, GraphCapturer, RepeatedLaunch
from faser_backend.cuda.runner import CudaRunner
from faser_backend.cuda.sampler import (
    NUM_WORDS,
    TorchNoise,
    TorchSampler,
    draw_draft,
    packed_parameters,
    perturbed,
    unpacked,
    unpacked_draws,
)
from faser_backend.cuda.segment import PreparedCall
from faser_backend.cuda.streams import on_share

MAX_STEPS = 64  # draft tokens of a chain
_STEPS = NUM_WORDS  # the first row of a plan's positions and slot mapping
PLAN_HEIGHT = NUM_WORDS + 2 * MAX_STEPS + 1  # the last row is the index of the step


class ChainShape(NamedTuple):
    """The sizes that the graphs of a chain fix."""

    bounds: CallBounds  # of a step
    num_candidates: int  # C; 0 = none wanted
    has_filters: bool


class TorchDraftLoop:
    """Drafts with one runner, on the stream of its share, on any thread. Closing the runner frees its graphs."""

    def __init__(self, runner: CudaRunner, sampler: TorchSampler) -> None:
        self._runner = runner
        self.on_share = runner.on_share
        self._sampler = sampler
        self._steps = CallCache[CallBounds, PreparedCall](lambda bounds, _: runner.prepare_decode(bounds))
        self._chains = CallCache[ChainShape, _Chain](
            lambda shape, is_kept: _Chain(
                shape, self._steps[shape.bounds], runner.capturer if is_kept else None, sampler.noise
            )
        )
        runner.clear_at_close(self._chains.clear)
        runner.clear_at_close(self._steps.clear)

    @on_share
    def capture_menu(self, max_num_seqs: int, num_candidates: int) -> None:
        """Captures the steps of all chains of up to max_num_seqs sequences, with filters and without.

        num_candidates: the number that a policy may request, or 0. It writes no pool.
        """
        counts = [0, num_candidates] if num_candidates else [0]
        sizes = product(range(1, min(max_num_seqs, MAX_GRAPH_ROWS) + 1), (1, self._runner.spec.max_context))
        known = dict.fromkeys(self._runner.shapes.of_decode(*size) for size in sizes)
        for shape in product([*known][::-1], counts, (False, True)):  # the largest first: others reuse its memory
            self._chains[ChainShape(*shape)].warm_up()

    def can_draft(self, slots: np.ndarray) -> bool:
        """See core.ports.DraftLoop. Rules need the host before each draw; larger steps cannot share their logits."""
        return slots.size <= MAX_GRAPH_ROWS and not self._sampler.has_rules(slots)

    @on_share
    def draft(
        self, rows: RowBatch, slots: np.ndarray, num_draft_tokens: np.ndarray, num_candidates: int
    ) -> DraftTokens:
        known = self._sampler.parameters
        starts = rows.context_lens + rows.rows_per_sequence + self._runner.num_ahead  # [A] of each chain's first token
        fed_at, slot_mapping = step_positions(rows, num_draft_tokens, self._runner.pool.kv_block_size)
        num_steps = fed_at.shape[0] + 1
        num_tokens = int(fed_at.max(initial=0)) + 1
        bounds = self._runner.shapes.of_decode(rows.num_sequences, num_tokens)
        chain = self._chains[ChainShape(bounds, num_candidates, bool(known.has_filters[slots].any()))]
        parameters = packed_parameters(known, slots, starts, bounds.num_rows)
        plan = plan_of(parameters, fed_at, slot_mapping)
        num_columns = -(-num_tokens // self._runner.pool.kv_block_size)
        # The first draw follows the rows that the draft had not seen.
        drawn = chain.run(*self._runner.run_unseen(rows), plan, rows.block_tables[:, :num_columns], num_steps)
        packed = to_host(drawn, behind=self._sampler.behind)[0][:, : slots.size]  # [K, A, 1 + C]
        return _unpacked(packed, num_candidates)


def step_positions(rows: RowBatch, num_draft_tokens: np.ndarray, kv_block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the KV positions and the slot mapping of token k - 1 of each chain in step k >= 1, [K - 1, A] int64 both.

    They follow the rows' KV positions. A chain that has ended keeps its position and writes nothing.
    """
    starts = rows.context_lens + rows.rows_per_sequence
    steps = np.arange(1, int(num_draft_tokens.max()))[:, None]
    positions = starts + np.minimum(steps, num_draft_tokens - 1) - 1
    block, offset = np.divmod(positions, kv_block_size)
    slot_mapping = rows.block_tables[np.arange(starts.size), block] * kv_block_size + offset
    return positions, np.where(steps < num_draft_tokens, slot_mapping, NO_SLOT)


def plan_of(parameters: np.ndarray, positions: np.ndarray, slot_mapping: np.ndarray) -> np.ndarray:
    """Returns a plan [PLAN_HEIGHT, num_rows] int64, with a column per row, of which each sequence has one.

    Its rows are parameters [NUM_WORDS, num_rows], positions and slot_mapping [K - 1, A], and the step's index, 0.
    Padding rows have position 0 and write nothing.
    """
    plan = np.zeros((PLAN_HEIGHT, parameters.shape[1]), np.int64)
    num_fed, count = positions.shape
    plan[:NUM_WORDS] = parameters
    steps = plan[_STEPS:-1].reshape(MAX_STEPS, 2, -1)
    steps[:, 1] = NO_SLOT
    steps[:num_fed, 0, :count] = positions
    steps[:num_fed, 1, :count] = slot_mapping
    return plan


class _Chain:
    """The tensors of one shape and its two graphs: a chain's first draw, and a further step."""

    def __init__(
        self, shape: ChainShape, step: PreparedCall, capturer: GraphCapturer | None, noise: TorchNoise
    ) -> None:
        """step: the draft's call, which chains of the same bounds share."""
        self._shape = shape
        self._noise = noise
        self._call = step
        size, device = shape.bounds.num_rows, self._call.tensors["logits"].device
        self._plan = torch.zeros((PLAN_HEIGHT, size), dtype=torch.int64, device=device)
        self._step = self._plan[-1, :1]
        num_words = 1 + max(shape.num_candidates, 1)
        # The packed draws of each step: [MAX_STEPS, A, 1 + max(C, 1)] int64
        self._drawn = torch.zeros((MAX_STEPS, size, num_words), dtype=torch.int64, device=device)
        self._filtered = torch.arange(size, device=device) if shape.has_filters else None
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
        """Queues the whole chain and returns its packed draws, [num_steps, A, 1 + max(C, 1)].

        first_logits: [A, V]; first_hidden: [A, hidden_size], for a draft head.
        """
        logits = self._call.tensors["logits"]
        if first_logits.data_ptr() != logits.data_ptr():  # calls of one model share a logits buffer
            logits[: first_logits.shape[0]].copy_(first_logits)
        if first_hidden is not None:
            self._call.tensors["hidden"][: first_hidden.shape[0]].copy_(first_hidden)
        self._call.fill_tables(tables)
        upload(self._plan.view(-1).view(torch.uint8), lambda area: np.copyto(area, plan.reshape(-1).view(np.uint8)))
        self._start()
        for _ in range(1, num_steps):
            self._advance()
        return self._drawn[:num_steps]

    def warm_up(self) -> None:
        """Captures both graphs, with a plan that writes nothing."""
        size = self._shape.bounds.num_rows
        nothing = np.zeros((0, size), np.int64)
        plan = plan_of(np.zeros((NUM_WORDS, size), np.int64), nothing, nothing)
        plan[3] = 1  # the least valid top-k
        for _ in range(2):
            self.run(self._call.tensors["logits"], None, plan, np.zeros((1, 1), np.int64), 3)

    def _queue_step(self) -> None:
        tensors = self._call.tensors
        tensors["token_ids"].copy_(self._drawn.index_select(0, self._step)[0, :, 1])
        fed = self._plan[_STEPS:-1].view(MAX_STEPS, 2, -1).index_select(0, self._step)[0]
        tensors["positions"].copy_(fed[0])
        tensors["context_lens"].copy_(fed[0, : self._shape.bounds.num_sequences])
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


def _unpacked(packed: np.ndarray, num_candidates: int) -> DraftTokens:
    """Unpacks [K, A, 1 + C] to tokens [A, K], margins [A, K] and candidates [A, K, C] or None."""
    num_steps, count = packed.shape[:2]
    draws = unpacked_draws(packed.reshape(num_steps * count, -1))
    draws.neutralise()
    margins = draws.margins.reshape(num_steps, count)
    ids = draws.ids.reshape(num_steps, count, -1).swapaxes(0, 1)
    return DraftTokens(ids[:, :, 0], margins.T, ids if num_candidates else None)
