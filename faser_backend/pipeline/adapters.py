"""The adapters of an engine: those that it was opened with, by name, and those that requests sent, by their task ids.

The memory of sent adapters is bounded. Those of live requests stay; of the others, the one unused for longest leaves
first. A request with an adapter that has left is refused in TensorRT-LLM's words, upon which clients send it again.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from faser_backend.core.adapter import AdaptableRunner, AdapterMatrices, read_tensors
from faser_backend.core.errors import ConfigError, RequestError
from faser_backend.core.ports import ModelRunner
from faser_backend.core.request import Request

NO_RUNTIME = "this engine's runtime computes no adapters; use runtime llvm or torch"


@dataclass(slots=True, eq=False)
class SentAdapter:
    """An adapter that a request sent."""

    name: str  # of its numbers: requests reuse each other's prefixes by it
    adapter: Any  # of RowBatch.adapters
    num_bytes: int
    users: set[str] = field(default_factory=set)  # ids of live requests


class Adapters:
    """All adapters of one engine. Thread-safe."""

    def __init__(self, target: ModelRunner, max_rank: int, max_bytes: int) -> None:
        """max_bytes: of all sent adapters; 0 refuses them."""
        self._target, self._max_rank, self._max_bytes = target, max_rank, max_bytes
        self._loaded: dict[str, Any] = {}
        self._sent: OrderedDict[int, SentAdapter] = OrderedDict()  # the last used at the end
        self._submitting = threading.Lock()  # held while an adapter is read, which takes long
        self._lock = threading.Lock()  # of _sent; the step's thread takes it too

    @property
    def num_sent_bytes(self) -> int:
        return sum(each.num_bytes for each in self._sent.values())

    def load(self, name: str, matrices: AdapterMatrices) -> None:
        """Makes an adapter known by its name. Raises ConfigError if the runtime takes none."""
        if not isinstance(self._target, AdaptableRunner):
            raise ConfigError(f"lora = {name!r}: {NO_RUNTIME}")
        self._loaded[name] = self._target.store_adapter(matrices)

    def acquire(self, request: Request) -> tuple[Request, Any]:
        """Returns the request under its adapter's name and without weights, and the adapter, None without one.

        Raises RequestError for an unknown adapter, and for weights that fit neither the model nor the cache.
        """
        task_id = request.lora_task_id
        if not task_id:
            adapter = self._loaded.get(request.lora_name)
            if request.lora_name and adapter is None:
                known = ", ".join(self._loaded) or "there is none"
                raise RequestError("lora_name", request.lora_name, f"must be a loaded adapter: {known}")
            return request, adapter
        with self._submitting:
            if request.lora_weights is not None and request.lora_config is not None:
                self._store(task_id, request.lora_weights, request.lora_config)
            sent = self._sent.get(task_id)
            if sent is None:
                limit = f"LoRA task {task_id} not found in cache. Please send LoRA weights with request"
                raise RequestError("lora_task_id", task_id, limit)
            with self._lock:
                self._sent.move_to_end(task_id)
                sent.users.add(request.request_id)
        return replace(request, lora_name=sent.name, lora_weights=None, lora_config=None), sent.adapter

    def release(self, request_ids: Iterable[str]) -> None:
        """Ends the use by these requests."""
        with self._lock:
            for sent in self._sent.values():
                sent.users.difference_update(request_ids)

    def _store(self, task_id: int, weights: np.ndarray, config: np.ndarray) -> None:
        """Stores an adapter in place of an unused one of this id, if it is not known yet."""
        digest = hashlib.blake2b(weights.tobytes() + config.tobytes(), digest_size=16)
        name, known = f"lora_task_id {task_id} {digest.hexdigest()}", self._sent.get(task_id)
        if known is not None and known.name == name:
            return
        if known is not None and known.users:
            raise RequestError("lora_task_id", task_id, "is in use with other weights; send these under another id")
        if not isinstance(self._target, AdaptableRunner):
            raise RequestError("lora_weights", list(weights.shape), NO_RUNTIME)
        matrices = read_tensors(weights, config, self._target.spec, self._max_rank)
        adapter = self._target.store_adapter(matrices)
        num_bytes, new = adapter.num_bytes, SentAdapter(name, adapter, adapter.num_bytes)
        room = self._max_bytes - sum(sent.num_bytes for sent in self._sent.values() if sent.users)
        # After `room`, as uses end meanwhile.
        idle = [each for each, sent in self._sent.items() if not sent.users and each != task_id]
        if num_bytes > room:
            limit = f"Cache is full. There are no done tasks to evict; {room} of {self._max_bytes} bytes are free"
            raise RequestError("lora_weights", f"{num_bytes} bytes", limit)
        with self._lock:
            self._sent.pop(task_id, None)
            while self.num_sent_bytes + num_bytes > self._max_bytes:
                del self._sent[idle.pop(0)]
            self._sent[task_id] = new
