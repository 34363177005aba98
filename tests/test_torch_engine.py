"""Whole engines of runtime torch, on the CPU: the demo pair's tokens are those of ONNX Runtime, however decoded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engines.build import build_engines
from faser_backend.config import EngineConfig
from faser_backend.core.decision import Decision, PipelineMode
from faser_backend.core.request import Request
from faser_backend.device.cuda.programs import TorchPrograms
from faser_backend.device.cuda.runtime import CudaRuntime
from faser_backend.device.partition import split_name
from faser_backend.device.runtime import ModelPair
from faser_backend.manifest import EngineManifest
from faser_backend.pipeline.engine import Engine
from faser_backend.policy.registry import parse_policy
from faser_backend.serving.compose import assemble_on
from faser_backend.serving.demo_engine import DEMO_PAIR, demo_engine_dir
from faser_backend.serving.runtimes import open_runtime
from lab.bench.equality import make_requests
from tests.forcing import Forced, at_random, forced
from tests.harness import Driven, drive, guessed
from tests.torch_engines import CPU

MAX_TOKENS, EXIT_LAYERS = 24, (2, 4)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return make_requests(demo_engine_dir(), 6, MAX_TOKENS, 0.0)


@pytest.fixture(scope="module")
def expected(requests: list[Request]) -> dict[str, list[int]]:
    """What the CPU's runtime decodes plainly."""
    directory = demo_engine_dir()
    manifest = EngineManifest.load(directory)
    models = ModelPair(manifest.target, manifest.draft)
    runtime = open_runtime(directory, manifest, EngineConfig())
    return run(assemble_on(runtime, models, parse_policy("none", guessed), config()), requests).tokens


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> tuple[CudaRuntime, ModelPair]:
    directory = tmp_path_factory.mktemp("torch_engine") / "engine"
    build_engines(DEMO_PAIR / "target", DEMO_PAIR / "draft", directory, runtime="torch", exit_layers=EXIT_LAYERS)
    manifest = EngineManifest.load(directory)
    models = ModelPair(manifest.target, manifest.draft)
    programs = TorchPrograms.of_directory(directory, manifest.dtype, CPU)
    runtime = CudaRuntime(CPU, programs, models, manifest.kv_block_size, dtype=manifest.dtype, shares=None)
    return runtime, models


def config() -> EngineConfig:
    return EngineConfig(max_num_seqs=6, num_kv_blocks=96, max_prefill_tokens=64)


def run(engine: Engine, requests: list[Request]) -> Driven:
    driven = drive(engine, requests)
    engine.close()
    return driven


@pytest.mark.parametrize("policy", ["none", "fixed:4"])
def test_greedy_tokens_are_those_of_the_cpu(policy: str, runtime, requests, expected) -> None:
    opened, models = runtime
    engine = assemble_on(opened, models, parse_policy(policy, guessed), config())
    assert run(engine, requests).tokens == expected
    num_drafted = engine.metrics().num_drafted
    assert policy in {"survival", "faser"} or (num_drafted > 0) == (policy != "none")


def test_rows_that_leave_at_exits_change_no_token(runtime, requests, expected) -> None:
    pruner = at_random(np.random.default_rng(0), exits=(0, 1))
    policy = Forced(parse_policy("fixed:4", guessed), forced(pruner=pruner))
    policy.partitions = ("whole",)
    opened, models = runtime
    engine = assemble_on(opened, models, policy, config())
    assert run(engine, requests).tokens == expected
    assert engine.metrics().num_pruned > 20


def test_overlapped_steps_change_no_token(runtime, requests, expected) -> None:
    opened, models = runtime
    if not opened.splits:
        pytest.skip("needs two cores")
    split = split_name(*opened.splits[0])

    def change(decision: Decision) -> Decision:
        return replace(decision, mode=PipelineMode.RUN_AHEAD, partition=split)

    policy = Forced(parse_policy("fixed:4", guessed), change)
    policy.partitions = ("whole", split)
    assert run(assemble_on(opened, models, policy, config()), requests).tokens == expected
