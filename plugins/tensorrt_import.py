"""The one import of TensorRT: `tensorrt` 10.16 or 11 ("full"), or TensorRT-RTX ("rtx").

TensorRT reports most mistakes through its logger alone: a setter that refuses a value returns as if
it had taken it. So every stage ends with `ErrorLog.check`, which raises what was logged meanwhile.
What a version can do is asked of its classes, never read off its number.
"""

from __future__ import annotations

import importlib
from functools import cache
from threading import Lock
from typing import Any, Literal

from faser_backend.core.errors import FaserError

Flavour = Literal["rtx", "full"]
MODULES: dict[Flavour, tuple[str, ...]] = {
    "full": ("tensorrt",),
    "rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings"),
}
EXTRAS: dict[Flavour, str] = {"full": "tensorrt", "rtx": "tensorrt-rtx"}
NO_DRIVER = "cudaError 35"  # logged again after other failures on a machine without a driver


class TensorRtError(FaserError):
    """TensorRT is missing or refused something; the message names the stage."""


class TensorRt:
    """An imported TensorRT: its module, its flavour and what it can do."""

    def __init__(self, module: Any, flavour: Flavour) -> None:
        self.module = module
        self.flavour: Flavour = flavour
        self.version = str(module.__version__)
        network, profile = module.INetworkDefinition, module.IOptimizationProfile
        self.has_plugins = hasattr(network, "add_plugin_v3")
        self.has_compute_capabilities = hasattr(module, "ComputeCapability")
        self.has_attention_v2 = hasattr(network, "add_attention_v2")
        self.has_profile_streams = hasattr(profile, "profile_stream")
        self.has_engine_validity = hasattr(module.Runtime, "get_engine_validity")
        self.has_runtime_cache = hasattr(module, "IRuntimeCache")
        self.has_runtime_config = hasattr(module.ICudaEngine, "create_runtime_config")

    @property
    def title(self) -> str:
        """For people and manifests, e.g. "TensorRT-RTX 1.7.1.116"."""
        return f"{'TensorRT-RTX' if self.flavour == 'rtx' else 'TensorRT'} {self.version}"

    @property
    def compute_capabilities(self) -> tuple[str, ...]:
        """GPUs that engines can be built for ahead of time, e.g. ("7.5", "12.0"); empty: the one at hand alone."""
        if self.flavour == "full" or not self.has_compute_capabilities:
            return ()
        numbers = sorted(int(name[2:]) for name in self.module.ComputeCapability.__members__ if name.startswith("SM"))
        return tuple(f"{number // 10}.{number % 10}" for number in numbers)

    def check_built_by(self, compiler: str) -> None:
        """compiler: title of the TensorRT that built an engine, which no other can load. Raises TensorRtError."""
        if compiler != self.title:
            raise TensorRtError(f"engines were built by {compiler or 'no TensorRT'}, here is {self.title}: build again")

    def error_log(self) -> ErrorLog:
        """A logger that collects errors. Builders and runtimes keep a reference: one log may serve several."""
        return ErrorLog(self)


class ErrorLog:
    """`logger` goes to TensorRT; `check` raises what it was told since the last check."""

    def __init__(self, tensorrt: TensorRt) -> None:
        self._lock = Lock()  # TensorRT logs from its own threads too
        self._errors: list[str] = []
        self.warnings: list[str] = []
        self.logger = _make_logger(tensorrt.module, self)

    def add(self, message: str, *, is_error: bool) -> None:
        with self._lock:
            (self._errors if is_error else self.warnings).append(message)

    def take_errors(self) -> list[str]:
        """The errors since the last look, without a driver's absence where something else went wrong too."""
        with self._lock:
            errors, self._errors = self._errors, []
        return [error for error in errors if NO_DRIVER not in error] or errors

    def check(self, stage: str) -> None:
        """Raises TensorRtError naming the stage if an error was logged."""
        errors = self.take_errors()
        if errors:
            raise TensorRtError(f"{stage}: {'; '.join(dict.fromkeys(errors))}")

    def fail(self, stage: str, otherwise: str) -> TensorRtError:
        """The error of a stage that returned nothing: what was logged, or `otherwise` if nothing was."""
        errors = self.take_errors()
        return TensorRtError(f"{stage}: {'; '.join(dict.fromkeys(errors)) or otherwise}")


def import_tensorrt(flavour: Flavour | None = None) -> TensorRt:
    """The TensorRT of a flavour; without one, full TensorRT where it is there, else RTX.

    Raises TensorRtError naming the extra to install and why each module could not be imported.
    """
    flavours: tuple[Flavour, ...] = ("full", "rtx") if flavour is None else (flavour,)
    reasons = []
    for candidate in flavours:
        found = _import(candidate)
        if isinstance(found, TensorRt):
            return found
        reasons += found
    extras = " or ".join(f"pip install 'faser-backend[{EXTRAS[candidate]}]'" for candidate in flavours)
    wanted = "TensorRT-RTX" if flavour == "rtx" else "TensorRT"
    raise TensorRtError(f"{wanted} cannot be imported; install it with {extras} ({'; '.join(reasons)})")


@cache
def _import(flavour: Flavour) -> TensorRt | tuple[str, ...]:
    """The library, or why each of its modules could not be imported."""
    reasons = []
    for name in MODULES[flavour]:
        try:
            return TensorRt(importlib.import_module(name), flavour)
        except (ImportError, OSError, RuntimeError, AttributeError) as error:  # bindings without their libraries
            reasons.append(f"{name}: {error}")
    return tuple(reasons)


def _make_logger(module: Any, log: ErrorLog) -> Any:
    """An ILogger of this module: the base class is known only once it is imported."""

    class Logger(module.ILogger):
        def __init__(self) -> None:
            module.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity <= module.ILogger.WARNING:
                log.add(message, is_error=severity <= module.ILogger.ERROR)

    return Logger()
