"""Kernels of the CPU, compiled by numba once per CPU and kept on disk, with a line of log for the wait."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core import event
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler

from faser_backend.cpu.kernels.matrix_units import has_matrix_units

Kernel = Callable[..., None]
f32 = {num_dims: numba.types.Array(numba.float32, num_dims, "C") for num_dims in (1, 2, 3)}
i32 = {num_dims: numba.types.Array(numba.int32, num_dims, "C") for num_dims in (1, 2)}
i64 = {num_dims: numba.types.Array(numba.int64, num_dims, "C") for num_dims in (1, 2)}
logger = logging.getLogger("faser.loading")
warn_once = cache(logger.warning)  # per text: a process has a kernel for each head_dim


class _Compilations(event.Listener):
    """Listens for compilations of kernels that are not on disk."""

    def on_start(self, event: event.Event) -> None:
        warn_once("compiling kernels for this CPU, which later starts load from disk")

    def on_end(self, event: event.Event) -> None:
        """Other things follow at once."""


class InnerLibrary(JITCodeLibrary):
    """The code of a function that kernels alone call. It is handed to them as it is, once its functions have been
    tidied up one by one: they are optimised as wholes, and machine code is made of them alone.

    numba would optimise and translate every function by itself as well, which takes longer than all that is needed.
    """

    def finalize(self) -> None:
        for library in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Zero, numba's word for a function that Python cannot call."""
        return 0

    @property
    def codegen(self) -> InnerLibrary:
        return self

    def set_env(self, env_name: str, env: Any) -> None:
        """numba would write Python's globals to where machine code finds them."""


class InnerCompiler(Compiler):
    """numba's compiler with an InnerLibrary in the place of its own."""

    def compile_extra(self, func: Callable) -> Any:
        if self.state.library is None:
            self.state.library = InnerLibrary(self.state.targetctx.codegen(), func.__qualname__)
            self.state.library.enable_object_caching()
        return super().compile_extra(func)


# Options of functions that kernels alone call: no wrappers for others, and arrays whose references nobody counts, which
# would take as long as the arithmetic of a few rows. What returns an array is spliced in: it cannot be called without
# counting.
WITHIN_KERNELS: Any = {
    "error_model": "numpy",
    "_nrt": False,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "pipeline_class": InnerCompiler,
}


def source_stamp() -> int:
    """A number that changes with every file of the CPU's kernels, and with whether matrix units are used: numba keeps a
    kernel on disk by its own file, the CPU and what it refers to, not by the files of what it calls."""
    room = Path(__file__).parent
    files = sorted([*room.glob("host_*.py"), *room.glob("row_*.py")])
    sources = b"".join(file.read_bytes() for file in files)
    return zlib.crc32(sources, has_matrix_units()) & 0x7FFFFFFF


def compile_kernel(kernel: Kernel, signature: Any) -> Kernel:
    """The kernel for arguments of this signature: from disk, or compiled now, which is logged once.

    It runs without the interpreter's lock, and refers to source_stamp().
    """
    options = {"nogil": True, "error_model": "numpy", "_nrt": False}
    with event.install_listener("numba:compile", _Compilations()):
        try:
            return numba.njit(signature, cache=True, **options)(kernel)
        except (RuntimeError, OSError) as error:  # no directory to write to, or no room in it
            warn_once(
                f"kernels are compiled anew in every process; NUMBA_CACHE_DIR can name where to keep them ({error})"
            )
            return numba.njit(signature, **options)(kernel)
