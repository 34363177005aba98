"""The shapes of calls under every policy, mode and mixture of sampling: few, known in advance; their bounds."""

from dataclasses import replace
from operator import le
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from faser_backend.core.adapter import module_shapes
from faser_backend.core.config import EngineConfig
from faser_backend.core.decision import WHOLE, Decision, PipelineMode
from faser_backend.core.errors import ConfigError
from faser_backend.core.model import ModelSpec
from faser_backend.core.request import Request, Sampling
from faser_backend.cuda.call_shapes import (
    DIMENSIONS,
    MAX_GRAPH_ROWS,
    MAX_PROMPT_ROWS,
    MIXED_LOGIT_ROWS,
    PROMPT_ROWS,
    ROW_COUNTS,
    UNLIMITED,
    CallBounds,
    CallMenu,
    exact_bounds,
)
from faser_backend.cuda.draft_loop import TorchDraftLoop
from faser_backend.cuda.runner import CudaBlockRunner, CudaHeadRunner
from faser_backend.cuda.segment import ProgramSource
from faser_backend.cuda.tensorrt_programs import ProfileRange, bucket_limits, choose_profile, profiles_of_split
from faser_backend.device.runtime import ModelPair
from faser_backend.engines.build import build_engines
from faser_backend.engines.tensorrt_buckets import CallLimits, TensorRtOptions, call_buckets
from faser_backend.manifest import BucketSpec, FileSpec, ModelEngine, SegmentSpec
from faser_backend.policy.early_exit import NUM_CANDIDATES
from faser_backend.policy.registry import parse_policy
from faser_backend.policy.speculation import Knowledge
from faser_backend.runtime_spec import RUNTIMES
from faser_backend.serving.compose import capture_menus, check_call_limits, with_prompt_rows
from tests.cuda.test_capture_rules import SPLIT, Opened, opened, torch_programs
from tests.support.block_models import LAYERS, write_drafter
from tests.support.eagle3_models import NUM_TARGET_LAYERS, write_head
from tests.support.forcing import random_everything
from tests.support.harness import drive, guessed, request
from tests.support.ort_engines import OrtPrograms, graphs_are_engines
from tests.support.tiny_models import build_with_draft, make_rows, write_checkpoint

MAX_SHAPES = 20  # of a compiled engine
CONFIG = EngineConfig(max_num_seqs=6, num_kv_blocks=400, max_prefill_tokens=48)
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, seed=3),
    Sampling(temperature=1.0, top_k=5, top_p=0.9, seed=4),
    Sampling(temperature=1.0, repetition_penalty=1.2, seed=5),
]
SIZES = {"max_position_embeddings": 256, "num_hidden_layers": 2}
LIMITS = CallLimits(CONFIG.max_num_seqs, None, CONFIG.max_prefill_tokens)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_with_draft(tmp_path_factory.mktemp("census"), sizes=SIZES, runtime="torch", exit_layers=(1,))


def limited_programs(directory: Path, models: ModelPair) -> ProgramSource:
    """Returns programs that take the calls of engines with the project's kernels, which TensorRT compiled."""
    programs = torch_programs(directory, models)
    bucket = call_buckets(models.target.spec, 4, LIMITS)[-1]
    limits = CallBounds(*(bucket.ranges[name][2] for name in DIMENSIONS))
    programs.limits = lambda *_: limits._replace(max_rows=UNLIMITED.max_rows)  # type: ignore[method-assign]
    return programs


def mixed_requests(seed: int, count: int = 6) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [
        request(f"r{i}", rng.integers(0, 97, int(rng.integers(1, 70))).tolist(), 7, sampling=SAMPLINGS[i % 4])
        for i in range(count)
    ]


def knows_split() -> Knowledge:
    """Returns the guessed times, on the split too."""
    costs = guessed().costs
    on_split = {(model, SPLIT): segments for (model, _), segments in costs.segments.items()}
    return Knowledge(replace(costs, segments={**costs.segments, **on_split}))


def drive_well(each: Opened, requests: list[Request], seed: int) -> None:
    """Drives the engine; no step may fail."""
    drive(each.engine, requests, seed=seed)
    assert each.engine.metrics().num_failed_steps == 0


