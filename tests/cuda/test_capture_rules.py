"""The rules of graph capture, on a fake that has them: real warm-up, scheduler, lanes and runners obey them.

The code that they replaced breaks them.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from faser_backend.core.config import EngineConfig
from faser_backend.core.decision import WHOLE, Decision, PipelineMode
from faser_backend.core.ports import GraphCounts
from faser_backend.cuda.graphs import CallCache, RepeatedLaunch
from faser_backend.cuda.runtime import CudaRuntime
from faser_backend.cuda.segment import ProgramSource
from faser_backend.cuda.streams import open_menu
from faser_backend.cuda.torch_programs import TorchPrograms
from faser_backend.device.runtime import ModelPair
from faser_backend.manifest import EngineManifest
from faser_backend.pipeline.engine import Engine
from faser_backend.policy.registry import parse_policy
from faser_backend.serving.compose import assemble_on, warm_up
from faser_backend.serving.engine_loop import EngineLoop, Subscription
from tests.support.capture_machine import CaptureMachine, MachineCapturer, watch
from tests.support.fake_cuda import FakeDriver
from tests.support.forcing import Change, Forced
from tests.support.harness import guessed, request
from tests.support.tiny_models import build_with_draft

torch.set_num_threads(1)
CONFIG = EngineConfig(max_num_seqs=2, num_kv_blocks=300, max_prefill_tokens=256)
SPLIT = "16/116"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"max_position_embeddings": 2048, "num_hidden_layers": 1}
    return build_with_draft(tmp_path_factory.mktemp("captures"), sizes=sizes, runtime="torch", kv_block_size=16)


@dataclass
class Opened:
    machine: CaptureMachine
    counts: GraphCounts
    engine: Engine

    def warm_up(self) -> None:
        warm_up(self.engine, max_num_seqs=CONFIG.max_num_seqs, max_prefill_tokens=CONFIG.max_prefill_tokens)


def ping_pong(decision: Decision) -> Decision:
    """Decodes in ping-pong on the split if there are two sequences."""
    if len(decision.num_draft_tokens) < 2:
        return decision
    return replace(decision, mode=PipelineMode.PING_PONG, partition=SPLIT)


def torch_programs(directory: Path, models: ModelPair) -> ProgramSource:
    return TorchPrograms.of_directory(directory, "fp32", torch.device("cpu"), models.target)


@contextmanager
def opened(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    policy: str = "fixed:3",
    change: Change = ping_pong,
    config: EngineConfig = CONFIG,
    programs: Callable[[Path, ModelPair], ProgramSource] = torch_programs,
) -> Iterator[Opened]:
    """Opens an engine on the machine. change: of every decision."""
    manifest = EngineManifest.load(directory)
    models = ModelPair(manifest.target, manifest.draft)
    machine = CaptureMachine()
    watch(monkeypatch, machine)
    shares = open_menu(machine, 0, FakeDriver)
    runtime = CudaRuntime(
        torch.device("cpu"),
        programs(directory, models),
        models,
        manifest.kv_block_size,
        dtype="fp32",
        shares=shares,
        make_capturer=lambda counts: MachineCapturer(machine, counts),
    )
    forced = Forced(parse_policy(policy, guessed), change)
    forced.partitions = (WHOLE, SPLIT)
    engine = assemble_on(runtime, models, forced, config, on_close=runtime.close)
    yield Opened(machine, runtime.graph_counts, engine)


def serve(loop: EngineLoop, lengths: list[int]) -> list[str]:
    """Serves requests with prompts of these lengths at once. Returns how they ended."""
    rng, hub = np.random.default_rng(0), Subscription(loop)
    for length in lengths:
        hub.submit(request(f"r{length}", rng.integers(0, 97, length).tolist(), 12), "")
    ends: list[str] = []
    while len(ends) < len(lengths):
        outputs = hub.outputs.get(timeout=60)
        assert outputs is not None
        ends += [output.finish_reason.value for output in outputs if output.finish_reason is not None]
    return ends


class TestServing:
    def test_a_served_engine_keeps_the_rules_and_captures_nothing_on_live_traffic(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        with opened(directory, monkeypatch) as each:
            monkeypatch.setattr(each.engine, "prepare", each.warm_up)
            loop = EngineLoop(each.engine)
            before = replace(each.counts)
            assert before.num_graphs == 4 * 30 + 2 * 8 and "graphs in" in caplog.text
            assert serve(loop, [1000, 300]) == ["length", "length"]
            assert serve(loop, [240]) == ["length"]
            loop.close()
        assert each.counts == before and before.num_failed_captures == 0
        assert not each.machine.broken


def bound_machine() -> CaptureMachine:
    """Returns a machine with a thread that is bound to a stream."""
    machine = CaptureMachine()
    open_menu(machine, 0, FakeDriver).menu.whole.bind_current_thread()
    return machine


class TestFailedCaptures:
    def test_one_costs_its_graph_alone(self, caplog: pytest.LogCaptureFixture) -> None:
        machine, results = bound_machine(), []
        capturer = MachineCapturer(machine, GraphCounts())
        waits = capturer.capture(lambda: self.waiting(machine, results), "a call that waits")
        waits()
        waits()
        assert results == [1, 1], "it runs as it is"
        assert caplog.text.count("a call that waits: cannot be captured as a CUDA graph and runs without") == 1
        machine.product()
        good = RepeatedLaunch(machine.product, capturer, "a good call")
        for _ in range(3):
            good()
        assert capturer.counts == GraphCounts(num_graphs=1, num_failed_captures=1)
        assert not machine.left_open and not machine.broken

    def test_garbage_is_collected_before_and_after_a_capture_only(self) -> None:
        machine, collecting = bound_machine(), []
        capturer = MachineCapturer(machine, GraphCounts())
        capturer.capture(lambda: collecting.append(gc.isenabled()), "a good call")
        capturer.capture(lambda: (collecting.append(gc.isenabled()), self.waiting(machine, [])), "a call that waits")
        assert collecting == [False, False] and gc.isenabled() and capturer.counts.num_failed_captures == 1
        gc.disable()  # a program's own choice stays
        try:
            capturer.capture(machine.product, "another")
            assert not gc.isenabled()
        finally:
            gc.enable()

    def test_an_error_that_stays_is_raised(self) -> None:
        machine = bound_machine()
        capturer = MachineCapturer(machine, GraphCounts())

        def fault() -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        with pytest.raises(RuntimeError, match="illegal memory access"):
            capturer.capture(fault, "a call")

    def waiting(self, machine: CaptureMachine, results: list[int]) -> None:
        machine.product()
        machine.wait()
        results.append(1)


class TestGraphsThatStay:
    def test_the_first_shapes_keep_their_graphs_and_others_run_without(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("faser_backend.cuda.graphs.MAX_GRAPHS", 3)
        machine, counts, seen = bound_machine(), GraphCounts(), []
        capturer = MachineCapturer(machine, counts)
        cache = CallCache[int, RepeatedLaunch](
            lambda shape, captures: RepeatedLaunch(machine.product, capturer if captures else None, str(shape))
        )
        for shape in (1, 2, 3, 4, 3, 5, 6, 2, 3, 1):
            for _ in range(3):
                cache[shape]()
            seen.append(counts.num_graphs)
        assert seen == [1, 2] + [3] * 8 and list(cache) == [1, 2, 3]
        assert caplog.text.count("others run without graphs") == 1

    def test_the_tensors_that_a_graph_reads_live_as_long_as_its_call(self) -> None:
        machine = bound_machine()
        rows = torch.ones(2)
        alive = weakref.ref(rows)
        call = RepeatedLaunch(lambda rows=rows: machine.product(), MachineCapturer(machine, GraphCounts()), "a call")
        del rows
        for _ in range(3):
            call()
        assert alive() is not None
