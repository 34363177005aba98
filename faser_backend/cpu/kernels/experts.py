# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""A layer's experts on a CPU, of which every row takes a few: as engines.decoder mixes them, for a segment's kernel.

A choice of a row is a slot. Slots go in the order of their experts, so that an expert is read once for all rows that
chose it, and one that nobody chose is not read. Threads share out the columns of every expert, whichever was chosen,
and meet four times a layer: when the router's logits, the choices, the activations and the outputs are there.

A row's bits depend on the row alone: products say so of themselves (row_products), shares are a function of the row's
logits, and its outputs are added in the order of its choices, best first.
"""

from __future__ import annotations

import numba
import numpy as np
from numba.misc.special import literally

from faser_backend.cpu.kernels.attention import softmax
from faser_backend.cpu.kernels.compile import WITHIN_KERNELS, f32, i32
from faser_backend.cpu.kernels.layouts import FORMATS, LANES
from faser_backend.cpu.kernels.products import NO_BIAS, REPLACES, multiply, share_of
from faser_backend.cpu.kernels.rows import ONE, gated_silu, inlined, normalise_rows
from faser_backend.cpu.kernels.threads import barrier_wait
from faser_backend.cpu.kernels.vectors import copy_row

# Places of a layer's matrices behind those of attention: the router, then three of every expert.
ROUTER, FIRST_EXPERT = 4, 5
GATE, UP, DOWN = range(3)
NUM_MATRICES_OF_EXPERT = 3
ROUTER_FORMAT = FORMATS.index("fp32")
CHOSEN = np.float32(-1)  # in place of a chance

# K = experts that a row chooses of E; P = T * K slots. What threads share, then what each has of its own.
ROUTING = numba.types.Tuple([
    f32[2],  # chances [T, E]: the router's logits, then what a softmax makes of them
    f32[2],  # shares [T, K]
    i32[2],  # chosen [T, K]: experts, best first
    f32[2],  # outputs [P, D]
    f32[2],  # taken [T, D]: the rows of one expert
    i32[1],  # ends [E]: where the slots of an expert end
    i32[2],  # slots [T, K]
    i32[1],  # rows [P]: of each slot
])  # fmt: skip


@numba.njit(**WITHIN_KERNELS)
def mix_experts(code, hidden, gate, up, normed, own, norm, routing, num_rows, crew, file, eps, normalises):
    """A thread's share of hidden += the sum of share * expert(x), x being the normalised rows; ends at a barrier.

    gate and up [P, I] and what is in `routing` are work space; normalises: a row's shares are made to sum to 1.
    """
    code = literally(code)
    thread, num_threads, barrier = crew
    chances, shares, chosen, outputs, taken, ends, slots, rows = routing
    num_experts, width, inner = chances.shape[1], hidden.shape[1], gate.shape[1]
    normalise_rows(normed, hidden, norm, eps, num_rows)
    multiply(ROUTER_FORMAT, chances, normed, own[ROUTER], NO_BIAS, REPLACES, num_rows, crew, file)
    barrier_wait(barrier, num_threads)
    for row in range(thread, num_rows, num_threads):
        choose(chances[row], shares[row], chosen[row], normalises)
    barrier_wait(barrier, num_threads)
    sort_slots(ends, slots, rows, chosen, num_rows)

    first, last = share_of(inner, thread, num_threads)
    columns = slice(first * LANES, min(last * LANES, inner))
    begin = 0
    for expert in range(num_experts):
        end, at = ends[expert], FIRST_EXPERT + NUM_MATRICES_OF_EXPERT * expert
        if end > begin:
            for slot in range(begin, end):
                copy_row(taken[slot - begin], normed[rows[slot]], width)  # pyright: ignore[reportCallIssue]
            for out, matrix in ((gate, GATE), (up, UP)):
                multiply(code, out[begin:], taken, own[at + matrix], NO_BIAS, REPLACES, end - begin, crew, file)
            for slot in range(begin, end):
                gated_silu(gate[slot, columns], up[slot, columns])
        begin = end
    barrier_wait(barrier, num_threads)

    begin = 0
    for expert in range(num_experts):
        end, at = ends[expert], FIRST_EXPERT + NUM_MATRICES_OF_EXPERT * expert
        if end > begin:
            multiply(code, outputs[begin:], gate[begin:], own[at + DOWN], NO_BIAS, REPLACES, end - begin, crew, file)
        begin = end
    first, last = share_of(width, thread, num_threads)
    for row in range(num_rows):
        for rank in range(chosen.shape[1]):
            share, output = shares[row, rank], outputs[slots[row, rank]]
            for column in range(first * LANES, min(last * LANES, width)):
                hidden[row, column] += share * output[column]
    barrier_wait(barrier, num_threads)


@inlined
def choose(chances, shares, chosen, normalises):
    """The best experts of one row and their shares; of equal ones the first. chances become those of a softmax.

    What was chosen is marked meanwhile: no expert is chosen twice, not even where the chances are no numbers.
    """
    num_experts = chances.size
    softmax(chances, num_experts, num_experts, ONE)
    total = np.float32(0)
    for rank in range(chosen.size):
        best = -1
        for expert in range(num_experts):
            if chances[expert] != CHOSEN and (best < 0 or chances[expert] > chances[best]):
                best = expert
        chosen[rank], shares[rank] = best, chances[best]
        total += chances[best]
        chances[best] = CHOSEN
    for rank in range(chosen.size):
        chances[chosen[rank]] = shares[rank]
        if normalises:
            shares[rank] /= total


@inlined
def sort_slots(ends, slots, rows, chosen, num_rows):
    """Shares out the slots of the first num_rows rows: by expert, then by row."""
    for expert in range(ends.size):
        ends[expert] = 0
    for row in range(num_rows):
        for rank in range(chosen.shape[1]):
            ends[chosen[row, rank]] += 1
    begin = 0
    for expert in range(ends.size):
        count = ends[expert]
        ends[expert] = begin
        begin += count
    for row in range(num_rows):
        for rank in range(chosen.shape[1]):
            expert = chosen[row, rank]
            slot = ends[expert]
            slots[row, rank] = slot
            rows[slot] = row
            ends[expert] = slot + 1
