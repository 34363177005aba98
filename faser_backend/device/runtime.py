"""`Runtime`: what the composition root needs of a way to run engines, whatever the device.

One implementation per runtime of the manifest; the composition root picks it by name, and nothing after that
asks which one it is. A runtime owns the device's handles (streams, green contexts); runners and lanes that it
opened are closed before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from faser_backend.core.config import EngineConfig
from faser_backend.core.graph_counts import GraphCounts
from faser_backend.core.model import ModelSpec
from faser_backend.core.ports import DraftLoop, Lanes, ModelRunner, Sampler
from faser_backend.device.partition import PartitionMenu, Share
from faser_backend.manifest import ModelEngine

# Why there are no splits.
NO_DRAFT = "none (no draft model: there is nothing to overlap)"
DRAFTS_IN_TURN = "none (an EAGLE-3 head reads what the target makes of each token: the two run in turn)"


class ModelPair(NamedTuple):
    """The two models of an engine, or its target alone where no model drafts."""

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


class KvStorage(Protocol):
    """The common part of all KV pools. The pool of a draft head is given its target's `features`."""

    num_blocks: int
    kv_block_size: int
    features: Any  # what goes into the layers that a head reads, by block and offset

    def keep_features(self, spec: ModelSpec) -> None: ...


Pool = TypeVar("Pool", bound=KvStorage)
Result = TypeVar("Result")


class Closable(Protocol):
    def close(self) -> None:
        """Gives back what is held. May be called again; the object cannot be used afterwards."""
        ...


class OpenRunner(ModelRunner, Closable, Protocol):
    """A runner that its owner closes."""


class OpenLanes(Lanes, Closable, Protocol):
    """Lanes that their owner closes; `on_draft` and `on_target` run work on one lane's thread and wait for it."""

    def on_draft(self, work: Callable[[], Result]) -> Result: ...

    def on_target(self, work: Callable[[], Result]) -> Result: ...


class Runtime(Closable, Protocol[Share, Pool]):
    """Opens pools, runners, lanes and samplers of one pair of models on one device.

    Pools are shared by all runners of a model: what one partition wrote another may read.
    """

    kv_block_size: int
    menu: PartitionMenu[Share]  # what the device offers; `note` says in words what was chosen and why
    splits: tuple[tuple[Share, Share], ...]  # of the menu, those worth opening for these models, the best guess first
    splits_note: str  # how many of how many, and why
    graph_counts: GraphCounts  # of everything that it opened
    needs_warm_up: bool  # first calls are far slower than later ones: kernels are compiled, graphs captured

    def free_bytes(self) -> int:
        """Free memory where KV pools live, less what the models' weights are still going to take."""
        ...

    def kv_bytes(self, num_partitions: int, config: EngineConfig) -> int:
        """The part of free_bytes that KV pools may take unless somebody says how many blocks. num_partitions: that are
        going to be opened."""
        ...

    def bytes_per_block(self, spec: ModelSpec) -> int:
        """Bytes of one KV block over all layers, keys and values."""
        ...

    def bind_step_thread(self) -> None:
        """Called before an engine is built and before every step, on the thread that does it: what that thread
        queues from then on follows what was queued before it. Cheap where nothing changes."""
        ...

    def open_pool(self, model: ModelEngine, num_blocks: int) -> Pool: ...

    def fill_pool(self, pool: Pool, numbers: np.ndarray) -> None:
        """Every key and value becomes numbers [head_dim]: for who times calls on a pool that nobody wrote."""
        ...

    def open_runner(self, model: ModelEngine, share: Share, pool: Pool) -> OpenRunner:
        """On the calling thread, which has been bound to the share where it is one of a split."""
        ...

    def open_lanes(self, draft: Share, target: Share) -> OpenLanes: ...

    def open_sampler(self, vocab_size: int, max_num_seqs: int) -> Sampler: ...

    def open_draft_loop(self, runner: OpenRunner, sampler: Sampler) -> DraftLoop | None:
        """None where the host drafts token by token."""
        ...

    def is_fatal(self, error: BaseException) -> bool:
        """Whether the device is of no use to this process after this error of a step."""
        ...

    def synchronize(self) -> None:
        """Returns when the device has done what the calling thread queued: for who measures, never in a step."""
        ...
