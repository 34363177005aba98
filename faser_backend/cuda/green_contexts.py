"""Green contexts: disjoint groups of SMs, each with a stream, created once at start-up.

One split call divides the device into groups of the smallest allowed size, which the menu's splits combine into
disjoint shares. The driver is a parameter: `cuda.bindings.driver` or a fake.

A GPU and its software are identified without opening a context: for profiles and for `faser doctor`.
"""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from faser_backend.core.errors import ConfigError, FaserError
from faser_backend.cpu.runtime import cpu_identity
from faser_backend.device.partition import draft_sizes
from faser_backend.plugins.tensorrt_import import import_tensorrt
from faser_backend.runtime_spec import RUNTIMES

DEFAULT_STREAM_FLAG = 1  # CU_GREEN_CTX_DEFAULT_STREAM, required by drivers for CUDA 12 and 13.0
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: the only kind of stream that a green context has
MIN_DRIVER = 12040  # CUDA 12.4 brought green contexts


class DriverError(FaserError):
    """A call of the driver failed or does not exist."""


class GreenShare(NamedTuple):
    """One green context of a split."""

    num_sms: int  # as reported by the driver
    stream: int  # handle of its stream


class GreenSplits:
    """The splits of one device, smallest draft share first. It owns their contexts and streams: close it.

    splits: (draft, target) pairs. num_sms: SMs of the device. group_sms: SMs of the smallest group. note: the number of
    unused SMs, or empty.
    """

    def __init__(self, driver: Any, ordinal: int) -> None:
        """Opens all splits. The device's primary context should be active, because green contexts retain it.

        Raises DriverError, with nothing left open, if the driver is too old, there are too few SMs or a call fails.
        """
        self._driver, self._refusal = driver, ""
        with ExitStack() as stack:
            self._call("cuInit", 0)
            version = int(self._call("cuDriverGetVersion"))
            if version < MIN_DRIVER:
                raise DriverError(f"CUDA driver {version}: green contexts need at least {MIN_DRIVER}")
            self._device = self._call("cuDeviceGet", ordinal)
            self._sms = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
            whole = self._call("cuDeviceGetDevResource", self._device, self._sms)
            self.num_sms = int(whole.sm.smCount)
            groups, rest = self._split(whole)
            self.group_sms = int(groups[0].sm.smCount)
            self.splits = tuple(self._open_splits(groups, rest, stack))
            used = min(draft.num_sms + target.num_sms for draft, target in self.splits)
            self.note = f"{self.num_sms - used} SMs belong to no share{self._refusal}" if used < self.num_sms else ""
            self._handles = stack.pop_all()

    def close(self) -> None:
        """Destroys streams and contexts; no work may run on them. May be called again."""
        self._handles.close()

    def _split(self, whole: Any) -> tuple[list[Any], Any | None]:
        """Splits the device into all groups of the smallest size and the rest (None if there is none)."""
        smallest = int(getattr(whole.sm, "minSmPartitionSize", 0))
        if smallest < 1:
            raise DriverError("the driver or cuda-python does not report the smallest share: both need CUDA 13")
        if self.num_sms <= smallest:
            raise DriverError(f"{self.num_sms} SMs: two shares need more than {smallest}, the smallest one")
        groups, num_groups, rest = self._call(
            "cuDevSmResourceSplitByCount", self.num_sms // smallest, whole, 0, smallest
        )
        groups = list(groups)[: int(num_groups)]
        has_rest = rest is not None and int(rest.sm.smCount) > 0
        if len(groups) + has_rest < 2:
            raise DriverError(f"{self.num_sms} SMs: they split into {len(groups)} group(s), two shares need 2")
        return groups, rest if has_rest else None

    def _open_splits(
        self, groups: list[Any], rest: Any | None, stack: ExitStack
    ) -> list[tuple[GreenShare, GreenShare]]:
        """Opens draft shares of 1, 2, 4, ... groups, at most half; the target gets all others and the rest."""
        if len(groups) == 1:  # the draft gets the rest
            return [(self._open_share([rest], stack), self._open_share(groups, stack))]
        splits = []
        for num_draft in draft_sizes(len(groups)):
            draft = self._open_share(groups[:num_draft], stack)
            splits.append((draft, self._open_target(groups[num_draft:], rest, stack)))
        return splits

    def _open_target(self, groups: list[Any], rest: Any | None, stack: ExitStack) -> GreenShare:
        """Opens a target's share with the rest, unless the driver fails to join it to whole groups."""
        if rest is not None:
            try:
                return self._open_share([*groups, rest], stack)
            except DriverError as error:
                self._refusal = f" ({error})"
        return self._open_share(groups, stack)

    def _open_share(self, resources: list[Any], stack: ExitStack) -> GreenShare:
        description = self._call("cuDevResourceGenerateDesc", resources, len(resources))
        with ExitStack() as own:
            context = self._call("cuGreenCtxCreate", description, self._device, DEFAULT_STREAM_FLAG)
            own.callback(self._call, "cuGreenCtxDestroy", context)
            granted = self._call("cuGreenCtxGetDevResource", context, self._sms)
            stream = self._call("cuGreenCtxStreamCreate", context, NON_BLOCKING, 0)
            own.callback(self._call, "cuStreamDestroy", stream)  # before its context
            stack.callback(own.pop_all().close)
        return GreenShare(int(granted.sm.smCount), int(stream))

    def _call(self, name: str, *arguments: Any) -> Any:
        return call_driver(self._driver, name, *arguments)


