"""A barrier for compiled code: threads of one call meet without the interpreter.

Waiting is busy at first, for the other threads are a few microseconds behind; then the core is offered to
others, so that a thread that lost its core for a while costs its own time and no more.
"""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from faser_backend.cpu.kernels.compile import WITHIN_KERNELS

ARRIVED, GENERATION = 0, 8  # places in a barrier's state, of different cache lines
STATE_SIZE = 16
SPINS_BEFORE_YIELD = 4000  # some 20 us

INT32, INT64 = ir.IntType(32), ir.IntType(64)


def barrier_state() -> np.ndarray:
    """[STATE_SIZE] int64 of a barrier that nobody waits at."""
    return np.zeros(STATE_SIZE, np.int64)


def _address(context, builder, signature, arguments):
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.gep(array.data, [arguments[1]])


@intrinsic
def fetch_add(_typing, state, place, amount):
    """state[place] += amount, in one piece; returns what was there."""

    def emit(context, builder, signature, arguments):
        return builder.atomic_rmw("add", _address(context, builder, signature, arguments), arguments[2], "seq_cst")

    return numba.int64(state, numba.int64, numba.int64), emit


@intrinsic
def load_acquire(_typing, state, place):
    """state[place], and everything that its writer wrote before it."""

    def emit(context, builder, signature, arguments):
        return builder.load_atomic(_address(context, builder, signature, arguments), "acquire", 8)

    return numba.int64(state, numba.int64), emit


@intrinsic
def store_release(_typing, state, place, value):
    """state[place] = value, after everything that this thread wrote before."""

    def emit(context, builder, signature, arguments):
        builder.store_atomic(arguments[2], _address(context, builder, signature, arguments), "release", 8)
        return context.get_dummy_value()

    return numba.void(state, numba.int64, numba.int64), emit


@intrinsic
def yield_core(_typing):
    """Offers this core to another thread."""

    def emit(context, builder, signature, arguments):
        kind = ir.FunctionType(INT32, [])
        function = builder.module.globals.get("sched_yield") or ir.Function(builder.module, kind, "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return numba.void(), emit


@numba.njit(**WITHIN_KERNELS)
def barrier_wait(state, num_threads):
    """Returns when num_threads threads have called it; what each wrote before, all can read after."""
    if num_threads == 1:
        return
    generation = load_acquire(state, GENERATION)  # pyright: ignore[reportCallIssue]
    if fetch_add(state, ARRIVED, 1) == num_threads - 1:  # pyright: ignore[reportCallIssue]
        store_release(state, ARRIVED, 0)  # pyright: ignore[reportCallIssue]
        store_release(state, GENERATION, generation + 1)  # pyright: ignore[reportCallIssue]
        return
    spins = 0
    while load_acquire(state, GENERATION) == generation:  # pyright: ignore[reportCallIssue]
        spins += 1
        if spins > SPINS_BEFORE_YIELD:
            yield_core()  # pyright: ignore[reportCallIssue]
