"""Green contexts: disjoint groups of SMs, each with a stream of its own, made once at start-up.

One split call cuts the device into groups of the smallest size that it allows; the splits of the menu are
combinations of those groups, so that any two shares of a split are disjoint. Sizes are read back, never assumed.
The driver is given: `cuda.bindings.driver`, or something that answers like it.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

from faser_backend.core.errors import FaserError

SM_RESOURCE = 1  # CU_DEV_RESOURCE_TYPE_SM
DEFAULT_STREAM_FLAG = 1  # CU_GREEN_CTX_DEFAULT_STREAM: drivers for CUDA 12 and 13.0 insist on it
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: the only kind of stream that a green context has
NO_FLAGS = 0
MIN_DRIVER = 12040  # CUDA 12.4 brought green contexts


class DriverError(FaserError):
    """The driver refused, or does not know, what was asked of it. status: the name of its CUresult, if any."""

    def __init__(self, message: str, status: str = "") -> None:
        super().__init__(message)
        self.status = status


class GreenShare(NamedTuple):
    """One green context of a split."""

    num_sms: int  # as the driver tells
    stream: int  # handle of its stream


class GreenSplits:
    """The splits of one device, smallest draft share first. Owns their contexts and streams: close it.

    `splits`: (draft, target) pairs. `num_sms` of the device; `group_sms` of the smallest group; `note`: what the
    target's shares had to go without, or empty.
    """

    def __init__(self, driver: Any, ordinal: int) -> None:
        """The device's primary context should be active: every green context holds on to it.

        Raises DriverError, with nothing left open, where the driver is too old, there are too few SMs or a call
        fails.
        """
        self._driver = driver
        with ExitStack() as stack:
            self._device = self._open_device(ordinal)
            whole = self._call("cuDeviceGetDevResource", self._device, sm_kind(driver))
            self.num_sms = int(whole.sm.smCount)
            groups, rest = self._split(whole)
            self.group_sms = int(groups[0].sm.smCount)
            self.splits = tuple(self._open_splits(groups, rest, stack))
            used = max(draft.num_sms + target.num_sms for draft, target in self.splits)
            self.note = f"{self.num_sms - used} SMs belong to no share" if used < self.num_sms else ""
            self._handles = stack.pop_all()

    def close(self) -> None:
        """Destroys streams and contexts; nothing may be at work on them. May be called again."""
        self._handles.close()

    def _open_device(self, ordinal: int) -> Any:
        self._call("cuInit", 0)
        version = int(self._call("cuDriverGetVersion"))
        if version < MIN_DRIVER:
            raise DriverError(f"CUDA driver {version}: green contexts need at least {MIN_DRIVER}")
        return self._call("cuDeviceGet", ordinal)

    def _split(self, whole: Any) -> tuple[list[Any], Any | None]:
        """The one split call: all groups of the smallest size, and what remains (None: nothing)."""
        smallest = int(getattr(whole.sm, "minSmPartitionSize", 0))
        if smallest < 1:
            raise DriverError("the driver or cuda-python does not tell the smallest share: both need CUDA 13")
        if self.num_sms <= smallest:
            raise DriverError(f"{self.num_sms} SMs: two shares need more than {smallest}, the smallest one")
        groups, num_groups, rest = self._call(
            "cuDevSmResourceSplitByCount", self.num_sms // smallest, whole, NO_FLAGS, smallest
        )
        groups = list(groups)[: int(num_groups)]
        has_rest = rest is not None and int(rest.sm.smCount) > 0
        if len(groups) + has_rest < 2:
            raise DriverError(f"{self.num_sms} SMs: they split into {len(groups)} group(s), two shares need 2")
        return groups, rest if has_rest else None

    def _open_splits(
        self, groups: list[Any], rest: Any | None, stack: ExitStack
    ) -> list[tuple[GreenShare, GreenShare]]:
        """A draft share of 1, 2, 4, ... groups, at most half of them; the target gets all others and the rest."""
        if len(groups) == 1:  # the rest is what the draft can have
            return [(self._open_share([rest], stack), self._open_share(groups, stack))]
        splits = []
        for num_draft in draft_groups(len(groups)):
            draft = self._open_share(groups[:num_draft], stack)
            splits.append((draft, self._open_target(groups[num_draft:], rest, stack)))
        return splits

    def _open_target(self, groups: list[Any], rest: Any | None, stack: ExitStack) -> GreenShare:
        """With the rest, unless the driver refuses to join it to whole groups: it may be aligned otherwise."""
        if rest is not None:
            try:
                return self._open_share([*groups, rest], stack)
            except DriverError as error:
                if error.status != "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION":
                    raise
        return self._open_share(groups, stack)

    def _open_share(self, resources: list[Any], stack: ExitStack) -> GreenShare:
        description = self._call("cuDevResourceGenerateDesc", resources, len(resources))
        context = self._call("cuGreenCtxCreate", description, self._device, DEFAULT_STREAM_FLAG)
        stack.callback(self._call, "cuGreenCtxDestroy", context)
        granted = self._call("cuGreenCtxGetDevResource", context, sm_kind(self._driver))
        stream = self._call("cuGreenCtxStreamCreate", context, NON_BLOCKING, 0)
        stack.callback(self._call, "cuStreamDestroy", stream)  # before its context
        return GreenShare(int(granted.sm.smCount), int(stream))

    def _call(self, name: str, *arguments: Any) -> Any:
        return call_driver(self._driver, name, *arguments)


def call_driver(driver: Any, name: str, *arguments: Any) -> Any:
    """Returns a driver function's results beside its status: nothing, a value or a tuple. Raises DriverError."""
    function = getattr(driver, name, None)
    if function is None:
        raise DriverError(f"{name}: this cuda-python does not know it; pip install 'faser-backend[torch]'")
    try:
        status, *results = function(*arguments)
    except RuntimeError as error:  # how the bindings tell that there is no driver, or no such function in it
        reason = "no NVIDIA driver (libcuda.so.1)" if name == "cuInit" else f"{name}: {error}"
        raise DriverError(reason) from None
    if int(status) != 0:
        told = str(getattr(status, "name", status))
        raise DriverError(f"{name}: {told}", told)
    return results[0] if len(results) == 1 else tuple(results)


def draft_groups(num_groups: int) -> list[int]:
    """Groups for the draft in each split: 1, 2, 4, ..., at most half."""
    return [1 << power for power in range(num_groups.bit_length()) if 2 << power <= num_groups]


def sm_kind(driver: Any) -> Any:
    """CU_DEV_RESOURCE_TYPE_SM as the driver's bindings want it: a member of their own enumeration."""
    kinds = getattr(driver, "CUdevResourceType", None)
    return SM_RESOURCE if kinds is None else kinds.CU_DEV_RESOURCE_TYPE_SM
