"""Builds a running engine from an engine directory and a configuration.

Runners, sampler, drafter and policy are chosen here alone; `serving/runtimes.py` opens the runtime. `assemble_on`
needs no engine directory and no profile: it takes an open runtime and its models.

A GPU engine is warmed up before its first request: every graph is captured, and some batches run. That is on the thread
that steps, as libraries open some handles per thread. All possible calls are known beforehand, so no client waits for a
capture. The batches check that everything runs and compile the remaining kernels. Their output is dropped; policies and
metrics do not see it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from operator import call
from pathlib import Path
from typing import Any

import numpy as np

from faser_backend.core.config import EngineConfig
from faser_backend.core.decision import WHOLE
from faser_backend.core.errors import ConfigError, FaserError
from faser_backend.core.ports import Clock, Partition, PhaseTimes, Sampler
from faser_backend.core.request import FinishReason, Limits, Request, Sampling
from faser_backend.device.partition import split_name
from faser_backend.device.runtime import ModelPair, OpenRunner
from faser_backend.manifest import EngineManifest, ModelEngine
from faser_backend.pipeline.draft import ModelProposer
from faser_backend.pipeline.engine import Engine, Ports, assemble
from faser_backend.pipeline.head import BlockProposer, HeadProposer
from faser_backend.pipeline.joint import JointProposer
from faser_backend.pipeline.ngram import NgramProposer
from faser_backend.pipeline.propose import Proposer
from faser_backend.policy.early_exit import NUM_CANDIDATES
from faser_backend.policy.registry import make_policy
from faser_backend.policy.speculation import Knowledge, SpeculationPolicy
from faser_backend.serving.loading import log, size_text
from faser_backend.serving.profile_store import load_knowledge, with_ngrams
from faser_backend.serving.runtimes import AnyRuntime, open_runtime

_log = logging.getLogger(__name__)
MIN_CONTEXT = 256  # tokens; less is of no use to anyone
BOTH = "model+ngram"


class SystemClock:
    """The monotonic clock of this machine."""

    now_ns = staticmethod(time.perf_counter_ns)


SYSTEM_CLOCK = SystemClock()


def open_engine(
    engine_dir: Path, manifest: EngineManifest, config: EngineConfig, clock: Clock = SYSTEM_CLOCK
) -> Engine:
    """Checks and loads the weights of an engine directory. The thread that steps the engine prepares it first.

    Raises ManifestError or ConfigError.
    """
    with ExitStack() as stack:
        served = replace(manifest, draft=served_models(manifest, config).draft)
        runtime = open_runtime(engine_dir, served, config)
        stack.callback(runtime.close)
        engine = engine_on(runtime, engine_dir, manifest, config, on_close=runtime.close, clock=clock)
        stack.pop_all()
        stack.callback(engine.close)  # closes the runtime too
        for task_id, (name, directory) in enumerate(config.adapters.items(), 1):
            from faser_backend.engines.lora import read_adapter

            engine.adapters.load(name, read_adapter(directory, manifest.target.spec, config.max_lora_rank))
            log.info(f"LoRA adapter {name}: lora_task_id {task_id}")
        stack.pop_all()
    return engine


def build_engine(engine_dir: Path, config: EngineConfig, clock: Clock = SYSTEM_CLOCK) -> Engine:
    """Opens an engine for the calling thread to step. Raises ManifestError, ConfigError, and FaserError on warm-up."""
    return prepared(open_engine(engine_dir, EngineManifest.load(engine_dir), config, clock))


def engine_on(
    runtime: AnyRuntime,
    engine_dir: Path,
    manifest: EngineManifest,
    config: EngineConfig,
    *,
    on_close: Callable[[], None] = lambda: None,
    clock: Clock = SYSTEM_CLOCK,
) -> Engine:
    """Returns an engine of a directory on an open runtime, with its profile. It is not prepared yet."""
    models, config = served_models(manifest, config), with_prompt_rows(config, manifest)
    splits = [split_name(*split) for split in runtime.splits]
    if not splits and config.pipeline not in {"auto", "serial"}:
        _log.warning("pipeline = %s: %s; every step is serial", config.pipeline, runtime.splits_note)

    def load() -> Knowledge:
        knowledge = serving_knowledge(engine_dir, manifest, config)
        if not knowledge.costs.is_measured:
            _log.warning("%s has no profile: costs are conservative guesses; run `faser profile %s`", *[engine_dir] * 2)
        return knowledge.on((WHOLE, *splits))

    policy = make_policy(config, load, splits[0] if splits else None)
    return assemble_on(runtime, models, policy, config, on_close=on_close, clock=clock)


def prepared(engine: Engine) -> Engine:
    """Prepares an engine for the calling thread to step. Closes it if that fails."""
    try:
        engine.prepare()
    except BaseException:
        engine.close()
        raise
    return engine


def assemble_on(
    runtime: AnyRuntime,
    models: ModelPair,
    policy: SpeculationPolicy,
    config: EngineConfig,
    *,
    on_close: Callable[[], None] = lambda: None,
    clock: Clock = SYSTEM_CLOCK,
) -> Engine:
    """Returns an engine of these models on an open runtime, which the caller closes. config.policy is not read.

    on_close: called when the engine closes, after everything that was opened here. Raises ConfigError and leaves
    nothing open.
    """
    check_call_limits(models, config)
    runtime.bind_step_thread()  # steps read the memory that is loaded here
    num_partitions = 1 + sum(split_name(*split) in policy.partitions for split in runtime.splits)
    num_blocks = choose_num_blocks(runtime, models, config, num_partitions)
    max_context = clipped_context(models.max_context, num_blocks * runtime.kv_block_size)
    sampler = runtime.open_sampler(models.vocab_size, config.max_num_seqs)
    partitions, close_partitions = open_partitions(
        runtime, models, sampler, num_blocks=num_blocks, names=policy.partitions, is_drafting=policy.is_drafting
    )

    def close() -> None:
        close_partitions()
        on_close()

    def prepare(engine: Engine) -> None:
        if runtime.needs_warm_up:
            warm_up(engine, max_num_seqs=config.max_num_seqs, max_prefill_tokens=config.max_prefill_tokens)

    ports = Ports(
        partitions,
        sampler,
        clock,
        lambda times, block_tables: make_proposer(models, config, sampler, times, block_tables),
        num_blocks,
        runtime.kv_block_size,
        Limits(models.vocab_size, max_context),
        bind_thread=runtime.bind_step_thread,
        prepare=prepare,
        close=close,
        is_fatal=runtime.is_fatal,
        graph_counts=runtime.graph_counts,
        behind=runtime.behind,
    )
    return assemble(ports, policy, config)


def open_partitions(
    runtime: AnyRuntime,
    models: ModelPair,
    sampler: Sampler,
    *,
    num_blocks: int,
    names: Collection[str],
    is_drafting: bool,
) -> tuple[dict[str, Partition], Callable[[], None]]:
    """Returns the partitions by name, always including WHOLE, and a function that closes their lanes and runners.

    names: partitions that the policy uses. Of the splits among them, those are opened that the runtime offers; the log
    says why. Only WHOLE is opened without is_drafting or a draft model, as nothing can overlap then.
    Raises ConfigError and leaves nothing open.
    """
    with ExitStack() as stack:  # closes runners and lanes in reverse order

        def open_runner(model: ModelEngine, share: Any, pool: Any) -> OpenRunner:
            log.info(f"loading weights and kernels: a model of {size_text(model.num_weight_bytes)}")
            runner = runtime.open_runner(model, share, pool)
            stack.callback(runner.close)
            return runner

        target_pool = runtime.open_pool(models.target, num_blocks)
        target = open_runner(models.target, runtime.menu.whole, target_pool)
        draft_model = models.draft
        if not is_drafting or draft_model is None:
            return {WHOLE: Partition(target, None, None)}, stack.pop_all().close
        draft_pool = runtime.open_pool(draft_model, num_blocks)
        if draft_model.spec.reads_target:
            draft_pool.features = target_pool.features  # the head reads what the target writes
        draft = open_runner(draft_model, runtime.menu.whole, draft_pool)
        partitions = {WHOLE: Partition(target, draft, None, runtime.open_draft_loop(draft, sampler))}
        if any(name != WHOLE for name in names):
            _log.log(logging.INFO if runtime.splits else logging.WARNING, "splits: %s", runtime.splits_note)
        for draft_share, target_share in runtime.splits:
            if (name := split_name(draft_share, target_share)) not in names:
                continue
            # Its runners share the pools of WHOLE; each is opened on its lane's thread.
            lanes = runtime.open_lanes(draft_share, target_share)
            stack.callback(lanes.close)  # if opening a runner fails
            target = lanes.on_target(partial(open_runner, models.target, target_share, target_pool))
            draft = lanes.on_draft(partial(open_runner, draft_model, draft_share, draft_pool))
            draft_loop = lanes.on_draft(partial(runtime.open_draft_loop, draft, sampler))
            stack.callback(lanes.close)  # before the runners, so that running calls end first
            partitions[name] = Partition(target, draft, lanes, draft_loop)
        return partitions, stack.pop_all().close


def with_prompt_rows(config: EngineConfig, manifest: EngineManifest) -> EngineConfig:
    """Returns the config, with the runtime's usual max_prefill_tokens that the engines take unless it was given."""
    if "max_prefill_tokens" in config.model_fields_set:
        return config
    limits = map(ModelPair(manifest.target, manifest.draft).most, "TQ")  # of a call, and of a sequence
    usual = min(manifest.runtime_spec.num_prefill_tokens, *limits)
    return config.model_copy(update={"max_prefill_tokens": usual})


