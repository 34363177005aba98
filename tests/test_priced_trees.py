"""Trees as the price rule weighs them: when they are chosen, and that tokens stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from faser_backend.config import EngineConfig
from faser_backend.core.decision import Score
from faser_backend.core.record import StepRecord
from faser_backend.core.request import FinishReason
from faser_backend.manifest import EngineManifest
from faser_backend.policy.batch_times import BatchTimes
from faser_backend.policy.price_rule import PriceRule
from faser_backend.policy.speculation import MAX_ADAPTIVE_TOKENS, Knowledge
from faser_backend.policy.tree_yield import CUTS, TreeYield
from faser_backend.serving import drafting
from faser_backend.serving.explain import Explainer
from tests.forced_engine import check_what_is_in_flight
from tests.harness import FakeEngine, drive, guessed, open_fake, request
from tests.test_engine import alone, random_requests

# -- whatever is chosen, tokens are those of plain decoding -----------------------------------------------


def has_tree(records: list[StepRecord]) -> np.ndarray:
    return np.array([record.frontier.tree is not None for record in records])


class AnyTrees(TreeYield):
    """Cuts trees anywhere."""

    rng = np.random.default_rng(0)

    @property
    def is_known(self) -> bool:
        return True

    def score(self, times: BatchTimes) -> Score:
        return super().score(times)._replace(floor=float(self.rng.choice(CUTS)))

    def level_chance(self, times: BatchTimes, tokens_per_us: float) -> float:
        return float(self.rng.choice([0.05, 0.3, 0.9]))


class Eager(PriceRule):
    """Holds trees of any cut for the best there is."""

    def __init__(self, knowledge: Knowledge) -> None:
        super().__init__(knowledge, MAX_ADAPTIVE_TOKENS, with_modes=True)
        self._trees = AnyTrees(knowledge.num_tree_nodes)

    def _speed(self, score: Score) -> float:
        return 100.0 * super()._speed(score) if score.is_tree else super()._speed(score)


def open_priced(*, is_eager: bool, num_nodes: int = 8, **options: Any) -> tuple[FakeEngine, list[StepRecord]]:
    """A fake engine under `faser` and its records. is_eager: trees are chosen whatever they take."""
    knowledge = replace(guessed(), num_tree_nodes=num_nodes)
    policy = Eager(knowledge) if is_eager else PriceRule(knowledge, MAX_ADAPTIVE_TOKENS, with_modes=True)
    fake = open_fake(policy, num_layers=(2, 2), **options)
    check_what_is_in_flight(fake)
    records: list[StepRecord] = []
    fake.stepper.observers.append(records.append)
    return fake, records


@pytest.fixture(scope="module")
def cases():
    return [(requests, alone(requests)) for requests in (random_requests(seed, 12) for seed in range(2))]


@pytest.mark.parametrize("num_blocks", [200, 26])
@pytest.mark.parametrize("is_eager", [True, False])
def test_tokens_equal_plain_decoding(cases, is_eager: bool, num_blocks: int) -> None:
    """Greedy and sampled requests that come and go, share prefixes and are preempted."""
    for seed, (requests, expected) in enumerate(cases):
        fake, records = open_priced(is_eager=is_eager, num_blocks=num_blocks)
        assert drive(fake.engine, requests, seed=seed).tokens == expected
        assert has_tree(records).any() or not is_eager
        assert (fake.engine.metrics().num_preemptions > 0) == (num_blocks < 200)
        trees = [record for record in records if record.frontier.tree is not None]
        assert len({record.num_tokens.size for record in trees}) > 3 or not is_eager
        assert len({record.plan.decision.tree for record in trees}) > 3 or not is_eager


def test_cancelled_requests_and_clients_chains_change_no_token(cases) -> None:
    requests, expected = cases[1]
    guesses = {key: tokens[:3] + [(t + 1) % 24 for t in tokens[3:]] for key, tokens in expected.items()}
    mixed = [
        replace(each, draft_ids=tuple(guesses[each.request_id])) if index % 3 == 0 else each
        for index, each in enumerate(requests)
    ]
    fake, records = open_priced(is_eager=True, num_blocks=60)
    result = drive(fake.engine, mixed, seed=5, cancel={each.request_id: 3 for each in requests[1::4]})
    assert has_tree(records).any() and any(record.frontier.is_client is not None for record in records)
    for request_id, tokens in result.tokens.items():
        is_cancelled = result.final[request_id].finish_reason is FinishReason.CANCELLED
        assert tokens == expected[request_id][: len(tokens) if is_cancelled else None]


def test_explain_names_trees() -> None:
    told: list[str] = []
    fake, _ = open_priced(is_eager=True)
    fake.stepper.observers.append(Explainer(told.append).observe)
    drive(fake.engine, [request("a", [1, 2, 3], 40)])
    assert any("1 request(s), runs trees on whole" in line for line in told)
    assert any(line.startswith(" * trees") for table in told for line in table.splitlines())
    told.clear()
    fake, _ = open_priced(is_eager=False, num_nodes=0)
    fake.stepper.observers.append(Explainer(told.append).observe)
    drive(fake.engine, [request("a", [1, 2, 3], 40)])
    assert told and not any("trees" in line for line in told)


# -- where trees are weighed -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("runtime", "is_head", "options", "num_nodes"),
    [
        ("llvm", False, {}, 8),
        ("llvm", True, {}, 8),
        ("llvm", False, {"early_exit": "off", "pipeline": "serial"}, 8),
        ("onnxruntime", False, {}, 8),
        ("onnxruntime", True, {}, 0),
        ("torch", False, {}, 0),
        ("torch", True, {}, 0),
        ("tensorrt", False, {}, 0),
        ("tensorrt_rtx", False, {}, 0),
        ("llvm", False, {"acceptance": "rejection"}, 0),
        ("llvm", False, {"early_exit": "on"}, 0),
        ("llvm", False, {"pipeline": "run_ahead"}, 0),
        ("llvm", False, {"pipeline": "ping_pong"}, 0),
        ("llvm", False, {"draft": "model+ngram"}, 8),
        ("llvm", False, {"draft": "ngram"}, 0),
    ],
)
def test_where_trees_are_weighed(
    runtime: str, is_head: bool, options: dict[str, str], num_nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "load_knowledge", lambda engine_dir, manifest: guessed())
    draft = SimpleNamespace(spec=SimpleNamespace(reads_target=is_head))
    manifest = cast(EngineManifest, SimpleNamespace(runtime=runtime, target=None, draft=draft, exit_layers=(2,)))
    config = EngineConfig.from_options(policy="faser", **options)
    assert drafting.serving_knowledge(Path(), manifest, config).num_tree_nodes == num_nodes
