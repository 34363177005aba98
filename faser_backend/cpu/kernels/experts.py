# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""Mixture of experts on a CPU: the part of a segment's kernel that replaces the MLP, as engines.decoder defines it.

An assignment is a pair of a row and an expert that the row chose. Assignments are sorted by expert, so an expert's
weights are read once for all its rows, and not at all without rows. Threads share the columns of every expert. Four
barriers per layer follow the router's logits, the choices, the activations and the outputs.

A row's bits depend on the row alone: products guarantee it (`products`), shares are a function of the row's logits,
and outputs are added in the order of the row's choices, best first.
"""

from __future__ import annotations

import numba
import numpy as np
from numba.misc.special import literally

from faser_backend.cpu.kernels.compilation import WITHIN_KERNELS, f32, i32
from faser_backend.cpu.kernels.layouts import FORMATS, LANES
from faser_backend.cpu.kernels.products import NO_BIAS, REPLACES, multiply, pack, share_of
from faser_backend.cpu.kernels.rows import LOG2_E, exp2, gated_silu, inlined, inlined_reassociated
from faser_backend.cpu.kernels.threads import barrier_wait
from faser_backend.cpu.kernels.vectors import copy_row

# Indices of a layer's matrices, after those of attention: the router, then three per expert.
ROUTER, FIRST_EXPERT = 4, 5
GATE, UP, DOWN = range(3)
NUM_MATRICES_OF_EXPERT = 3
ROUTER_FORMAT = FORMATS.index("fp32")
CHOSEN = np.float32(-1)  # replaces the probability of a chosen expert

# K = experts that a row chooses of E; A = T * K assignments. The first four are shared, the others per thread.
ROUTING = numba.types.Tuple([
    f32[2],  # probs [T, E]: the router's logits, then their softmax
    f32[2],  # shares [T, K]
    i32[2],  # chosen [T, K]: experts, best first
    f32[2],  # outputs [A, D]
    f32[2],  # taken [T, D]: the rows of one expert
    f32[1],  # packed: the inputs of one expert's products, see products.pack
    i32[1],  # ends [E]: where an expert's assignments end
    i32[2],  # order [T, K]: indices of a row's assignments
    i32[1],  # rows [A]: the row of each assignment
])  # fmt: skip


@numba.njit(**WITHIN_KERNELS)
def mix_experts(code, hidden, gate, up, normed, own, routing, num_rows, crew, file, normalises):
    """Computes a thread's part of hidden += sum of share * expert(x), x being the normalised rows; ends at a barrier.

    gate, up [A, I] and the arrays of `routing` are work space. normalises: 1 to scale shares to a sum of 1.
    """
    code = literally(code)
    thread, num_threads, barrier, _ = crew
    probs, shares, chosen, outputs, taken, packed, ends, order, rows = routing
    num_experts, width, inner = probs.shape[1], hidden.shape[1], gate.shape[1]
    multiply(ROUTER_FORMAT, probs, normed, packed, own[ROUTER], NO_BIAS, REPLACES, num_rows, crew, file)
    barrier_wait(barrier, num_threads)
    for row in range(thread, num_rows, num_threads):
        choose(probs[row], shares[row], chosen[row], normalises > 0)
    barrier_wait(barrier, num_threads)
    sort_assignments(ends, order, rows, chosen, num_rows)

    first, last = share_of(inner, thread, num_threads)
    columns = slice(first * LANES, min(last * LANES, inner))
    begin = 0
    for expert in range(num_experts):
        end, at = ends[expert], FIRST_EXPERT + NUM_MATRICES_OF_EXPERT * expert
        if end > begin:
            for index in range(begin, end):
                copy_row(taken[index - begin], normed[rows[index]], width)  # pyright: ignore[reportCallIssue]
            pack(code, packed, taken, 0, end - begin)
            for out, matrix in ((gate, GATE), (up, UP)):
                multiply(code, out[begin:], taken, packed, own[at + matrix], NO_BIAS, REPLACES, end - begin, crew, file)
            for index in range(begin, end):
                gated_silu(gate[index, columns], up[index, columns])
        begin = end
    barrier_wait(barrier, num_threads)

    begin = 0
    for expert in range(num_experts):
        end, at = ends[expert], FIRST_EXPERT + NUM_MATRICES_OF_EXPERT * expert
        if end > begin:
            inputs, down = gate[begin:], own[at + DOWN]
            pack(code, packed, inputs, 0, end - begin)
            multiply(code, outputs[begin:], inputs, packed, down, NO_BIAS, REPLACES, end - begin, crew, file)
        begin = end
    first, last = share_of(width, thread, num_threads)
    for row in range(num_rows):
        for rank in range(chosen.shape[1]):
            share, output = shares[row, rank], outputs[order[row, rank]]
            for column in range(first * LANES, min(last * LANES, width)):
                hidden[row, column] += share * output[column]
    barrier_wait(barrier, num_threads)


@inlined
def choose(probs, shares, chosen, normalises):
    """Chooses one row's best experts, of equal ones the first, and their shares; probs become a softmax.

    Chosen experts are marked, so none is chosen twice, not even if probs are NaN.
    """
    num_experts = probs.size
    softmax(probs)
    total = np.float32(0)
    for rank in range(chosen.size):
        best = -1
        for expert in range(num_experts):
            if probs[expert] != CHOSEN and (best < 0 or probs[expert] > probs[best]):
                best = expert
        chosen[rank], shares[rank] = best, probs[best]
        total += probs[best]
        probs[best] = CHOSEN
    for rank in range(chosen.size):
        probs[chosen[rank]] = shares[rank]
        if normalises:
            shares[rank] /= total


@inlined_reassociated
def softmax(x):
    """Turns x into weights with sum 1. One that underflows becomes 1e-38, which changes no sum that holds a 1."""
    largest, total = x[0], np.float32(0)
    for i in range(x.size):
        largest = max(largest, x[i])
    for i in range(x.size):
        x[i] = exp2((x[i] - largest) * LOG2_E)  # pyright: ignore[reportCallIssue]
        total += x[i]
    for i in range(x.size):
        x[i] /= total


@inlined
def sort_assignments(ends, order, rows, chosen, num_rows):
    """Sorts the assignments of the first num_rows rows by expert, then by row."""
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
            index = ends[expert]
            order[row, rank] = index
            rows[index] = row
            ends[expert] = index + 1