def on_some_split(seed: int, *, has_split: bool = True):
    random: Any = random_everything(seed)

    def change(decision: Decision) -> Decision:
        changed: Any = random(decision)
        if changed.pruner is not None:
            changed.pruner.num_candidates = NUM_CANDIDATES  # as in every policy's pruner
        if changed.partition == WHOLE or not has_split:
            return replace(changed, partition=WHOLE, mode=PipelineMode.SERIAL)
        return replace(changed, partition=SPLIT)

    return change


EXPECTED = {"torch": (30, 45, 4), "tensorrt": (10, 14, 4), "tensorrt_rtx": (17, 20, 6)}  # shapes, with scores, chains
POLICIES = ["none", "fixed:4", "gp-lcb", "faser", "survival"]


@pytest.mark.parametrize("kind", ["torch", "tensorrt", "tensorrt_rtx"])
def test_traffic_of_no_policy_adds_a_shape_to_those_captured_before(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    programs = {"torch": torch_programs, "tensorrt": limited_programs, "tensorrt_rtx": OrtPrograms}[kind]
    if kind == "tensorrt_rtx":
        graphs_are_engines(monkeypatch)
        options: Any = {"runtime": kind, "tensorrt": TensorRtOptions(LIMITS)}
        directory = build_with_draft(tmp_path, sizes=SIZES, exit_layers=(1,), **options)
    change = on_some_split(1, has_split=kind != "tensorrt_rtx")  # whose engines have no profiles for it
    with opened(directory, monkeypatch, policy="fixed:4", change=change, config=CONFIG, programs=programs) as each:
        capture_all(each)
        before = each.counts.num_graphs
        forced: Any = each.engine.step_runner.scheduler.policy
        for seed, policy in enumerate(POLICIES):
            forced.inner = parse_policy(policy, knows_split)
            drive_well(each, mixed_requests(seed), seed)
            assert each.counts.num_graphs == before and each.counts.num_failed_captures == 0, policy
        assert not each.machine.broken
        for name, partition in each.engine.step_runner.partitions.items():
            runner, loop = cast(Any, partition.target), cast(Any, partition.draft_loop)
            for index, calls in enumerate(runner._calls):
                has_scores = index in runner.exits
                assert len(calls) == EXPECTED[kind][has_scores], f"{name}, segment {index}"
            assert isinstance(loop, TorchDraftLoop)
            assert len(loop._chains) == len(loop._steps) * 2 * 2, "filters; candidates"
            assert len(loop._steps) == EXPECTED[kind][2], "1, 2, 4, 8 sequences, or 1, 4, 6 in two widths"
        each.engine.close()


@pytest.mark.parametrize("is_known", [False, True])
def test_calls_with_adapters_are_captured_if_there_is_one_before(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_known: bool
) -> None:
    """Adapters of later on replay these graphs. Without one, rows with adapters run without graphs, and the log says
    so."""
    with opened(directory, monkeypatch, policy="fixed:4", change=on_some_split(2), config=CONFIG) as each:
        target = cast(Any, each.engine.step_runner.partitions[WHOLE].target)
        size, width = module_shapes(target.spec)["q"]
        for index in range(3):
            if index == int(is_known):
                capture_all(each)
                before = each.counts.num_graphs
            pair = np.ones((size, index + 1), np.float16), np.ones((index + 1, width), np.float16)
            each.engine.adapters.load(f"{index}", {(index % 2, "q"): pair})
        requests = [replace(one, lora_name=f"{index % 3}") for index, one in enumerate(mixed_requests(1))]
        drive_well(each, [*requests[1:], mixed_requests(2)[0]], 1)
        assert each.counts.num_graphs == before and not each.machine.broken
        assert [len(calls) for calls in target._calls] == [45 * (1 + is_known), 30 * (1 + is_known)]
        assert ("run without CUDA graphs" in caplog.text) == (not is_known)
        each.engine.close()


@pytest.mark.parametrize(("is_block", "is_known"), [(False, True), (False, False), (True, True)])
def test_traffic_of_a_head_or_block_drafter_adds_none_to_those_captured_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_block: bool, is_known: bool
) -> None:
    """Chains on the device and, for requests with rules, call by call. Features are joined in calls captured by rows
    alone. Without the menu live traffic captures."""
    source = write_checkpoint(tmp_path / "source", max_position_embeddings=256, num_hidden_layers=NUM_TARGET_LAYERS)
    draft = write_head(tmp_path / "head")
    if is_block:
        reads = {"num_target_layers": None, "dflash_config": {"mask_token_id": 5, "target_layer_ids": LAYERS}}
        draft = write_drafter(tmp_path / "blocks", vocab_size=97, **reads)
    build_engines(source, draft, tmp_path / "engine", runtime="torch", exit_layers=(1,), kv_block_size=4)
    with opened(tmp_path / "engine", monkeypatch, policy="fixed:4", change=lambda each: each, config=CONFIG) as each:
        if is_known:
            capture_all(each)
        before = each.counts.num_graphs
        drive_well(each, mixed_requests(0), 0)
        assert (each.counts.num_graphs == before) == is_known and each.counts.num_failed_captures == 0
        assert not each.machine.broken
        (partition,) = each.engine.step_runner.partitions.values()
        runner, loop = cast(Any, partition.draft), cast(Any, partition.draft_loop)
        assert type(runner) is (CudaBlockRunner if is_block else CudaHeadRunner)
        if is_known:
            assert [len(calls) for calls in runner._calls] == [19, 30]
            assert is_block or len(loop._chains) == 4 * 2 * 2
        each.engine.close()


