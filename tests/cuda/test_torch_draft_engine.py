"""Whole engines that sample in torch and draft whole chains, on the CPU: tokens and frontiers of the demo pair."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from faser_backend.core.config import EngineConfig
from faser_backend.core.decision import PipelineMode
from faser_backend.core.ports import DraftLoop, Sampler
from faser_backend.core.request import Request
from faser_backend.cuda.draft_loop import TorchDraftLoop
from faser_backend.cuda.runtime import CudaRuntime
from faser_backend.cuda.sampler import TorchSampler
from faser_backend.cuda.torch_programs import TorchPrograms
from faser_backend.device.partition import split_name
from faser_backend.device.runtime import ModelPair, OpenRunner
from faser_backend.lab.checks.equality import make_requests
from faser_backend.manifest import EngineManifest
from faser_backend.policy.registry import parse_policy
from faser_backend.serving.compose import assemble_on
from faser_backend.serving.demo_engine import DEMO_PAIR, demo_engine_dir
from faser_backend.serving.runtimes import open_runtime
from tests.cuda.test_draft_loop import recorded_frontiers
from tests.support.fakes import CountingClock, SequentialLanes
from tests.support.forced_engine import POLICIES, both_partitions
from tests.support.forcing import Change, Forced, at_random, random_rule
from tests.support.harness import drive, guessed
from tests.support.torch_engines import CPU, write_torch_engine

MAX_TOKENS = 14
CONFIG = EngineConfig(max_num_seqs=6, num_kv_blocks=96, max_prefill_tokens=64)


class SwitchedRuntime(CudaRuntime):
    """A runtime that drafts whole chains if `has_loops`, otherwise token by token."""

    has_loops = True

    def open_draft_loop(self, runner: OpenRunner, sampler: Sampler) -> DraftLoop | None:
        loop = super().open_draft_loop(runner, sampler)
        assert isinstance(loop, TorchDraftLoop) and isinstance(sampler, TorchSampler)
        return loop if self.has_loops else None


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[SwitchedRuntime, ModelPair]:
    directory = tmp_path_factory.mktemp("torch_engine")
    models = ModelPair(
        write_torch_engine(DEMO_PAIR / "target", directory, name="target", exit_layers=(4,)),
        write_torch_engine(DEMO_PAIR / "draft", directory, name="draft"),
    )
    programs = TorchPrograms.of_directory(directory, "fp32", CPU)
    return SwitchedRuntime(CPU, programs, models, 16, dtype="fp32", shares=None), models


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Returns requests of every kind without rules, and one with rules, which ends first."""
    directory = demo_engine_dir()
    made = make_requests(directory, 3, MAX_TOKENS, 0.0) + make_requests(directory, 3, MAX_TOKENS, 0.8)
    made = [replace(r, request_id=f"r{i}") for i, r in enumerate(made)]
    made[4] = replace(made[4], sampling=replace(made[4].sampling, top_p=0.9, top_k=50))
    made[5] = replace(made[5], sampling=replace(made[5].sampling, repetition_penalty=1.2), max_tokens=5)
    return made


@pytest.fixture(scope="module")
def expected(requests: list[Request]) -> dict[str, list[int]]:
    """Returns the plain tokens of the CPU's runtime and NumpySampler."""
    directory = demo_engine_dir()
    manifest = EngineManifest.load(directory)
    models = ModelPair(manifest.target, manifest.draft)
    runtime = open_runtime(directory, manifest, EngineConfig())
    engine = assemble_on(runtime, models, parse_policy("none", guessed), CONFIG)
    tokens = drive(engine, requests).tokens
    engine.close()
    return tokens


def run(
    demo, requests: list[Request], policy: str, change: Change, split: str, *, has_exits: bool
) -> tuple[dict[str, list[int]], list]:
    """Returns tokens and frontiers. A clock that counts its readings, and alternating lanes: no decision depends on
    time."""
    runtime, models = demo
    forced = Forced(parse_policy(policy, both_partitions), change)
    forced.partitions = ("whole", split)
    engine = assemble_on(runtime, models, forced, CONFIG)
    step_runner = engine.step_runner
    step_runner.clock = CountingClock()
    assert isinstance(step_runner.partitions, dict)
    if split in step_runner.partitions:
        lanes = SequentialLanes(verifies_first=True)
        step_runner.partitions[split] = replace(step_runner.partitions[split], lanes=lanes)
    frontiers = recorded_frontiers(step_runner)
    tokens = drive(engine, requests).tokens
    assert engine.metrics().num_pruned > 0 or not has_exits
    engine.close()
    return tokens, frontiers


# Every policy and every mode; test_draft_loop.py combines them.
CASES = [(policy, mode, False) for policy, mode in zip(POLICIES, itertools.cycle(PipelineMode), strict=False)]
CASES += [("fixed:4", mode, True) for mode in PipelineMode]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_engines_with_and_without_loops(demo, requests, expected, case: tuple[str, PipelineMode, bool]) -> None:
    """The last cases also have a trim rule and exits."""
    policy, mode, has_trim = case
    split = split_name(*demo[0].splits[0]) if demo[0].splits else ""
    if mode is not PipelineMode.SERIAL and not split:
        pytest.skip("needs two cores")
    fields: dict = {"mode": mode, "partition": "whole" if mode is PipelineMode.SERIAL else split}
    seen = []
    for has_loops in (False, True):
        demo[0].has_loops = has_loops
        if has_trim:
            fields["trim"] = random_rule(np.random.default_rng(4))
            fields["pruner"] = at_random(np.random.default_rng(0), exits=(0,))
        tokens, frontiers = run(
            demo, requests, policy, lambda decision: replace(decision, **fields), split, has_exits=has_trim
        )
        assert tokens == expected
        seen.append(frontiers)
    for without, with_loops in zip(*seen, strict=True):
        drafted, num_drafted, num_rows, _, candidates = zip(without, with_loops, strict=True)
        assert np.array_equal(*num_drafted) and np.array_equal(*num_rows)
        assert np.array_equal(*drafted) and (candidates[0] is None or np.array_equal(*candidates))
