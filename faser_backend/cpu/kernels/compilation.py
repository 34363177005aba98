"""Compiles the CPU's kernels by numba, once per CPU, stores them on disk, and logs that the caller waits."""

from __future__ import annotations

import fcntl
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
warn_once = cache(logger.warning)  # per text: a process may compile several kernels


class _Compilations(event.Listener):
    """Logs the compilation of a kernel that is not on disk."""

    def on_start(self, event: event.Event) -> None:
        warn_once("compiling kernels for this CPU, which later starts load from disk")

    def on_end(self, event: event.Event) -> None:
        """Nothing is logged at the end."""


class InnerLibrary(JITCodeLibrary):
    """The code of a function that only kernels call: it is linked into them, and only whole kernels are optimised.

    numba would also optimise and translate each function by itself, which takes longer than all the rest.
    """

    def finalize(self) -> None:
        for library in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Returns zero: Python cannot call this function."""
        return 0

    @property
    def codegen(self) -> InnerLibrary:
        return self

    def set_env(self, env_name: str, env: Any) -> None:
        """Does nothing: kernels read no globals of Python."""


class InnerCompiler(Compiler):
    """numba's compiler, writing into an InnerLibrary."""

    def compile_extra(self, func: Callable) -> Any:
        if self.state.library is None:
            self.state.library = InnerLibrary(self.state.targetctx.codegen(), func.__qualname__)
            self.state.library.enable_object_caching()
        return super().compile_extra(func)


# Options of functions that only kernels call: no wrappers for Python, and no reference counts of arrays, which would
# take as long as the arithmetic of a few rows. A function that returns an array cannot be called without reference
# counts, so it is inlined by numba (`spliced` in rows.py).
WITHIN_KERNELS: Any = {
    "error_model": "numpy",
    "_nrt": False,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "pipeline_class": InnerCompiler,
}


def source_stamp() -> int:
    """Returns a number that changes with every file of this folder, and with the use of matrix units.

    A kernel refers to it, because numba stores a kernel by its own file and the CPU, not by the files it calls into.
    """
    sources = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    return zlib.crc32(sources, has_matrix_units()) & 0x7FFFFFFF


def compile_kernel(kernel: Kernel, signature: Any) -> Kernel:
    """Loads the kernel for this signature from disk, or compiles it, which is logged once.

    It releases the interpreter's lock. It must refer to source_stamp().
    """
    options = {"nogil": True, "error_model": "numpy", "_nrt": False}
    constants = [cell.cell_contents for cell in kernel.__closure__ or ()]
    key = zlib.crc32(repr((kernel.__qualname__, constants, signature)).encode())
    with event.install_listener("numba:compile", _Compilations()):
        try:
            compiled = numba.njit(cache=True, **options)(kernel)
            with (Path(str(compiled.stats.cache_path)) / f"{key:08x}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # other processes wait for the kernel and load it
                compiled.compile(signature)
            compiled.disable_compile()
            return compiled
        except (RuntimeError, OSError) as error:  # no directory to write to, or no room in it
            warn_once(f"every process compiles the kernels again; set NUMBA_CACHE_DIR to a lasting directory ({error})")
            return numba.njit(signature, **options)(kernel)