def capture_all(each: Opened) -> None:
    each.engine.bind_thread()
    for partition in each.engine.step_runner.partitions.values():
        capture_menus(partition, CONFIG.max_num_seqs)


def test_a_menu_holds_every_call_up_to_its_largest() -> None:
    menu = CallMenu(16, UNLIMITED._replace(num_blocks=128), is_padded=False)
    assert len(menu.menu(0)) == 30 and len(menu.menu(4)) == len(ROW_COUNTS) == 15
    tokens, table = np.zeros(1100, np.int64), np.zeros((1, 128), np.int64)
    for count in range(1, MAX_PROMPT_ROWS + 1):
        for num_logits in {0, 1, min(count, MIXED_LOGIT_ROWS), count if count <= MAX_GRAPH_ROWS else 0}:
            rows = make_rows([tokens], [7], [count], table, np.arange(num_logits))
            bounds = menu.of(rows, 0)
            assert bounds in menu.menu(0) and bounds.num_rows >= count and bounds.num_logit_rows >= num_logits
            assert bounds.num_rows < 2 * count + (count == 1)
            assert (bounds.num_logit_rows == 0) == (num_logits == 0 and bounds.num_rows >= PROMPT_ROWS)
            assert num_logits > MIXED_LOGIT_ROWS or bounds.num_logit_rows <= MIXED_LOGIT_ROWS
        assert menu.of_decode(min(count, MAX_GRAPH_ROWS), 5) in menu.menu(0)
    large = make_rows([tokens], [0], [1041], table, np.zeros(0, np.int64))
    assert menu.of(large, 0) == CallBounds(1048, 1, 1041, 66, 0, 0)


@pytest.mark.parametrize("max_num_seqs", [1, 3, 32, 33, 1024])
@pytest.mark.parametrize("max_prefill_tokens", [1, 256, 1024])
@pytest.mark.parametrize("is_padded", [True, False])
def test_compiled_engines_have_few_shapes_that_hold_random_calls(
    max_num_seqs: int, max_prefill_tokens: int, is_padded: bool
) -> None:
    spec = ModelSpec(2, 32, 4, 2, 8, 48, 97, 4096, 1e4, 1e-5, True)
    profiles = []
    for bucket in call_buckets(spec, 16, CallLimits(max_num_seqs, None, max_prefill_tokens)):
        ranges = {**bucket.ranges, "Q": bucket.ranges["Q"] if is_padded else (1, 1, UNLIMITED.max_rows)}
        sizes = ({name: (ranges[name][end],) for name in DIMENSIONS} for end in range(3))
        profiles.append(ProfileRange(len(profiles), *sizes))
    limits = CallBounds(*(profiles[-1].largest[name][0] for name in DIMENSIONS))
    longest = {name: (size,) for name, size in zip(DIMENSIONS, limits._replace(num_logit_rows=0), strict=False)}
    assert max_prefill_tokens == 1 or choose_profile(profiles, longest, "prefill").index == 2
    menu = CallMenu(16, limits, is_padded)
    shapes = [*menu.menu(0), *menu.menu(8)]
    assert len(menu.menu(0)) <= MAX_SHAPES and all(map(menu.holds, shapes))
    assert len({shape._replace(num_logit_rows=0) for shape in shapes}) <= MAX_SHAPES, "of a segment with exits"
    rng = np.random.default_rng(max_num_seqs + max_prefill_tokens)
    for index in range(200):
        counts = rng.integers(1, 17, int(rng.integers(1, max_num_seqs + 1)))
        if is_prompt := index % 3 == 0:
            ends = np.linspace(0, rng.integers(1, max_prefill_tokens + 1), counts.size + 1).astype(int)
            counts = np.unique(np.diff(ends).clip(1))[-3:]
        starts, tables = rng.integers(0, 4096 - counts.max() + 1, counts.size), np.zeros((counts.size, 256), np.int64)
        logit_rows = np.arange(0 if is_prompt else counts.sum())
        rows = make_rows([np.zeros(4096, np.int64)] * counts.size, starts, counts, tables, logit_rows)
        for num_candidates in (0,) if is_prompt else (0, 8):
            shape = menu.of(rows, num_candidates)
            needed = exact_bounds(rows, 16, num_candidates)
            assert all(map(le, needed, shape))
            choose_profile(profiles, {name: (size,) for name, size in zip(DIMENSIONS, shape, strict=False)}, "some do")
            is_usual = counts.size == 1 or (16 * max_num_seqs <= MAX_GRAPH_ROWS and not is_prompt)
            if rows.num_rows <= MAX_GRAPH_ROWS and (is_usual or not is_padded):
                assert shape in menu.menu(num_candidates)


