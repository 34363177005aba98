"""Rejection sampling keeps the target's distribution under any causal pruning, trimming, drafting ahead or guesses.

Joint chi-squares of the first tokens through the real scheduler, pipeline, sampler and acceptance. The test must fail
decisively for planted mistakes: rules that use later tokens, accept too often, or share noise.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from faser_backend.core.batch import SamplingRows
from faser_backend.core.decision import Decision, PipelineMode, Pruner
from faser_backend.core.frontier import Acceptance, Frontier
from faser_backend.core.plan import StepRecord
from faser_backend.core.request import Sampling
from faser_backend.pipeline import acceptance, step, trim, verify
from faser_backend.pipeline.engine import Engine
from faser_backend.pipeline.rows import DecodeBatch
from faser_backend.policy.calibration import DrafterChoice
from faser_backend.policy.registry import parse_policy
from tests.pipeline.test_engine import random_requests
from tests.support.fakes import HashRunner, SequentialLanes
from tests.support.forcing import (
    Change,
    Forced,
    always,
    at_random,
    by_parity,
    calibrated,
    forced,
    outside_top,
    peeking,
    random_everything,
    rule,
)
from tests.support.harness import BLOCK, FakeEngine, drive, guessed, open_fake, request

SERIAL, RUN_AHEAD, PING_PONG = PipelineMode
VOCAB, LENGTH, COUNT = 4, 3, 1100
LAYERS = (1, 1, 1)
PASSES, FAILS = 1e-3, 1e-6
PROMPT, SURE = [1, 3], 2
TEMPERATURE = 4.0  # flattens the fakes' logits to a standard deviation of about 1
# A draft token behind its best rival has a chance of 0.4, else 0.95. One row of two weak tokens does not pay, of a weak
# and a strong one it does: the best choice for row 1 depends on draft token 2.
STEPPED = rule([0.4, 0.95], [1.0, 1.65, 1.65, 1.65], price=1.0, first_knot=-1e-6, knot_step=1e-6)


class SureStart(HashRunner):
    """A target whose first token, which no draft foresees, is certain: all that varies is tested."""

    def logits_after(self, tokens: np.ndarray) -> np.ndarray:
        lead = 1e4 if tokens.size == len(PROMPT) else 0.0
        return super().logits_after(tokens) + lead * (np.arange(self.vocab_size) == SURE)


@lru_cache
def exact_probabilities(target: type[HashRunner], vocab_size: int, length: int) -> np.ndarray:
    """Returns [V ** length] probabilities of the first `length` tokens."""
    model = target(8, BLOCK, vocab_size)
    found = []
    for tokens in itertools.product(range(vocab_size), repeat=length):
        probability = 1.0
        for position in range(length):
            logits = model.logits_after(np.array(PROMPT + list(tokens[:position]))).astype(np.float64) / TEMPERATURE
            weights = np.exp(logits - logits.max())
            probability *= weights[tokens[position]] / weights.sum()
        found.append(probability)
    return np.array(found)


def observed(
    engine: Engine,
    vocab_size: int,
    length: int,
    count: int,
    *,
    num_at_once: int,
    draft_of: Callable[[int], tuple[int, ...]] = lambda _: (),
) -> np.ndarray:
    """Returns [V ** length] counts over `count` requests with different seeds, num_at_once in a batch.

    draft_of: the client's draft for the request with this seed.
    """
    tokens: dict[str, list[int]] = {}
    pending = [
        request(
            str(seed), PROMPT, length, sampling=Sampling(temperature=TEMPERATURE, seed=seed), draft_ids=draft_of(seed)
        )
        for seed in range(count)
    ]
    while pending or engine.has_work:
        while pending and engine.num_waiting < num_at_once:
            engine.submit(pending.pop())
        for output in engine.step():
            assert output.error is None
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    index = [int(np.ravel_multi_index(drawn, (vocab_size,) * length)) for drawn in tokens.values()]
    return np.bincount(index, minlength=vocab_size**length)


def p_value(counts: np.ndarray, exact: np.ndarray) -> float:
    """Returns the p-value of a chi-square test; outcomes with fewer than 5 expected counts are pooled."""
    expected = exact * counts.sum()
    rare = expected < 5
    pooled_counts = np.append(counts[~rare], counts[rare].sum())
    pooled_expected = np.append(expected[~rare], expected[rare].sum())
    return float(chisquare(pooled_counts, pooled_expected).pvalue)


def guess(seed: int) -> tuple[int, ...]:
    """Gives two requests of three a client's draft that is independent of the model."""
    return () if seed % 3 == 0 else (seed % VOCAB, seed // VOCAB % VOCAB)[: seed % 3]


@dataclass(frozen=True)
class World:
    """A way to draw requests' first tokens."""

    change: Change
    policy: str = "fixed:2"
    drafter: dict[str, Any] = field(default_factory=dict)  # options of open_fake
    has_clients: bool = False
    has_sure_start: bool = True  # not with clients, who draft the first token too
    uses_rejection: bool = True
    num_at_once: int = 48
    count: int = COUNT

    @property
    def modes(self) -> set[PipelineMode]:
        return {self.change(Decision([3])).mode for _ in range(20)}

    def p_value(self) -> tuple[float, FakeEngine]:
        fake = open_fake(
            Forced(parse_policy(self.policy, guessed), self.change),
            lanes=SequentialLanes(verifies_first=True),
            num_layers=LAYERS,
            uses_rejection=self.uses_rejection,
            vocab_size=VOCAB,
            draft_noise=4.0,
            max_num_seqs=self.num_at_once,
            num_blocks=8 * self.num_at_once,
            max_prefill_tokens=20 if self.has_clients else 200,
            **self.drafter,
        )
        if self.change(Decision([3])).pruner is not None:  # calls that read prompts too take no exits
            fake.targets[0].max_mixed_rows = 0
        target = SureStart if self.has_sure_start and not self.has_clients else HashRunner
        for runner in fake.targets:
            runner.__class__ = target
        seen: Counter[str] = Counter()

        def note(record: StepRecord) -> None:
            seen["ahead"] += len(set(record.plan.decodes) & set(record.plan.drafts))
            seen["mixed"] += record.has_clients and bool(record.frontier.num_drafted[~record.frontier.is_client].any())

        fake.step_runner.observers.append(note)
        # Running ahead of two draft tokens needs room for a third, and for the token that ends its round.
        length = LENGTH + (target is SureStart) + (RUN_AHEAD in self.modes and not self.has_clients)
        options = {"draft_of": guess} if self.has_clients else {}
        counts = observed(fake.engine, VOCAB, length, self.count, num_at_once=self.num_at_once, **options)
        if self.modes == {RUN_AHEAD} and not self.has_clients:
            assert seen["ahead"] > self.count // 20, "nothing ran ahead"
        assert (seen["mixed"] > 10) == (self.has_clients and self.policy != "none")
        return p_value(counts, exact_probabilities(target, VOCAB, length)), fake


EXITS: dict[str, Callable[[], Pruner]] = {
    "parity": lambda: by_parity(num_candidates=3),
    "always": lambda: always(num_candidates=3),
    "exit margin, two exits": lambda: outside_top(-0.5, exits=(0, 1), num_candidates=2),
    "as calibrated": lambda: calibrated(0.5, num_candidates=3),
    "random": lambda: at_random(np.random.default_rng(3), num_candidates=3),
}
WORLDS = {
    "plain": World(forced(), "none"),
    "samples that match": World(forced(), uses_rejection=False),
    "serial": World(forced()),
    "serial, first tokens": World(forced(), has_sure_start=False),
    **{f"exits: {name}": World(forced(SERIAL, pruner=make()), "fixed:3") for name, make in EXITS.items()},
    **{f"exits ahead: {name}": World(forced(RUN_AHEAD, pruner=EXITS[name]())) for name in ("parity", "as calibrated")},
    "run-ahead": World(forced(RUN_AHEAD), "fixed:1"),
    "ping-pong": World(forced(PING_PONG)),
    **{f"trimming, {mode.value}": World(forced(mode, trim=STEPPED)) for mode in PipelineMode},
    "any mix": World(random_everything(0, longest=3, most_candidates=VOCAB), "fixed:3"),
    "clients alone": World(forced(), "none", has_clients=True),
    **{f"clients, {mode.value}": World(forced(mode), has_clients=True) for mode in PipelineMode},
    "clients, any mix": World(random_everything(1, longest=3, most_candidates=3), has_clients=True),
    "n-grams": World(forced(), drafter={"has_ngrams": True}),
    "n-grams beside a model": World(forced(), "fixed:1", drafter={"has_both": True}),
}


@pytest.fixture(autouse=True)
def takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepts every n-gram match."""
    monkeypatch.setattr(DrafterChoice, "takes_look_up", lambda self, found, *_: found.num_drafted > 0)


@pytest.mark.parametrize("name", WORLDS)
def test_the_targets_distribution_is_kept(name: str):
    world = WORLDS[name]
    p, fake = world.p_value()
    assert p > PASSES
    metrics = fake.engine.metrics()
    assert metrics.num_accepted > COUNT // 20 or name == "plain"
    if name.startswith("exits"):
        assert metrics.num_pruned > COUNT // 10
    if name.startswith("trimming"):
        num_whole = sum(LAYERS) * (metrics.num_drafted + metrics.num_emitted - metrics.num_accepted)
        assert metrics.num_row_layers < num_whole, "nothing was trimmed"
    if name.startswith("n-grams"):
        sources = ("model", "ngram") if "model" in name else ("ngram",)
        assert all(metrics.num_accepted_by_source[source] > 15 for source in sources)


@pytest.mark.parametrize("seed", range(2))
def test_no_two_draws_share_their_noise(seed: int):
    """Whatever is discarded, preempted or drafted again: each (request, position, purpose, round) is drawn once."""
    fake = open_fake(
        Forced(parse_policy("fixed:4", guessed), random_everything(seed)),
        lanes=SequentialLanes(verifies_first=True),
        num_layers=LAYERS,
        num_blocks=26,
        uses_rejection=True,
    )
    sampler, drawn = fake.step_runner.sampler, Counter()
    real = sampler.uniforms

    def noting(rows: SamplingRows, purpose: int, num_steps: np.ndarray) -> np.ndarray:
        request_of = {sequence.slot: sequence.request.request_id for sequence in fake.step_runner.scheduler.running}
        for slot, position, number in zip(rows.slots.tolist(), rows.positions.tolist(), num_steps, strict=True):
            drawn[request_of[slot], position, purpose, int(number)] += 1
        return real(rows, purpose, num_steps)

    sampler.uniforms = noting  # type: ignore[method-assign]
    drive(fake.engine, random_requests(seed, 12), seed=seed)
    assert len(drawn) > 300 and max(drawn.values()) == 1
    assert fake.engine.metrics().num_preemptions > 0


# -- negative controls -----------------------------------------------------------------------------------


def wrong_at_pruned_rows(redraw: Callable[[np.ndarray, np.ndarray], np.ndarray]):
    """Wraps accept_by_rejection: replaces x_N where row N was pruned; redraw(p, q) gives the weights."""
    real = acceptance.accept_by_rejection

    def wrong(frontier, target_probs, cu_rows, accept_uniforms, sample_uniforms) -> Acceptance:
        result, num_kept = real(frontier, target_probs, cu_rows, accept_uniforms, sample_uniforms), np.diff(cu_rows)
        for b in np.flatnonzero((num_kept <= frontier.num_drafted) & (result.num_accepted >= num_kept - 1)):
            last = num_kept[b] - 1
            row = cu_rows[b] + last
            weights = redraw(target_probs[row], frontier.draft_probs[b, last])
            result.tokens[b, last] = acceptance.draw(weights[None], sample_uniforms[row : row + 1])[0]
            result.num_accepted[b], result.num_emitted[b] = last, last + 1
        return result

    return wrong


def choosy(*arguments: Any) -> Any:
    """Discards chains ahead by their own tokens, which is wrong: only earlier tokens may decide."""
    ahead = SURVIVING(*arguments)
    return ahead.take(np.flatnonzero(ahead.frontier.drafted[:, :1].ravel() % 2 == 0).tolist())


def spread(frontier: Frontier, draft_probs: np.ndarray, sequences: np.ndarray, columns: np.ndarray):
    """Draws recovered tokens as if clients and n-grams had drawn from a distribution."""
    found = DRAWN_FROM(frontier, draft_probs, sequences, columns)
    found[~frontier.is_main[sequences]] = 1 / VOCAB
    return found


def with_uniforms(change: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]):
    def wrong(frontier, target_probs, cu_rows, *uniforms: np.ndarray):
        return ACCEPT(frontier, target_probs, cu_rows, *change(*uniforms))

    return [(verify, "accept_by_rejection", wrong)]


SURVIVING, DRAWN_FROM, ACCEPT = step.surviving, acceptance._drawn_from, acceptance.accept_by_rejection
PRUNED = World(forced(pruner=by_parity(num_candidates=3)), "fixed:3")
NO_ROUNDS = property(lambda batch: np.zeros(len(batch), np.int64))
MISTAKES: dict[str, tuple[World, list[tuple[Any, str, Any]]]] = {
    "accepted too often": (World(forced()), with_uniforms(lambda a, s: (a * 0.5, s))),
    "noise shared by tests and recovered tokens": (World(forced()), with_uniforms(lambda a, _: (a, a))),
    "pruning by later tokens": (World(forced(pruner=peeking(num_candidates=3)), "fixed:3"), []),
    # The best set of rows over whole chains is right for sample-and-match, but it judges row 1 by token 2.
    "trimming by later tokens": (
        World(forced(trim=STEPPED), "fixed:3", num_at_once=1, count=2100),
        [(step, "admit_by_price", trim.admit)],
    ),
    "sampled afresh before a pruned row": (
        PRUNED,
        [(verify, "accept_by_rejection", wrong_at_pruned_rows(lambda p, q: p))],
    ),
    "rejected before a pruned row": (
        PRUNED,
        [(verify, "accept_by_rejection", wrong_at_pruned_rows(lambda p, q: acceptance._residual(p[None], q[None])[0]))],
    ),
    "chains discarded for their own tokens": (World(forced(RUN_AHEAD)), [(step, "surviving", choosy)]),
    "noise shared by drafts and tests": (
        World(forced()),
        [
            (DecodeBatch, "rounds", NO_ROUNDS),
            (DecodeBatch, "draft_rounds", NO_ROUNDS),
            (verify, "PURPOSE_ACCEPT", verify.PURPOSE_RECOVER),
            ("faser_backend.pipeline.draft", "PURPOSE_DRAFT", verify.PURPOSE_RECOVER),
        ],
    ),
    "guesses taken for drawn": (World(forced(), has_clients=True), [(acceptance, "_drawn_from", spread)]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch):
    world, patches = MISTAKES[name]
    for place, attribute, wrong in patches:
        if isinstance(place, str):
            monkeypatch.setattr(f"{place}.{attribute}", wrong)
        else:
            monkeypatch.setattr(place, attribute, wrong)
    assert world.p_value()[0] < FAILS
