"""Engines of runtime llvm end to end: no policy, batch or preemption changes a token; numpy uses one thread."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from faser_backend.core.config import EngineConfig
from faser_backend.core.decision import Decision, PipelineMode
from faser_backend.core.request import Request
from faser_backend.cpu.runtime import LlvmRuntime
from faser_backend.device.partition import split_name
from faser_backend.device.runtime import ModelPair
from faser_backend.engines.build import build_engines
from faser_backend.lab.checks.equality import make_requests
from faser_backend.manifest import EngineManifest
from faser_backend.pipeline.engine import Engine
from faser_backend.policy.registry import parse_policy
from faser_backend.serving.compose import assemble_on
from faser_backend.serving.model_source import DEMO_PAIR
from faser_backend.serving.runtimes import identity_of, open_runtime
from tests.support.forcing import Forced, at_random, forced
from tests.support.harness import drive, guessed
from tests.support.serving_pair import build_pair

MAX_TOKENS, EXIT_LAYERS = 40, (2, 4)
Tokens = dict[str, list[int]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llvm_engine") / "engine"
    options = {"weights": "int8", "draft_weights": "int8", "exit_layers": EXIT_LAYERS, "max_context": 256}
    build_engines(DEMO_PAIR / "target", DEMO_PAIR / "draft", path, runtime="llvm", **options)  # pyright: ignore[reportArgumentType]
    return path


@pytest.fixture(scope="module")
def opened(directory: Path) -> tuple[LlvmRuntime, ModelPair]:
    manifest = EngineManifest.load(directory)
    runtime = open_runtime(directory, manifest, EngineConfig())
    assert isinstance(runtime, LlvmRuntime)
    return runtime, ModelPair(manifest.target, manifest.draft)


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["greedy", "sampled"])
def requests(request: pytest.FixtureRequest, directory: Path) -> list[Request]:
    return make_requests(directory, 6, MAX_TOKENS, request.param)


@pytest.fixture(scope="module")
def expected(opened: tuple[LlvmRuntime, ModelPair], requests: list[Request]) -> Tokens:
    """Returns the tokens of plain decoding, one request at a time."""
    engine = assemble_on(*opened, parse_policy("none", guessed), config(max_num_seqs=1))
    return run(engine, requests)


def config(*, max_num_seqs: int = 6, num_kv_blocks: int = 128) -> EngineConfig:
    return EngineConfig(max_num_seqs=max_num_seqs, num_kv_blocks=num_kv_blocks, max_prefill_tokens=64)


def run(engine: Engine, requests: list[Request]) -> Tokens:
    tokens = drive(engine, requests).tokens
    engine.close()
    return tokens


@pytest.mark.parametrize("policy", ["none", "fixed:4", "survival"])
def test_policies_and_batches_change_no_token(policy: str, opened, requests, expected) -> None:
    engine = assemble_on(*opened, parse_policy(policy, guessed), config())
    assert run(engine, requests) == expected
    metrics = engine.metrics()
    assert policy in {"survival", "faser"} or (metrics.num_drafted > 0) == (policy != "none")
    # `survival` drafts by measured times.
    assert policy != "fixed:4" or 0 < metrics.num_accepted < metrics.num_drafted


def test_preemption_changes_no_token(opened, requests, expected) -> None:
    runtime, models = opened
    of_one_context = -(-models.target.spec.max_context // runtime.kv_block_size)
    engine = assemble_on(*opened, parse_policy("fixed:4", guessed), config(num_kv_blocks=of_one_context))
    assert run(engine, requests) == expected
    assert engine.metrics().num_preemptions > 0


def test_rows_that_leave_at_exits_change_no_token(opened, requests, expected) -> None:
    policy = Forced(parse_policy("fixed:4", guessed), forced(pruner=at_random(np.random.default_rng(0), exits=(0, 1))))
    policy.partitions = ("whole",)
    engine = assemble_on(*opened, policy, config())
    assert run(engine, requests) == expected
    assert engine.metrics().num_pruned > 10


def test_overlapped_steps_change_no_token(opened, requests, expected) -> None:
    runtime, models = opened
    if not runtime.splits:
        pytest.skip("needs two cores")
    split = split_name(*runtime.splits[0])

    def change(decision: Decision) -> Decision:
        return replace(decision, mode=PipelineMode.RUN_AHEAD, partition=split)

    policy: Forced = Forced(parse_policy("fixed:4", guessed), change)
    policy.partitions = ("whole", split)
    assert run(assemble_on(runtime, models, policy, config()), requests) == expected


def test_splits_cost_no_memory_and_times_are_kept_by_who_computes(opened) -> None:
    runtime, _ = opened
    assert "weights" not in runtime.splits_note
    assert set(identity_of("llvm")) == {"cpu", "num_cores", "matrix_units", "numba", "llvmlite"}


CODE = """
import sys
from pathlib import Path
import numpy as np
from threadpoolctl import threadpool_info
from faser_backend.core.config import EngineConfig
from faser_backend.manifest import EngineManifest
from faser_backend.serving.compose import open_engine

numpys = {each["filepath"] for each in threadpool_info()}  # other packages bring libraries of their own

def threads():
    return max(each["num_threads"] for each in threadpool_info() if each["filepath"] in numpys)

before = threads()
engine = open_engine(Path(sys.argv[1]), EngineManifest.load(Path(sys.argv[1])), EngineConfig.from_options())
print(before, threads())
engine.close()
"""


def test_an_open_engine_leaves_one_thread_to_numpy(tmp_path: Path):
    """Numpy's other threads would stay busy on the engine's cores."""
    environment = {"PATH": "", "PYTHONPATH": str(Path(__file__).parents[2]), "OPENBLAS_NUM_THREADS": "2"}
    ended = subprocess.run(
        [sys.executable, "-c", CODE, str(build_pair(tmp_path))],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.stdout.split() == ["2", "1"], ended.stderr