SPEC = ModelSpec(1, 8, 1, 1, 8, 8, 97, 64, 1e4, 1e-5, True)


def segment(*buckets: BucketSpec) -> SegmentSpec:
    return SegmentSpec(FileSpec("target.0.engine", "0" * 64, 1), 0, 1, (), (), buckets)


def bucket(split: str = "", **most: int) -> BucketSpec:
    return BucketSpec("verify", {name: (1, 1, value) for name, value in most.items()}, split)


def test_a_share_runs_its_own_profiles_and_the_others_where_it_has_none() -> None:
    buckets = [bucket(T=8), bucket(T=64), bucket("8/124", T=32), bucket("8/124", T=16)]
    assert profiles_of_split(buckets, "") == [0, 1]
    assert profiles_of_split(buckets, "8/124") == [2, 3]
    assert profiles_of_split(buckets, "16/116") == [0, 1]
    assert profiles_of_split([], "8/124") is None


def test_limits_are_what_every_segment_takes() -> None:
    first = segment(bucket(T=64, B=8, MB=32), bucket(T=256, B=4, MB=64), bucket("8/124", T=16, B=2, MB=8))
    last = segment(bucket(T=128, B=16, MB=64, R=128))
    free = 1 << 30
    assert bucket_limits([first, last], "") == CallBounds(128, 8, free, 64, 128, free)
    assert bucket_limits([first, last], "8/124") == CallBounds(16, 2, free, 8, 128, free)
    assert bucket_limits([first, segment()], "") is None


@pytest.mark.parametrize(("runtime", "most", "usual"), [("torch", 0, 1024), ("llvm", 0, 256), ("tensorrt", 512, 384)])
def test_gpus_read_1024_prompt_tokens_per_step_if_engines_take_them(runtime: str, most: int, usual: int) -> None:
    model = ModelEngine(SPEC, None, (segment(bucket(T=64, B=8), bucket(T=most, B=4, Q=384)) if most else segment(),))
    manifest: Any = SimpleNamespace(target=model, draft=None, runtime_spec=RUNTIMES[runtime])
    assert with_prompt_rows(EngineConfig(), manifest).max_prefill_tokens == usual
    assert with_prompt_rows(EngineConfig(max_prefill_tokens=256), manifest).max_prefill_tokens == 256


def test_limits_of_serving_are_within_those_of_the_build() -> None:
    model = ModelEngine(SPEC, None, (segment(bucket(T=64, B=8, MB=32), bucket(T=512, B=4, MB=64, Q=256)),))
    models = ModelPair(model, model)
    check_call_limits(models, EngineConfig.from_options(max_num_seqs=8, max_prefill_tokens=256))
    for name, value in (("max_num_seqs", 9), ("max_prefill_tokens", 257)):
        limit, flag = value - 1, name.replace("_", "-")
        with pytest.raises(
            ConfigError, match=f"{name} = {value}: .* was built for at most {limit}; .* --{flag} {value}"
        ):
            check_call_limits(models, EngineConfig.from_options(**{"max_num_seqs": 4, name: value}))