def call_driver(driver: Any, name: str, *arguments: Any) -> Any:
    """Returns a driver function's results beside its status: nothing, a value or a tuple. Raises DriverError."""
    function = getattr(driver, name, None)
    if function is None:
        raise DriverError(f"{name}: missing in this cuda-python; pip install 'faser-backend[torch]'")
    try:
        status, *results = function(*arguments)
    except RuntimeError as error:  # the bindings' error for a missing driver or function
        reason = "no NVIDIA driver (libcuda.so.1)" if name == "cuInit" else f"{name}: {error}"
        raise DriverError(reason) from None
    if int(status) != 0:
        raise DriverError(f"{name}: {getattr(status, 'name', status)}")
    return results[0] if len(results) == 1 else tuple(results)


NAME_BYTES = 128


class GpuFacts(NamedTuple):
    """Facts about the first visible GPU."""

    name: str
    num_sms: int
    driver: int  # the CUDA version that the driver supports, 13000 for 13.0
    num_gpus: int


def load_driver() -> Any:
    """Imports cuda.bindings.driver. Raises ImportError if cuda-python is not installed."""
    return importlib.import_module("cuda.bindings.driver")


def gpu_facts(driver: Any) -> GpuFacts:
    """Reads the facts from the driver. Raises DriverError if there is no driver or no GPU."""
    call_driver(driver, "cuInit", 0)
    num_gpus = int(call_driver(driver, "cuDeviceGetCount"))
    if num_gpus == 0:
        raise DriverError("the driver shows no GPU")
    device = call_driver(driver, "cuDeviceGet", 0)
    name = call_driver(driver, "cuDeviceGetName", NAME_BYTES, device)
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    num_sms = int(call_driver(driver, "cuDeviceGetAttribute", attribute, device))
    driver_version = int(call_driver(driver, "cuDriverGetVersion"))
    return GpuFacts(name.split(b"\0")[0].decode(), num_sms, driver_version, num_gpus)


def memory_bytes(driver: Any) -> int:
    """Returns the total memory of the first GPU. Raises DriverError if there is no driver or no GPU."""
    gpu_facts(driver)
    return int(call_driver(driver, "cuDeviceTotalMem", call_driver(driver, "cuDeviceGet", 0)))


def gpu_identity(runtime: str, driver: Any = None) -> dict[str, str | int]:
    """Returns the facts that determine the time of a GPU runtime's calls; without a GPU, torch's are the processor's.

    driver: cuda.bindings.driver by default. Raises ConfigError if the runtime's library is missing, and FaserError if
    TensorRT finds no GPU.
    """
    flavour = RUNTIMES[runtime].tensorrt
    try:
        library = version("torch") if flavour is None else import_tensorrt(flavour).version
    except PackageNotFoundError:
        raise ConfigError("runtime = 'torch': torch is not installed; pip install 'faser-backend[torch]'") from None
    versions: dict[str, str | int] = {runtime: library}
    try:
        facts = gpu_facts(driver or load_driver())
    except (DriverError, ImportError):
        if flavour is not None:
            raise
        processor = cpu_identity()
        return {"cpu": processor["cpu"], "num_cores": processor["num_cores"], **versions}
    return {"gpu": facts.name, "num_sms": facts.num_sms, "driver": facts.driver, **versions}
