"""A barrier between the threads of one kernel call, without the interpreter.

A thread spins first, because the others are a few microseconds behind. Then it yields its core, so that a thread that
lost its core can go on.
"""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from faser_backend.cpu.kernels.compilation import WITHIN_KERNELS
from faser_backend.cpu.kernels.vectors import INT32

ARRIVED, GENERATION, TAKEN = 0, 8, 16  # indices into a barrier's state, on different cache lines
STATE_SIZE = 24
SPINS_BEFORE_YIELD = 4000  # some 20 us


def barrier_state() -> np.ndarray:
    """Returns the state of a new barrier, [STATE_SIZE] int64."""
    return np.zeros(STATE_SIZE, np.int64)


def _address(context, builder, signature, arguments):
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.gep(array.data, [arguments[1]])


@intrinsic
def fetch_add(_typing, state, index, amount):
    """Adds to state[index] atomically and returns the value before."""

    def emit(context, builder, signature, arguments):
        return builder.atomic_rmw("add", _address(context, builder, signature, arguments), arguments[2], "seq_cst")

    return numba.int64(state, numba.int64, numba.int64), emit


@intrinsic
def load_acquire(_typing, state, index):
    """Loads state[index]; everything that its writer wrote before is visible then."""

    def emit(context, builder, signature, arguments):
        return builder.load_atomic(_address(context, builder, signature, arguments), "acquire", 8)

    return numba.int64(state, numba.int64), emit


@intrinsic
def store_release(_typing, state, index, value):
    """Stores state[index] = value after everything that this thread wrote before."""

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
def take_item(state):
    """Returns the next item of the work between two barriers: 0, 1, ... over all threads.

    Each thread takes items until it gets one beyond the last. The next barrier_wait resets the count, because no thread
    takes items while the last one arrives; so only one list of items fits between two barriers, and a call's first list
    comes after its first barrier.
    """
    return fetch_add(state, TAKEN, 1)  # pyright: ignore[reportCallIssue]


@numba.njit(**WITHIN_KERNELS)
def barrier_wait(state, num_threads):
    """Returns when num_threads threads have called it; all can then read what each wrote before."""
    if num_threads == 1:
        state[TAKEN] = 0
        return
    generation = load_acquire(state, GENERATION)  # pyright: ignore[reportCallIssue]
    if fetch_add(state, ARRIVED, 1) == num_threads - 1:  # pyright: ignore[reportCallIssue]
        store_release(state, TAKEN, 0)  # pyright: ignore[reportCallIssue]
        store_release(state, ARRIVED, 0)  # pyright: ignore[reportCallIssue]
        store_release(state, GENERATION, generation + 1)  # pyright: ignore[reportCallIssue]
        return
    spins = 0
    while load_acquire(state, GENERATION) == generation:  # pyright: ignore[reportCallIssue]
        spins += 1
        if spins > SPINS_BEFORE_YIELD:
            yield_core()  # pyright: ignore[reportCallIssue]
