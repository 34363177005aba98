"""The first part on a GPU: checks that serving keeps the rules of captures, and times replayed steps.

Takes at most three minutes. It covers a capture that fails beside good ones, an engine in its loop with a first prompt
of 1,000 tokens, and overlapping phases. Each check has its own result, so that a failure hides no other.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from faser_backend.core.config import EngineConfig
from faser_backend.core.request import Request, Sampling
from faser_backend.engines.build import build_engines
from faser_backend.lab.gpu.harness import Context, Result
from faser_backend.lab.gpu.pairs import DTYPE, checked_device, opened_pair, write_untrained_head
from faser_backend.lab.gpu.serve import write_planted
from faser_backend.lab.gpu.speed import copy_bytes_per_s, median_us
from faser_backend.lab.shapes import PAIRS, TINY_PAIR, weight_count
from faser_backend.pipeline.rows import run_model
from faser_backend.serving.parameters import ServingOptions
from faser_backend.triton.engine_host import EngineHost

FIRST_PROMPT = 1000  # tokens
NUM_ANSWER_TOKENS = 64
NUM_ANSWERS = 48  # after the first; half of them are sampled
ANSWER_S = 120.0
STEP_ROWS = (1, 8, 64)


def run(context: Context) -> Result:
    """Returns checks by name (`ok`, or an error's first line), what engines logged of their graphs, and step times with
    their lower bounds."""
    checked_device(context)
    found: Result = {"checks": [], "engines": [], "steps": []}
    with tempfile.TemporaryDirectory(prefix="faser-contact-") as folder, ExitStack() as stack:
        engine_dir = Path(folder, "engine")

        def check(name: str, work: Callable[[], Any]) -> None:
            start = time.monotonic()
            try:
                work()
                word = "ok"
            except Exception as error:
                word = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
            seconds = round(time.monotonic() - start, 2)
            found["checks"].append({"check": name, "found": word, "is_right": word == "ok", "s": seconds})
            context.save(found)

        if context.is_cuda:
            check("a failed capture, then a good one", _failed_capture)
        dtype, head_dir = DTYPE[context.device], Path(folder, "engine-of-head")
        target, draft = _write_pair(context, Path(folder))
        build = partial(build_engines, target, runtime="torch", dtype=dtype)
        check("engine built", lambda: build(draft, engine_dir))
        # The head is untrained and shares the target's embedding.
        head = write_untrained_head(target, Path(folder, "head"), context.seed)
        check("engine with a draft head built", lambda: build(head, head_dir))
        answers: dict[str, dict[str, list[int]]] = {}
        for name, config in _configs(context).items():
            directory, row = head_dir if name == "head" else engine_dir, {"pipeline": name}
            found["engines"].append(row)
            check(f"served, {name}", partial(_serve, context, directory, config, answers.setdefault(name, {}), row))
        check("answers of all are those of plain decoding", lambda: _compare(answers))
        check("steps beside their floors", lambda: _time_steps(context, stack, found))
    return found


def _write_pair(context: Context, folder: Path) -> tuple[Path, Path]:
    """Writes a pair whose logits lie close, so that a bit changes answers; the draft has half of the layers."""
    spec = TINY_PAIR.target if context.is_tiny else PAIRS["qwen3-8b/0.6b"].draft
    spec = replace(spec, vocab_size=2048, num_layers=4 if context.is_tiny else 8, max_context=2048)
    draft, device = replace(spec, num_layers=spec.num_layers // 2), checked_device(context)
    write_planted(folder / "draft", draft, None, device, context.seed)
    return write_planted(folder / "target", spec, None, device, context.seed), folder / "draft"


def _failed_capture() -> None:
    """Makes the host wait under capture, as a mistake would: that call runs without a graph, the next one with one."""
    from faser_backend.core.ports import GraphCounts
    from faser_backend.cuda.graphs import GraphCapturer

    rows = torch.ones((64, 64), device="cuda", dtype=torch.bfloat16)
    with torch.cuda.stream(torch.cuda.Stream()):
        capturer, sums = GraphCapturer(GraphCounts()), []
        first, last = torch.empty_like(rows), torch.empty_like(rows)

        def double(out: torch.Tensor) -> None:
            torch.add(rows, rows, out=out)

        double(torch.empty_like(rows))  # loads the kernel
        before = capturer.capture(lambda: double(first), "a good call")
        failing = capturer.capture(lambda: sums.append(float((rows + rows).float().sum())), "a call that waits")
        failing()
        after = capturer.capture(lambda: double(last), "a call behind it")
        for replay in (before, after, before):
            replay()
        torch.cuda.current_stream().synchronize()
    assert capturer.counts == GraphCounts(2, 1), f"counted {capturer.counts}"
    assert sums == [2 * 64.0**2] and bool((first == 2).all()) and bool((last == 2).all()), "wrong numbers"


def _configs(context: Context) -> dict[str, EngineConfig]:
    limits = {"max_num_seqs": 4 if context.is_tiny else 32, "num_kv_blocks": 1200}
    modes = ("serial", "ping_pong") if context.is_tiny else ("serial", "ping_pong", "run_ahead")
    options = {mode: {"policy": "fixed:4", "pipeline": mode, "early_exit": "off"} for mode in modes}
    plain: dict[str, dict[str, Any]] = {"plain": {"policy": "none"}, "alone": {"policy": "none", "max_num_seqs": 1}}
    options = plain | options | {"head": {"policy": "fixed:4"}}
    return {name: EngineConfig.from_options(**limits | own) for name, own in options.items()}


def _serve(
    context: Context, engine_dir: Path, config: EngineConfig, written: dict[str, list[int]], row: Result
) -> None:
    """Serves the long prompt alone, then others at once, on the serving thread."""
    start = time.monotonic()
    reporter: Any = SimpleNamespace(report=lambda *_: None, observe=lambda *_: None)
    with closing(EngineHost(ServingOptions(engine_dir=engine_dir), config, reporter)) as host:
        ready_s, engine = time.monotonic() - start, host.loop.engine
        graphs = engine.metrics().num_graphs
        others = np.random.default_rng(0).integers(1, 300, NUM_ANSWERS if context.is_cuda else 4)
        _answer(host, [FIRST_PROMPT], written)
        _answer(host, others.tolist(), written)
        metrics = engine.metrics()
        row |= {
            "ready_s": round(ready_s, 2),
            "graphs": graphs,
            "graphs_by_traffic": metrics.num_graphs - graphs,
            "drafted": metrics.num_drafted,
            "accepted": metrics.num_accepted,
            "failed_captures": metrics.num_failed_captures,
            "failed_steps": metrics.num_failed_steps,
        }
    assert metrics.num_graphs == graphs, f"traffic captured {metrics.num_graphs - graphs} graphs"
    assert not metrics.num_failed_captures and not metrics.num_failed_steps, "captures or steps failed"


def _answer(host: EngineHost, lengths: list[int], written: dict[str, list[int]]) -> None:
    hub, ended, rng = host.loop.subscribe(), 0, np.random.default_rng(len(lengths))
    for index, length in enumerate(lengths):
        written[name := f"{index}: {length} tokens"] = []
        prompt = rng.integers(0, host.handshake.model.limits.vocab_size, length)
        sampling = Sampling(temperature=0.8 * (index % 2), seed=index)
        hub.submit(Request(name, prompt, NUM_ANSWER_TOKENS, sampling), "")
    while ended < len(lengths):
        outputs = hub.outputs.get(timeout=ANSWER_S)
        assert outputs is not None, "the engine ended"
        for output in outputs:
            assert output.error is None, output.error
            written[output.request_id] += output.token_ids
            ended += output.is_final
    hub.close()


def _compare(answers: dict[str, dict[str, list[int]]]) -> None:
    plain = answers["plain"]
    for name, written in answers.items():
        different = [prompt for prompt in plain if plain[prompt] != written[prompt]]
        assert not different, f"{name}: other tokens for prompts of {', '.join(different)}"


def _time_steps(context: Context, stack: ExitStack, found: Result) -> None:
    """Times replayed calls of an 8B target and its draft, beside the time of reading their weights once."""
    from faser_backend.core.batch import RowBatch

    runtime, models = opened_pair(context, TINY_PAIR if context.is_tiny else PAIRS["qwen3-8b/0.6b"], stack)
    runtime.bind_step_thread()
    rate = copy_bytes_per_s(context.device, (1 << 20) if context.is_tiny else (1 << 30))
    for role, model in zip(("target", "draft"), models.present, strict=True):
        runner = runtime.open_runner(model, runtime.menu.whole, runtime.open_pool(model, 1024))
        stack.callback(runner.close)
        for count in STEP_ROWS:
            nothing = np.zeros(count, np.int64)
            tables = np.arange(count)[:, None] % 1024
            rows = RowBatch(nothing, np.arange(count + 1), nothing, tables, np.arange(count))
            step = partial(run_model, runner, rows)
            eager, _, replayed = (step().clone() for _ in range(3))  # the second captures
            assert torch.equal(eager, replayed), f"{role}, {count} rows: a replayed graph gives other numbers"
            if context.is_cuda:
                torch.cuda.set_sync_debug_mode("error")  # a warm call waits for nothing
                step()
                torch.cuda.set_sync_debug_mode("default")
            us = median_us(context.device, step)
            floor_us = weight_count(model.spec) * (2 if context.is_cuda else 4) / rate * 1e6
            found["steps"].append(
                {"model": role, "rows": count, "us": us, "floor_us": floor_us, "share_of_floor": floor_us / us}
            )
            context.save(found)
