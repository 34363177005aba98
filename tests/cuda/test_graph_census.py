"""The shapes of calls under every policy, mode and mixture of sampling: few, known in advance, never evicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from faser_backend.core.batch import RowBatch
from faser_backend.core.config import EngineConfig
from faser_backend.core.decision import WHOLE, Decision
from faser_backend.core.request import Request, Sampling
from faser_backend.cuda.call_shapes import (
    MAX_GRAPH_ROWS,
    PROMPT_ROWS,
    ROW_COUNTS,
    UNLIMITED,
    Buckets,
    CallBounds,
    RowMenu,
)
from faser_backend.cuda.draft_loop import TorchDraftLoop
from faser_backend.cuda.graphs import CallCache
from faser_backend.cuda.runner import CudaHeadRunner, CudaRunner
from faser_backend.engines.build import build_engines
from faser_backend.policy.early_exit import NUM_CANDIDATES
from faser_backend.policy.registry import parse_policy
from faser_backend.serving.warm_up import capture_menus
from tests.cuda.test_capture_rules import SPLIT, Opened, opened
from tests.support.eagle3_models import NUM_TARGET_LAYERS, write_head
from tests.support.forcing import random_everything
from tests.support.harness import drive, guessed, request
from tests.support.tiny_models import build_with_draft, write_checkpoint

CONFIG = EngineConfig(max_num_seqs=6, num_kv_blocks=400, max_prefill_tokens=48)
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, seed=3),
    Sampling(temperature=1.0, top_k=5, top_p=0.9, seed=4),
    Sampling(temperature=1.0, repetition_penalty=1.2, seed=5),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"max_position_embeddings": 256, "num_hidden_layers": 2}
    return build_with_draft(tmp_path_factory.mktemp("census"), sizes=sizes, runtime="torch", exit_layers=(1,))


def mixed_requests(seed: int, count: int = 6) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [
        request(f"r{i}", rng.integers(0, 97, int(rng.integers(1, 70))).tolist(), 7, sampling=SAMPLINGS[i % 4])
        for i in range(count)
    ]


def runners_of(each: Opened) -> Iterator[tuple[str, CudaRunner]]:
    for name, partition in each.engine.step_runner.partitions.items():
        for role in ("target", "draft"):
            yield f"{name} {role}", getattr(partition, role)


def on_some_split(seed: int):
    random: Any = random_everything(seed)

    def change(decision: Decision) -> Decision:
        changed: Any = random(decision)
        if changed.pruner is not None:
            changed.pruner.num_candidates = NUM_CANDIDATES  # as in every policy's pruner
        return replace(changed, partition=WHOLE if changed.partition == WHOLE else SPLIT)

    return change


POLICIES = ["none", "fixed:4", "goodput", "gp-lcb", "faser", "survival"]


def test_traffic_of_no_policy_adds_a_shape_to_those_captured_before(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(directory, monkeypatch, policy="fixed:4", change=on_some_split(1), config=CONFIG) as each:
        capture_all(each)
        before = each.counts.num_graphs
        forced: Any = each.engine.step_runner.scheduler.policy
        for seed, policy in enumerate(POLICIES):
            forced.inner = parse_policy(policy, guessed)
            drive(each.engine, mixed_requests(seed), seed=seed)
            assert each.counts.num_graphs == before and each.counts.num_failed_captures == 0, policy
        assert not each.machine.broken and each.machine.num_first_under_capture == 0
        for name, partition in each.engine.step_runner.partitions.items():
            runner, loop = cast(Any, partition.target), cast(Any, partition.draft_loop)
            for index, calls in enumerate(runner._calls):
                has_scores = index in runner.exits
                assert len(calls) == 20 + 15 * has_scores and not calls._eager, f"{name}, segment {index}"
            assert isinstance(loop, TorchDraftLoop) and not loop._chains._eager
            assert len(loop._chains) == 4 * 2 * 2, "1, 2, 4, 8 sequences; filters; candidates"
        each.engine.close()


@pytest.mark.parametrize("is_known", [True, False])
def test_traffic_of_a_head_adds_none_to_those_captured_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """Chains on the device and, for requests with rules, call by call. Features are joined in calls captured by rows
    alone. Without the menu live traffic captures."""
    source = write_checkpoint(tmp_path / "source", max_position_embeddings=256, num_hidden_layers=NUM_TARGET_LAYERS)
    head = write_head(tmp_path / "head")
    build_engines(source, head, tmp_path / "engine", runtime="torch", exit_layers=(1,), kv_block_size=4)
    with opened(tmp_path / "engine", monkeypatch, policy="fixed:4", change=lambda each: each, config=CONFIG) as each:
        if is_known:
            capture_all(each)
        before = each.counts.num_graphs
        drive(each.engine, mixed_requests(0), seed=0)
        assert (each.counts.num_graphs == before) == is_known and each.counts.num_failed_captures == 0
        assert not each.machine.broken
        (partition,) = each.engine.step_runner.partitions.values()
        runner, loop = cast(Any, partition.draft), cast(Any, partition.draft_loop)
        assert isinstance(runner, CudaHeadRunner)
        if is_known:
            assert each.machine.num_first_under_capture == 0
            assert [len(calls) for calls in runner._calls] == [15, 20]
            assert len(loop._chains) == 4 * 2 * 2
        each.engine.close()


def capture_all(each: Opened) -> None:
    each.engine.bind_thread()
    capture_menus(each.engine.step_runner.partitions.values(), CONFIG.max_num_seqs)


def test_a_menu_holds_every_call_up_to_its_largest() -> None:
    menu = RowMenu(64)
    assert len(menu.menu(0)) == 20 and len(menu.menu(4)) == len(ROW_COUNTS) == 15
    for count in range(1, MAX_GRAPH_ROWS + 1):
        for num_logits in {0, 1, count}:
            rows = RowBatch(
                np.zeros(count, np.int64),
                np.array([0, count]),
                np.array([7]),
                np.zeros((1, 64), np.int64),
                np.arange(num_logits),
            )
            bounds = menu.of(rows, 0)
            assert bounds in menu.menu(0) and bounds.num_rows >= count and bounds.num_logit_rows >= num_logits
            assert bounds.num_rows < 2 * count + (count == 1)
            assert (bounds.num_logit_rows == 0) == (num_logits == 0 and bounds.num_rows >= PROMPT_ROWS)
        assert menu.of_decode(count, 5) in menu.menu(0)
    large = RowBatch(
        np.zeros(600, np.int64), np.array([0, 600]), np.array([0]), np.zeros((1, 64), np.int64), np.zeros(0, np.int64)
    )
    assert menu.of(large, 0) == CallBounds(600, 1, 600, 64, 0, 0)


def test_the_census_sees_a_shape_that_depends_on_lengths(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If calls were keyed by more than rows, live traffic would capture."""
    monkeypatch.setattr(
        RowMenu, "of", lambda self, rows, num_candidates: Buckets(4, UNLIMITED).of(rows, num_candidates)
    )
    with opened(directory, monkeypatch, policy="fixed:4", change=on_some_split(3), config=CONFIG) as each:
        capture_all(each)
        before = each.counts.num_graphs
        drive(each.engine, mixed_requests(1), seed=2)
        assert each.counts.num_graphs > before
        calls: list[CallCache] = [calls for _, runner in runners_of(each) for calls in runner._calls]
        assert max(map(len, calls)) > 35
        each.engine.close()
