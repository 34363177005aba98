"""Whole engines that sample in torch and draft whole chains, on the CPU: tokens and frontiers of the demo pair."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from faser_backend.config import EngineConfig
from faser_backend.core.decision import PipelineMode
from faser_backend.core.ports import DraftLoop, Sampler
from faser_backend.core.request import Request
from faser_backend.device.cpu_runtime import OrtRuntime
from faser_backend.device.cuda.draft_loop import TorchDraftLoop
from faser_backend.device.cuda.runner import CudaRunner
from faser_backend.device.cuda.sampler import TorchSampler
from faser_backend.device.partition import split_name
from faser_backend.device.runtime import ModelPair, OpenRunner
from faser_backend.manifest import EngineManifest
from faser_backend.policy.registry import parse_policy
from faser_backend.serving.compose import assemble
from faser_backend.serving.demo_engine import DEMO_PAIR, demo_engine_dir
from scripts.check_equality import make_requests
from tests.forcing import Forced, at_random, random_rule
from tests.harness import drive, guessed
from tests.test_draft_loop import recorded_frontiers
from tests.torch_engines import CPU, TorchCpuRuntime, write_torch_engine

MAX_TOKENS = 24
CONFIG = EngineConfig(max_num_seqs=6, num_kv_blocks=96, max_prefill_tokens=64)


class LoopRuntime(TorchCpuRuntime):
    """Samples in torch, and drafts whole chains where `has_loops`."""

    has_loops = True

    def open_sampler(self, vocab_size: int, max_num_seqs: int) -> TorchSampler:  # type: ignore[override]
        return TorchSampler(vocab_size, max_num_seqs, CPU)

    def open_draft_loop(self, runner: OpenRunner, sampler: Sampler) -> DraftLoop | None:
        assert isinstance(runner, CudaRunner) and isinstance(sampler, TorchSampler)
        return TorchDraftLoop(runner, sampler) if self.has_loops else None


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoopRuntime, ModelPair]:
    directory = tmp_path_factory.mktemp("torch_engine")
    models = ModelPair(
        write_torch_engine(DEMO_PAIR / "target", directory, name="target", exit_layers=(4,)),
        write_torch_engine(DEMO_PAIR / "draft", directory, name="draft"),
    )
    return LoopRuntime(directory, models, kv_block_size=16), models


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Of every kind but those with rules, and one of those, which ends first."""
    directory = demo_engine_dir()
    made = make_requests(directory, 3, MAX_TOKENS, 0.0) + make_requests(directory, 3, MAX_TOKENS, 0.8)
    made = [replace(r, request_id=f"r{i}") for i, r in enumerate(made)]
    made[4] = replace(made[4], sampling=replace(made[4].sampling, top_p=0.9, top_k=50))
    made[5] = replace(made[5], sampling=replace(made[5].sampling, repetition_penalty=1.2), max_tokens=5)
    return made


@pytest.fixture(scope="module")
def expected(requests: list[Request]) -> dict[str, list[int]]:
    """What ONNX Runtime and NumpySampler decode plainly."""
    directory = demo_engine_dir()
    manifest = EngineManifest.load(directory)
    models = ModelPair(manifest.target, manifest.draft)
    runtime = OrtRuntime(directory, models, manifest.kv_block_size)
    engine = assemble(runtime, models, parse_policy("none", guessed), CONFIG)
    tokens = drive(engine, requests).tokens
    engine.close()
    return tokens


@pytest.mark.parametrize("has_trim", [False, True])
@pytest.mark.parametrize("mode", PipelineMode)
def test_engines_with_and_without_loops(demo, requests, expected, mode: PipelineMode, has_trim: bool) -> None:
    runtime, models = demo
    split = split_name(*runtime.splits[0]) if runtime.splits else ""
    if mode is not PipelineMode.SERIAL and not split:
        pytest.skip("needs two cores")
    name = "whole" if mode is PipelineMode.SERIAL else split
    trim = random_rule(np.random.default_rng(4)) if has_trim else None
    seen = []
    for has_loops in (False, True):
        runtime.has_loops = has_loops
        pruner = at_random(np.random.default_rng(0), exits=(0,)) if has_trim else None
        forced = {"mode": mode, "partition": name, "trim": trim, "pruner": pruner}
        policy = Forced(parse_policy("fixed:4", guessed), lambda decision, forced=forced: replace(decision, **forced))
        policy.partitions = ("whole", name)
        engine = assemble(runtime, models, policy, CONFIG)
        frontiers = recorded_frontiers(engine.stepper)
        assert drive(engine, requests).tokens == expected
        engine.close()
        seen.append(frontiers)
    for without, with_loops in zip(*seen, strict=True):
        drafted, num_drafted, num_rows, _, candidates = zip(without, with_loops, strict=True)
        assert np.array_equal(*num_drafted) and np.array_equal(*num_rows)
        assert np.array_equal(*drafted) and (candidates[0] is None or np.array_equal(*candidates))
