"""`Runtime`: the port through which the composition root opens an engine on a device.

The manifest names the implementation; no caller depends on which one it is. A runtime owns the device's handles
(streams, green contexts). Close the runners and lanes that it opened before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from faser_backend.core.config import EngineConfig
from faser_backend.core.model import ModelSpec
from faser_backend.core.ports import Behind, DraftLoop, GraphCounts, Lanes, ModelRunner, Sampler
from faser_backend.device.partition import PartitionMenu, Share
from faser_backend.manifest import ModelEngine

# Reasons why there are no splits.
NO_DRAFT = "none (no draft model: there is nothing to overlap)"
DRAFTS_IN_TURN = "none (the draft, as an EAGLE-3 head, reads what the target makes of each token: the two run in turn)"


class ModelPair(NamedTuple):
    """The target of an engine and its draft model, if it has one."""

    target: ModelEngine
    draft: ModelEngine | None

    @property
    def present(self) -> tuple[ModelEngine, ...]:
        return (self.target,) if self.draft is None else (self.target, self.draft)

    @property
    def max_context(self) -> int:
        return min(model.spec.max_context for model in self.present)

    @property
    def vocab_size(self) -> int:
        return self.target.spec.vocab_size

    def most(self, dimension: str) -> int:
        """See SegmentSpec.most; all segments must take a call."""
        return min(segment.most(dimension) for model in self.present for segment in model.segments)


class KvStorage(Protocol):
    """The common part of all KV pools. A draft head's pool shares its target's `features`."""

    num_blocks: int
    kv_block_size: int
    features: Any  # inputs of the layers that a head reads, by block and offset

    def keep_features(self, spec: ModelSpec) -> None: ...


Pool = TypeVar("Pool", bound=KvStorage)
Result = TypeVar("Result")


class Closable(Protocol):
    def close(self) -> None:
        """Releases all resources. May be called again; the object cannot be used afterwards."""


class OpenRunner(ModelRunner, Closable, Protocol):
    """A runner that must be closed."""


class OpenLanes(Lanes, Closable, Protocol):
    """Lanes that must be closed; `on_draft` and `on_target` run work on one lane's thread and wait for it."""

    def on_draft(self, work: Callable[[], Result]) -> Result: ...

    def on_target(self, work: Callable[[], Result]) -> Result: ...


class Runtime(Closable, Protocol[Share, Pool]):
    """Opens pools, runners, lanes and samplers of one pair of models on one device.

    All runners of a model share its pool, whatever their partitions.
    """

    kv_block_size: int
    menu: PartitionMenu[Share]  # the shares that the device offers; `note` gives the reason
    splits: tuple[tuple[Share, Share], ...]  # the menu's splits worth opening for these models, best guess first
    splits_note: str  # how many of the menu's splits, and why
    graph_counts: GraphCounts  # of everything that it opened
    behind: Behind | None  # run while the device works; None: calls return when they have ended
    needs_warm_up: bool  # first calls are far slower than later ones: kernels are compiled, graphs captured

    def free_bytes(self) -> int:
        """Returns the device's free memory, less what unloaded weights of the models will take."""
        ...

    def kv_bytes(self, num_partitions: int, config: EngineConfig) -> int:
        """Returns the part of free_bytes for KV pools unless num_kv_blocks is given; num_partitions will be open."""
        ...

    def bytes_per_block(self, spec: ModelSpec) -> int:
        """Returns the bytes of one KV block: keys and values of all layers."""
        ...

    def bind_step_thread(self) -> None:
        """Binds the calling thread to the device's main stream, so that its work follows all work queued before.

        Call it before building an engine and before every step. Cheap if nothing changes.
        """

    def open_pool(self, model: ModelEngine, num_blocks: int) -> Pool: ...

    def fill_pool(self, pool: Pool, numbers: np.ndarray) -> None:
        """Sets every key and value to numbers [head_dim], for timing calls on an unwritten pool."""

    def open_runner(self, model: ModelEngine, share: Share, pool: Pool) -> OpenRunner:
        """Opens a runner on the calling thread, which must be bound to the share if that is one of a split."""
        ...

    def open_lanes(self, draft: Share, target: Share) -> OpenLanes: ...

    def open_sampler(self, vocab_size: int, max_num_seqs: int) -> Sampler: ...

    def open_draft_loop(self, runner: OpenRunner, sampler: Sampler) -> DraftLoop | None:
        """Returns the device's draft loop, or None if the host drafts token by token."""

    def is_fatal(self, error: BaseException) -> bool:
        """Tells whether this process cannot use the device any more after this error of a step. None breaks a CPU."""
        return False

    def synchronize(self) -> None:
        """Waits for all work that the calling thread queued; for measurements only, never in a step."""
