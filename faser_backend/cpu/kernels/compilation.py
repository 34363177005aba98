"""Compiles the CPU's kernels by numba, once per CPU, stores them on disk, and logs that the caller waits."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import pickle
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache, NullCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.serialize import dumps

from faser_backend.cpu.kernels.matrix_units import has_matrix_units

Kernel = Callable[..., None]
f32 = {num_dims: numba.types.Array(numba.float32, num_dims, "C") for num_dims in (1, 2, 3)}
i32 = {num_dims: numba.types.Array(numba.int32, num_dims, "C") for num_dims in (1, 2)}
i64 = {num_dims: numba.types.Array(numba.int64, num_dims, "C") for num_dims in (1, 2)}
logger = logging.getLogger("faser.loading")
warn_once = cache(logger.warning)  # per text: a process may compile several kernels


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
    """Returns a number that changes with every file of this folder."""
    sources = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    return zlib.crc32(sources)


class KernelCache(FunctionCache):
    """A kernel's own file on disk: its code behind a hash of it and of all that it depends on.

    numba's cache numbers its files in an index. After a full disk, or when two processes store kernels at once, the
    index can name another kernel's file, which is run; a file that is cut short ends every later start.
    """

    def __init__(self, kernel: Kernel, key: str) -> None:
        """key: names the kernel among those of its function. Raises RuntimeError if no directory is writable."""
        super().__init__(kernel)
        self._key = key
        self.path = Path(self.cache_path, f"{self._impl.filename_base}.{zlib.crc32(key.encode()):08x}.nbc")

    def _digest(self, code: bytes) -> bytes:
        versions = self._key, source_stamp(), self._impl.locator.get_source_stamp(), numba.__version__
        return hashlib.sha256(repr(versions).encode() + code).digest()

    def _load_overload(self, sig: Any, target_context: Any) -> Any:
        stored = self.path.read_bytes() if self.path.exists() else b""
        code = stored[hashlib.sha256().digest_size :]
        if not stored.startswith(self._digest(code)):
            warn_once("compiling kernels for this CPU, which later starts load from disk")
            return None
        return self._impl.rebuild(target_context, pickle.loads(code))

    def _save_overload(self, sig: Any, data: Any) -> None:
        if self._impl.check_cachable(data):
            code = dumps(self._impl.reduce(data))
            with self._cache_file._open_for_write(str(self.path)) as file:
                file.write(self._digest(code) + code)


def compile_kernel(kernel: Kernel, signature: Any) -> Kernel:
    """Loads the kernel for this signature from disk, or compiles it, which is logged once.

    It releases the interpreter's lock.
    """
    options: Any = {"nogil": True, "error_model": "numpy", "_nrt": False}
    compiled: Any = numba.njit(**options)(kernel)
    constants = [cell.cell_contents for cell in kernel.__closure__ or ()]
    key = repr((constants, signature, compiled.targetctx.codegen().magic_tuple(), has_matrix_units()))
    try:
        compiled._cache = cache = KernelCache(kernel, key)
        with cache.path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # other processes wait for the kernel and load it
            compiled.compile(signature)
    except (RuntimeError, OSError) as error:  # no directory to write to, or no room in it
        warn_once(f"every process compiles the kernels again; set NUMBA_CACHE_DIR to a lasting directory ({error})")
        compiled._cache = NullCache()
        compiled.compile(signature)  # does nothing if the kernel could only not be stored
    compiled.disable_compile()
    return compiled
