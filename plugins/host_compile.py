"""Kernels of the CPU, compiled by numba once per CPU and kept on disk, with a word to who waits for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from threading import Timer
from typing import Any

import numba

Kernel = Callable[..., None]
SECONDS_UNSAID = 1.0  # a kernel from disk is there by then
logger = logging.getLogger(__name__)
warn_once = cache(logger.warning)  # per text: a process has a kernel for each head_dim


def compile_kernel(kernel: Kernel, signature: Any) -> Kernel:
    """The kernel for arguments of this signature: from disk, or compiled now, which is logged where it takes long.

    It runs without the interpreter's lock. numba keeps a kernel by its file and by what it refers to, not by the files
    of what it calls: it has to refer to a number that changes with those.
    """
    options = {"nogil": True, "error_model": "numpy", "_nrt": False}
    note = Timer(
        SECONDS_UNSAID, logger.warning, ["compiling kernels for this CPU: 10 to 20 seconds, the first time only"]
    )
    note.daemon = True
    note.start()
    try:
        return numba.njit(signature, cache=True, **options)(kernel)
    except (RuntimeError, OSError) as error:  # no directory to write to, or no room in it
        warn_once(f"kernels are compiled anew in every process; NUMBA_CACHE_DIR can name where to keep them ({error})")
        return numba.njit(signature, **options)(kernel)
    finally:
        note.cancel()
