"""Imports TensorRT: `tensorrt` 10.16 or 11 ("full"), or TensorRT-RTX ("rtx").

TensorRT reports most errors only through its logger: a setter that refuses a value returns as if it had
taken it. So every stage ends with `ErrorLog.check`, which raises what was logged meanwhile.
The abilities of a version are read from its classes, never from its number.
"""

from __future__ import annotations

import importlib
from functools import cache
from threading import Lock
from typing import Any, Literal

from faser_backend.core.errors import FaserError

Flavour = Literal["rtx", "full"]
MODULES: dict[Flavour, tuple[str, ...]] = {"full": ("tensorrt",), "rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings")}
EXTRAS: dict[Flavour, str] = {"full": "tensorrt", "rtx": "tensorrt-rtx"}
OLDEST_GPU = 80  # TensorRT-RTX has no products in float32 for older ones
NO_DRIVER = "cudaError 35"  # without a driver, it is logged after every other failure too


class TensorRtError(FaserError):
    """An error for a missing TensorRT, or a stage that it refused; the message names the stage."""


class TensorRt:
    """An imported TensorRT: its module, its flavour and its abilities."""

    def __init__(self, module: Any, flavour: Flavour) -> None:
        self.module = module
        self.flavour: Flavour = flavour
        self.version = str(module.__version__)
        network, profile = module.INetworkDefinition, module.IOptimizationProfile
        self.has_plugins = hasattr(network, "add_plugin_v3")
        self.has_profile_streams = hasattr(profile, "profile_stream")
        self.has_engine_validity = hasattr(module.Runtime, "get_engine_validity")
        self.has_runtime_cache = hasattr(module, "IRuntimeCache")

    @property
    def title(self) -> str:
        """Name and version for messages and manifests, e.g. "TensorRT-RTX 1.7.1.116"."""
        return f"{'TensorRT-RTX' if self.flavour == 'rtx' else 'TensorRT'} {self.version}"

    @property
    def compute_capabilities(self) -> tuple[str, ...]:
        """The GPUs that engines can be built for ahead of time, e.g. ("8.0", "12.0"); empty: this machine's only."""
        if self.flavour == "full" or not hasattr(self.module, "ComputeCapability"):
            return ()
        numbers = sorted(int(name[2:]) for name in self.module.ComputeCapability.__members__ if name.startswith("SM"))
        return tuple(f"{number // 10}.{number % 10}" for number in numbers if number >= OLDEST_GPU)

    def check_built_by(self, compiler: str) -> None:
        """Raises TensorRtError if another TensorRT built the engines. compiler: its title."""
        if compiler != self.title:
            raise TensorRtError(
                f"engines were built by {compiler or 'no TensorRT'}, installed is {self.title}: build again"
            )


class ErrorLog:
    """A collector of errors; one may serve several builders and runtimes.

    `logger` is passed to TensorRT; `check` raises what was logged since the last check.
    """

    def __init__(self, tensorrt: TensorRt) -> None:
        self._lock = Lock()  # TensorRT logs from its own threads too
        self._errors: list[str] = []
        self.logger = _make_logger(tensorrt.module, self)

    def add(self, message: str) -> None:
        with self._lock:
            self._errors.append(message)

    def take_errors(self) -> list[str]:
        """Returns and clears the errors. A missing driver is left out if there are other errors."""
        with self._lock:
            errors, self._errors = self._errors, []
        return [error for error in errors if NO_DRIVER not in error] or errors

    def check(self, stage: str) -> None:
        """Raises TensorRtError naming the stage if an error was logged."""
        if errors := self.take_errors():
            raise TensorRtError(f"{stage}: {'; '.join(dict.fromkeys(errors))}")

    def fail(self, stage: str, otherwise: str) -> TensorRtError:
        """Returns the error of a stage without a result: what was logged, or `otherwise` if nothing was."""
        errors = self.take_errors()
        return TensorRtError(f"{stage}: {'; '.join(dict.fromkeys(errors)) or otherwise}")


@cache
def import_tensorrt(flavour: Flavour | None) -> TensorRt:
    """Imports the TensorRT of a flavour, which is not None: only a runtime of TensorRT has one.

    Raises TensorRtError naming the extra to install and why each module could not be imported.
    """
    assert flavour is not None, "the runtime has no TensorRT"
    reasons = []
    for name in MODULES[flavour]:
        try:
            return TensorRt(importlib.import_module(name), flavour)
        except (ImportError, OSError, RuntimeError, AttributeError) as error:  # bindings without their libraries
            reasons.append(f"{name}: {error}")
    wanted = "TensorRT-RTX" if flavour == "rtx" else "TensorRT"
    install = f"install it with pip install 'faser-backend[{EXTRAS[flavour]}]'"
    raise TensorRtError(f"{wanted} cannot be imported; {install} ({'; '.join(reasons)})")


def _make_logger(module: Any, log: ErrorLog) -> Any:
    """Makes an ILogger of this module. Its base class exists only once the module is imported."""

    class Logger(module.ILogger):
        def __init__(self) -> None:
            module.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity <= module.ILogger.ERROR:
                log.add(message)

    return Logger()
