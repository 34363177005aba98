"""`LLM`: an engine in the caller's process, with the same step loop as behind Triton.

Several threads and event loops may call it at once; their requests share the engine's batches.
"""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, closing, suppress
from copy import copy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Self

from faser_backend.api.batch import AnyParams, Batch, Conversation, Prompt, is_conversation
from faser_backend.api.outputs import RequestOutput
from faser_backend.core.config import EngineConfig
from faser_backend.core.errors import RequestError, UnavailableError
from faser_backend.core.plan import StepRecord
from faser_backend.core.request import EngineOutput
from faser_backend.manifest import EngineManifest
from faser_backend.pipeline.engine import EngineMetrics
from faser_backend.serving.compose import open_engine
from faser_backend.serving.engine_loop import EngineLoop
from faser_backend.serving.model_source import demo_engine_dir, find_engine
from faser_backend.serving.parameters import RunOptions
from faser_backend.serving.served_model import ServedModel
from faser_backend.text.prompts import PromptFormat
from faser_backend.text.tokenizer import TextTokenizer

Prompts = Prompt | Sequence[Prompt]


class LLM:
    """A loaded engine directory. Use it as a context manager, or `close` it; else it ends with the process.

    A prompt is text, a list of token ids, or a conversation [{"role": ..., "content": ...}]. A call takes one prompt or
    a list of them, and one SamplingParams or one per prompt. Every call raises RequestError for the first field out of
    range, before anything runs, and FaserError if the engine fails. If one of several answers fails, it ends with
    `error`, and the others go on. `lora` names the adapter that all answers of a call use.
    """

    def __init__(
        self,
        engine_dir: str | Path | None = None,
        *,
        chat_template: str | Path | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
        **options: Any,
    ) -> None:
        """Loads the engine.

        engine_dir: None for the demo pair. What is no engine directory is a model as `faser serve` takes it: a
        checkpoint, a GGUF file or a hub's model. Both are built on first use.
        chat_template: a file to use instead of the checkpoint's. on_step: called after every step, on the engine's
        thread. options: fields of core.config.EngineConfig, such as policy, draft, max_num_seqs and num_threads; the
        queue is unlimited by default.

        Raises ManifestError or ConfigError; FaserError if the engine cannot be warmed up.
        """
        draft = options.pop("draft", "auto")
        config = EngineConfig.from_options(**{"max_queue_size": 0, **options})
        self.engine_dir = Path(engine_dir) if engine_dir is not None else demo_engine_dir()
        if not self.engine_dir.is_dir() or (self.engine_dir / "config.json").is_file():
            run = RunOptions.from_options(model=str(engine_dir), draft=draft)
            found = find_engine(run, policy=config.policy)
            self.engine_dir, draft = found["engine_dir"], found["draft"]
        config = EngineConfig.from_options(**config.model_dump(exclude_unset=True), draft=draft)
        self.manifest = EngineManifest.load(self.engine_dir)
        template = None if chat_template is None else Path(chat_template)
        prompts = PromptFormat.load(self.engine_dir, self.manifest, chat_template_file=template)
        tokenizer = TextTokenizer.from_file(self.engine_dir / self.manifest.tokenizer.name, prompts)
        engine = open_engine(self.engine_dir, self.manifest, config)
        if on_step is not None:
            engine.step_runner.observers.append(on_step)
        self._model = ServedModel.of(self.engine_dir.resolve().name, self.manifest, engine.limits, tokenizer)
        self._guides = self._model.guide_compiler()
        self._loop = EngineLoop(engine, guides=self._guides)
        self._close = weakref.finalize(self, _close, self._loop, tokenizer)  # at the latest when the process ends
        self._call_ids = itertools.count()

    def generate(self, prompts: Prompts, sampling_params: AnyParams = None, lora: str = "") -> list[RequestOutput]:
        """Returns the answers, in the order of the prompts."""
        batch = self._batch(prompts, sampling_params, lora)
        for _ in self._run(batch):
            pass
        return batch.results()

    def chat(
        self, messages: Conversation | Sequence[Conversation], params: AnyParams = None, lora: str = ""
    ) -> list[RequestOutput]:
        """Works as generate for one conversation or a list of them."""
        listed: Any = [messages] if is_conversation(messages) else messages
        if not isinstance(listed, list | tuple) or not listed or not all(map(is_conversation, listed)):
            limit = 'must be a list of {"role": ..., "content": ...}, or several of them'
            raise RequestError("messages", messages, limit)
        return self.generate(list(listed), params, lora)

    def stream(self, prompts: Prompts, sampling_params: AnyParams = None, lora: str = "") -> Iterator[RequestOutput]:
        """Yields growing answers, each with its whole text; `new_pieces` and `text_diff` hold what is new.

        Closing the iterator ends the requests.
        """
        batch = self._batch(prompts, sampling_params, lora)
        return (output for _ in self._run(batch) for output in batch.new_outputs())

    async def generate_async(
        self, prompts: Prompts, sampling_params: AnyParams = None, lora: str = ""
    ) -> list[RequestOutput]:
        """Works as generate. Cancelling the task ends its requests."""
        batch = await asyncio.to_thread(self._batch, prompts, sampling_params, lora)
        async with aclosing(self._run_async(batch)) as steps:
            async for _ in steps:
                pass
        return batch.results()

    async def stream_async(
        self, prompts: Prompts, sampling_params: AnyParams = None, lora: str = ""
    ) -> AsyncGenerator[RequestOutput, None]:
        """Works as stream."""
        batch = await asyncio.to_thread(self._batch, prompts, sampling_params, lora)
        async with aclosing(self._run_async(batch)) as steps:
            async for _ in steps:
                for output in batch.new_outputs():
                    yield output

    @property
    def max_context(self) -> int:
        """The most tokens of prompt and answer together."""
        return self._model.limits.max_context

    @property
    def has_chat_template(self) -> bool:
        return self._model.tokenizer.prompts.chat_template is not None

    def metrics(self) -> EngineMetrics:
        """Returns counters since the engine was opened, without the step that is running."""
        found = self._loop.engine.metrics()
        return replace(found, **{each.name: copy(getattr(found, each.name)) for each in fields(found)})

    def close(self) -> None:
        """Ends the engine and frees its memory; running calls fail. A second call has no effect."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _batch(self, prompts: Prompts, params: AnyParams, lora: str) -> Batch:
        if not self._close.alive:
            raise UnavailableError("this LLM is closed")
        return Batch(prompts, params, replace(self._model, lora_name=lora), self._guides, f"{next(self._call_ids)}")

    def _run(self, batch: Batch) -> Iterator[None]:
        """Answers the batch; yields after every output."""
        with closing(self._loop.subscribe()) as subscription:
            batch.submit(subscription)
            while not batch.is_ended:
                batch.take(subscription.outputs.get(), subscription)
                yield

    async def _run_async(self, batch: Batch) -> AsyncGenerator[None, None]:
        events, outputs = asyncio.get_running_loop(), asyncio.Queue()

        def deliver(finished: list[EngineOutput] | None) -> None:
            with suppress(RuntimeError):  # the event loop is closed
                events.call_soon_threadsafe(outputs.put_nowait, finished)

        with closing(self._loop.subscribe(deliver)) as subscription:
            batch.submit(subscription)
            while not batch.is_ended:
                batch.take(await outputs.get(), subscription)
                yield


def _close(loop: EngineLoop, tokenizer: TextTokenizer) -> None:
    loop.close()
    tokenizer.close()