def check_call_limits(models: ModelPair, config: EngineConfig) -> None:
    """Raises ConfigError if the scheduler could make larger calls than the engines were compiled for."""
    for dimension, field in {"B": "max_num_seqs", "T": "max_prefill_tokens", "Q": "max_prefill_tokens"}.items():
        wanted = getattr(config, field)
        for segment in (segment for model in models.present for segment in model.segments):
            if wanted > segment.most(dimension):
                raise ConfigError(
                    f"{field} = {wanted}: {segment.file.name} was built for at most {segment.most(dimension)}; "
                    f"build it again with --{field.replace('_', '-')} {wanted}"
                )


def choose_num_blocks(runtime: AnyRuntime, models: ModelPair, config: EngineConfig, num_partitions: int = 1) -> int:
    """Returns num_kv_blocks, else blocks for max_num_seqs full contexts, or as many as the runtime's memory holds.

    Raises ConfigError if they hold fewer than MIN_CONTEXT tokens; below a full context, `clipped_context` applies.
    """
    size, least = runtime.kv_block_size, min(models.max_context, MIN_CONTEXT)
    kv_bytes = runtime.kv_bytes(num_partitions, config)
    num_blocks, origin = config.num_kv_blocks, ""
    if num_blocks is None:
        fitting = kv_bytes // sum(runtime.bytes_per_block(model.spec) for model in models.present)
        num_blocks = min(config.max_num_seqs * -(-models.max_context // size), fitting)
        origin = f" in {kv_bytes >> 20} MiB, of {runtime.free_bytes() >> 20} MiB of free memory"
    if num_blocks < -(-least // size):
        needed = f"one context of {least} tokens needs at least {-(-least // size)} blocks of {size}"
        raise ConfigError(f"num_kv_blocks = {num_blocks}{origin}: {needed}")
    return num_blocks


def clipped_context(max_context: int, num_tokens: int) -> int:
    """Returns the context of requests: a longer one than all KV blocks hold, num_tokens, could never be served."""
    if num_tokens < max_context:
        log.warning(
            f"context: the models' {max_context} tokens do not fit; requests are limited to the {num_tokens} tokens of "
            "all KV blocks: free memory, choose smaller models, or set --num-kv-blocks"
        )
    return min(max_context, num_tokens)


# -- the drafter: the draft model, n-grams of the text so far, or both -------------------------------------------------
def served_models(manifest: EngineManifest, config: EngineConfig) -> ModelPair:
    """Returns the models to load; none for drafting if n-grams draft. Raises ConfigError for bad combinations."""
    if config.draft in ("model", BOTH) and manifest.draft is None:
        raise ConfigError(
            f"draft = {config.draft!r}: the engine directory has no draft model; use 'ngram', or build with one"
        )
    draft = None if config.draft == "ngram" else manifest.draft
    if draft is None and config.early_exit == "on":
        raise ConfigError(
            "early_exit = 'on': an exit scores the candidates of a draft model, and n-grams draft here; use 'auto'"
        )
    if config.draft == BOTH and config.early_exit == "on":
        raise ConfigError(f"early_exit = 'on' with draft = {BOTH!r}: n-gram chains have no exits; use 'auto'")
    if config.early_exit == "on" and config.policy != "none" and not manifest.exit_layers:
        raise ConfigError("early_exit = 'on': the engine has no exits; build it with --exit-layers, then profile it")
    target = manifest.target
    if draft is None and manifest.runtime_spec.is_cpu:  # elsewhere features are an input of the segments
        target = replace(target, spec=replace(target.spec, feature_layers=()))  # that a head would read
    return ModelPair(target, draft)


def serving_knowledge(engine_dir: Path, manifest: EngineManifest, config: EngineConfig) -> Knowledge:
    """Returns the profile's knowledge for policies. Raises ConfigError, also if the profile does not fit.

    If n-grams draft, the measured costs and acceptance of the draft model are left out.
    """
    models = served_models(manifest, config)
    knowledge = load_knowledge(engine_dir, manifest)
    if models.draft is None:
        return Knowledge(with_ngrams(knowledge.costs), knowledge.margins if manifest.draft is None else {})
    if config.acceptance == "rejection" and knowledge.costs.num_idle is None:
        # It needs the draft's probabilities: the host draws.
        return replace(knowledge, costs=replace(knowledge.costs, drafts_at_once=False))
    return knowledge


def make_proposer(
    models: ModelPair, config: EngineConfig, sampler: Sampler, times: PhaseTimes, block_tables: np.ndarray
) -> Proposer:
    """Returns the proposer. block_tables [max_num_seqs, max_blocks], by slot."""
    keeps_probs = config.acceptance == "rejection"
    look_ups = NgramProposer(times)
    if models.draft is None:
        return look_ups
    proposer = HeadProposer if models.draft.spec.reads_target else ModelProposer
    if models.draft.spec.block_size:
        proposer = BlockProposer
    model = proposer(sampler, times, block_tables, keeps_probs=keeps_probs)
    return JointProposer(model, look_ups, config.max_prefill_tokens) if config.draft == BOTH else model


# -- warming up --------------------------------------------------------------------------------------------------------
NUM_TOKENS = 24  # per answer: some steps of each policy, because the second call of a shape captures it
NUM_PROMPT_TOKENS = 16
TEMPERATURES = (0.0, 0.8)


def warm_up(engine: Engine, *, max_num_seqs: int, max_prefill_tokens: int) -> None:
    """Captures graphs and runs the batches on the calling thread. Raises FaserError if a step fails."""
    start = time.perf_counter()
    engine.bind_thread()
    for name, partition in engine.step_runner.partitions.items():
        log.info(f"compiling kernels and capturing graphs: {engine.metrics().num_graphs} graphs, now for {name}")
        capture_menus(partition, max_num_seqs)
    captured_s = time.perf_counter() - start
    observers = engine.step_runner.observers[:]
    engine.step_runner.observers.clear()
    num_batches = 0
    try:
        for num_batches, batch in enumerate(warm_up_batches(engine.limits, max_num_seqs, max_prefill_tokens), 1):
            log.info(f"warming up: batch {num_batches}, {len(batch)} requests")
            for request in batch:
                engine.submit(request)
            while engine.has_work:
                for output in engine.step():
                    if output.finish_reason is FinishReason.ERROR:
                        raise FaserError(f"warm-up with {len(batch)} requests: {output.error}")
    finally:
        engine.step_runner.observers[:] = observers
    engine.reset_metrics()
    found, words = engine.metrics(), "captured %d graphs in %.1f s (%d could not be captured)"
    _log.info(words, found.num_graphs, captured_s, found.num_failed_captures)
    _log.info("warmed up with %d batches; ready after %.1f s", num_batches, time.perf_counter() - start)


def capture_menus(partition: Partition, max_num_seqs: int) -> None:
    """Captures the calls of target, draft and draft loop, on the threads that will run them."""
    lanes: Any = partition.lanes
    on_target, on_draft = (call, call) if lanes is None else (lanes.on_target, lanes.on_draft)
    num_candidates = NUM_CANDIDATES if partition.target.exits else 0
    for on_lane, captured, arguments in (
        (on_target, partition.target, (num_candidates,)),
        (on_draft, partition.draft, (0,)),
        (on_draft, partition.draft_loop, (max_num_seqs, num_candidates)),
    ):
        if (capture := getattr(captured, "capture_menu", None)) is not None:  # all possible calls are known
            on_lane(partial(capture, *arguments))


def warm_up_batches(limits: Limits, max_num_seqs: int, max_prefill_tokens: int) -> Iterator[list[Request]]:
    """Yields one long prompt, then 1, 2, 4, ... requests at once, greedy and sampled, of random token ids."""
    rng = np.random.default_rng(0)

    def request(name: str, num_prompt: int, temperature: float) -> Request:
        num_prompt = max(1, min(num_prompt, limits.max_context - 1))
        num_tokens = max(1, min(NUM_TOKENS, limits.max_context - num_prompt))
        prompt = rng.integers(0, limits.vocab_size, num_prompt)
        return Request(f"warm-up {name}", prompt, num_tokens, Sampling(temperature=temperature))

    yield [request("prompt", max_prefill_tokens, 0.0)]
    for size in sorted({min(1 << power, max_num_seqs) for power in range(max_num_seqs.bit_length() + 1)}):
        for temperature in TEMPERATURES:
            yield [request(f"{size} {temperature} {index}", NUM_PROMPT_TOKENS, temperature) for index in range(size)]
