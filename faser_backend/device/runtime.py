"""`Runtime`: what the composition root needs of a way to run engines, whatever the device.

One implementation per runtime of the manifest; the composition root picks it by name, and nothing after that
asks which one it is. A runtime owns the device's handles (streams, green contexts); runners and lanes that it
opened are closed before it.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from faser_backend.core.ports import DraftLoop, Lanes, ModelRunner, Sampler
from faser_backend.device.partition import PartitionMenu, Share
from faser_backend.manifest import ModelEngine, ModelSpec

Pool = TypeVar("Pool")


class Closable(Protocol):
    def close(self) -> None:
        """Gives back what is held. May be called again; the object cannot be used afterwards."""
        ...


class OpenRunner(ModelRunner, Closable, Protocol):
    """A runner that its owner closes."""


class OpenLanes(Lanes, Closable, Protocol):
    """Lanes that their owner closes."""


class Runtime(Closable, Protocol[Share, Pool]):
    """Opens pools, runners, lanes and samplers of one engine directory on one device.

    Pools are shared by all runners of a model: what one partition wrote another may read.
    """

    menu: PartitionMenu[Share]  # what the device offers; `note` says in words what was chosen and why
    splits: tuple[tuple[Share, Share], ...]  # of the menu, those that are worth opening for this engine

    def free_bytes(self) -> int:
        """Memory that KV pools can still take."""
        ...

    def bytes_per_block(self, spec: ModelSpec) -> int:
        """Bytes of one KV block over all layers, keys and values."""
        ...

    def open_pool(self, model: ModelEngine, num_blocks: int) -> Pool: ...

    def open_runner(self, model: ModelEngine, share: Share, pool: Pool) -> OpenRunner:
        """On the calling thread, which has been bound to the share where it is one of a split."""
        ...

    def open_lanes(self, draft: Share, target: Share) -> OpenLanes: ...

    def open_sampler(self, max_num_seqs: int) -> Sampler: ...

    def open_draft_loop(self, runner: ModelRunner, sampler: Sampler) -> DraftLoop | None:
        """None where the host drafts token by token."""
        ...

    def synchronize(self) -> None:
        """Returns when the device has done all that was queued: for who measures, never in a step."""
        ...
