"""Fakes of a CUDA driver and of torch.cuda: devices of any size, failures at any call, and the order of stream work.

`FakeDriver` answers as cuda.bindings.driver does and counts every handle. The streams of `FakeCuda` compute nothing but
record their order: `touch` is a use of a resource, and `check_order` finds two unordered uses, one a write.
"""

from __future__ import annotations

import enum
import threading
from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations, count
from types import SimpleNamespace
from typing import Any, NamedTuple


class Status(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION = 915
    CUDA_ERROR_OUT_OF_MEMORY = 2


@dataclass
class Resource:
    """SMs by number. split: the split call that returned them; 0 is the device itself."""

    sms: tuple[int, ...]
    smallest: int
    split: int = 0
    is_rest: bool = False
    sm: Any = field(init=False)

    def __post_init__(self) -> None:
        self.sm = SimpleNamespace(smCount=len(self.sms), minSmPartitionSize=self.smallest)


class FakeDriver:
    """A device of num_sms SMs whose smallest share is `smallest`. joins_rest: whether groups and the rest combine.

    fails_at: a function's name, or its name and the number of its call (from 1), that answers with `status`.
    """

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT=16)

    def __init__(
        self,
        num_sms: int = 132,
        smallest: int = 8,
        *,
        version: int = 13000,
        joins_rest: bool = True,
        most_groups: int = 10**6,
        num_gpus: int = 1,
        fails_at: tuple[str, int] | None = None,
        status: Status = Status.CUDA_ERROR_OUT_OF_MEMORY,
    ) -> None:
        self.device = Resource(tuple(range(num_sms)), smallest)
        self.version = version
        self.joins_rest = joins_rest
        self.most_groups = most_groups
        self.num_gpus = num_gpus
        self.fails_at = fails_at
        self.status = status
        self.calls: Counter[str] = Counter()
        self.contexts: dict[int, tuple[Resource, ...]] = {}
        self.streams: dict[int, int] = {}  # the context of each
        self.sms_of: dict[int, frozenset[int]] = {}  # of every stream ever created
        self._handles = count(1000)

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if not name.startswith("cu"):
            return value

        def counted(*arguments: Any) -> tuple[Any, ...]:
            self.calls[name] += 1
            if self.fails_at == (name, self.calls[name]):
                return (self.status,)
            return value(*arguments)

        return counted

    def cuInit(self, flags: int):
        return (Status.CUDA_SUCCESS,)

    def cuDriverGetVersion(self):
        return Status.CUDA_SUCCESS, self.version

    def cuDeviceGetCount(self):
        return Status.CUDA_SUCCESS, self.num_gpus

    def cuDeviceGetName(self, length: int, device: str):
        return Status.CUDA_SUCCESS, b"Faked GPU".ljust(length, b"\0")

    def cuDeviceGetAttribute(self, attribute: int, device: str):
        assert attribute == 16, "the number of SMs"
        return Status.CUDA_SUCCESS, len(self.device.sms)

    def cuDeviceTotalMem(self, device: str):
        return Status.CUDA_SUCCESS, 81_559 << 20

    def cuDeviceGet(self, ordinal: int):
        return Status.CUDA_SUCCESS, f"device {ordinal}"

    def cuDeviceGetDevResource(self, device: str, kind: int):
        return Status.CUDA_SUCCESS, self.device

    def cuDevSmResourceSplitByCount(self, num_groups: int, resource: Resource, flags: int, min_count: int):
        size = -(-min_count // resource.smallest) * resource.smallest
        number = min(num_groups, len(resource.sms) // size, self.most_groups)
        split = self.calls["cuDevSmResourceSplitByCount"]
        groups = [Resource(resource.sms[i * size : (i + 1) * size], resource.smallest, split) for i in range(number)]
        rest = Resource(resource.sms[number * size :], resource.smallest, split, is_rest=True)
        unused = [Resource((), 0)] * (num_groups - number)
        return Status.CUDA_SUCCESS, groups + unused, number, rest

    def cuDevResourceGenerateDesc(self, resources: list[Resource], count: int):
        assert len(resources) == count and all(resource.sms for resource in resources)
        is_mixed = len({resource.split for resource in resources}) > 1
        joins = len(resources) > 1 and any(resource.is_rest for resource in resources)
        if is_mixed or (joins and not self.joins_rest):
            return (Status.CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION,)
        return Status.CUDA_SUCCESS, tuple(resources)

    def cuGreenCtxCreate(self, description: Any, device: Any, flags: int):
        assert flags == 1, "drivers before CUDA 13.1 want a default stream"
        handle = next(self._handles)
        self.contexts[handle] = description
        return Status.CUDA_SUCCESS, handle

    def cuGreenCtxGetDevResource(self, context: int, kind: int):
        sms = tuple(number for resource in self.contexts[context] for number in resource.sms)
        return Status.CUDA_SUCCESS, Resource(sms, self.device.smallest)

    def cuGreenCtxStreamCreate(self, context: int, flags: int, priority: int):
        assert flags == 1, "streams of green contexts are non-blocking"
        handle = next(self._handles)
        self.streams[handle] = context
        self.sms_of[handle] = frozenset(number for part in self.contexts[context] for number in part.sms)
        return Status.CUDA_SUCCESS, handle

    def cuStreamDestroy(self, stream: int):
        assert self.streams[stream] in self.contexts, "a stream goes before its context"
        del self.streams[stream]
        return (Status.CUDA_SUCCESS,)

    def cuGreenCtxDestroy(self, context: int):
        assert context not in self.streams.values(), "a context goes after its streams"
        del self.contexts[context]
        return (Status.CUDA_SUCCESS,)


class FakeStream:
    """A stream. `past` holds all that is ordered before its next work."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle
        self.device_index = 0
        self.past: frozenset[int] = frozenset()

    def wait_event(self, event: FakeEvent) -> None:
        self.past |= event.past

    def wait_stream(self, other: FakeStream) -> None:
        self.past |= other.past

    def synchronize(self) -> None: ...


class FakeEvent:
    def __init__(self) -> None:
        self.past: frozenset[int] = frozenset()

    def record(self, stream: FakeStream) -> None:
        self.past = stream.past


class Use(NamedTuple):
    """A use of a resource: its number, the numbers of uses ordered before it, its stream and its kind."""

    node: int
    past: frozenset[int]
    stream: int
    is_write: bool


class FakeCuda:
    """The parts of torch.cuda that shares use."""

    def __init__(self, num_sms: int = 132) -> None:
        self._num_sms = num_sms
        self.handles = count(1)
        self._local = threading.local()
        self._default = FakeStream(0)
        self._lock = threading.Lock()
        self._nodes = count()
        self.uses: dict[str, list[Use]] = {}  # by resource
        self.Stream = lambda device: FakeStream(next(self.handles))
        self.Event = FakeEvent

    def ExternalStream(self, handle: int, device: int) -> FakeStream:
        return FakeStream(handle)

    def get_device_properties(self, device: int) -> Any:
        return SimpleNamespace(multi_processor_count=self._num_sms)

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        """Returns free and total bytes; torch's cache holds some more that are free for torch alone."""
        return 3 << 30, 4 << 30

    def memory_reserved(self, device: Any) -> int:
        return 700 << 20

    def memory_allocated(self, device: Any) -> int:
        return 200 << 20

    def synchronize(self, device: Any) -> None: ...

    def empty_cache(self) -> None: ...

    def current_stream(self) -> FakeStream:
        return getattr(self._local, "stream", self._default)

    def set_device(self, device: int) -> None:
        assert device == 0

    def set_stream(self, stream: FakeStream) -> None:
        self._local.stream = stream

    def touch(self, resource: str, *, is_write: bool = True) -> None:
        """Queues a use of the resource on the calling thread's current stream."""
        stream = self.current_stream()
        with self._lock:
            node = next(self._nodes)
            self.uses.setdefault(resource, []).append(Use(node, stream.past, stream.cuda_stream, is_write))
            stream.past |= {node}

    def check_order(self) -> None:
        """Asserts that two uses of a resource are ordered, whatever their streams, except two reads."""
        for resource, uses in self.uses.items():
            for first, second in combinations(uses, 2):
                if first.is_write or second.is_write:
                    assert first.node in second.past, (
                        f"{resource}: use {second.node} on stream {second.stream} does not wait for {first.node} "
                        f"on {first.stream}"
                    )
