"""Whatever belongs to one request fails that request alone: one among eight has an error in each of its hooks.

The other seven keep the tokens of an undisturbed run, no step counts as failed, and the error names the field.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from faser_backend.core.decision import PipelineMode
from faser_backend.core.errors import ErrorCode, Failure, RequestError
from faser_backend.core.request import GUIDE, FinishReason, Request, Sampling
from faser_backend.cpu import logit_rules
from faser_backend.cpu.sampler import NumpySampler
from faser_backend.pipeline import commit, prefill
from faser_backend.serving.engine_loop import EngineLoop
from faser_backend.triton.frontend import Frontend
from faser_backend.triton.tensor_io import Reply
from tests.pipeline.test_engine import alone
from tests.support.clients import token_request
from tests.support.fakes import ThreadLanes
from tests.support.forced_engine import open_forced
from tests.support.forcing import forced
from tests.support.harness import VOCAB, Driven, FakeEngine, drive, open_fake, request
from tests.triton.test_contract import HANDSHAKE

VICTIM = "r3"
MARK = 1.375  # repetition penalty and bias of the victim
MARKED_WORD = (22, 21)
LATE = 6  # calls of a hook, so that chains are in flight when it fails


class ParityGrammar:
    """Tokens alternate between even and odd, which forces nothing but `forced`. hook: the call that raises, at the
    n-th time."""

    def __init__(self, hook: str = "", at_call: int = 0) -> None:
        self._hook, self._at_call, self.num_calls = hook, at_call, 0

    def start(self) -> ParityState:
        self.reach("start")
        return ParityState(self)

    def reach(self, hook: str) -> None:
        self.num_calls += hook == self._hook
        if hook == self._hook and self.num_calls >= self._at_call:
            raise OSError("poison")


class LimitedGrammar(ParityGrammar):
    """Reaches a limit wherever an answer other than `answer` goes."""

    def __init__(self, answer: list[int]) -> None:
        super().__init__()
        self.answer = answer

    def start(self) -> ParityState:
        return LimitedState(self)


class ParityState:
    def __init__(self, grammar: ParityGrammar) -> None:
        self._grammar, self._tokens = grammar, []

    def advance(self, tokens: list[int]) -> int:
        self._grammar.reach("advance")
        for count, token in enumerate(tokens):
            if token % 2 != len(self._tokens) % 2:
                return count
            self._tokens.append(token)
        return len(tokens)

    def rollback(self, num_tokens: int) -> None:
        self._grammar.reach("rollback")
        del self._tokens[len(self._tokens) - num_tokens :]

    def allowed(self) -> np.ndarray:
        self._grammar.reach("allowed")
        return np.arange(VOCAB) % 2 == len(self._tokens) % 2

    def forced(self) -> list[int]:
        self._grammar.reach("forced")
        return [6 + len(self._tokens) % 2, 7 - len(self._tokens) % 2] if len(self._tokens) == 8 else []


class LimitedState(ParityState):
    """As the library's, it stays in its error."""

    def allowed(self) -> np.ndarray:
        if self._tokens != self._grammar.answer[: len(self._tokens)]:
            self._grammar = LimitedGrammar([-1] * 64)
            raise RequestError(GUIDE, "given", "a limit of grammars was reached")
        return super().allowed()

    def advance(self, tokens: list[int]) -> int:
        assert self._grammar.answer[:1] != [-1], "asked after its error"
        return super().advance(tokens)


def requests(poisoned: ParityGrammar | None = None) -> list[Request]:
    """Each with everything that may fail; the victim alone has what the hooks cannot tell apart."""
    made = []
    for index in range(8):
        is_victim = f"r{index}" == VICTIM
        sampling = Sampling(
            temperature=(0.0, 0.9)[index % 2],
            seed=index,
            repetition_penalty=MARK if is_victim else 1.1,
            frequency_penalty=0.2,
            logit_bias={5: MARK if is_victim else 0.5},
            bad_words=(MARKED_WORD,) if is_victim else ((2, 7), (9,)),
            grammar=(poisoned if is_victim else None) or ParityGrammar(),
        )
        made.append(
            request(
                f"r{index}",
                [1, 2, 3 + index],
                30,
                sampling=sampling,
                stop_sequences=((20, 20, 20),),  # which its grammar forbids
                draft_ids=(4, 7, 2),
                wants_log_probs=is_victim,
                wants_generation_logits=is_victim,
                wants_context_logits=is_victim,
                wants_context_log_probs=is_victim,
            )
        )
    return made


def poison(patch: pytest.MonkeyPatch, owner: Any, name: str, concerns: Callable[..., object], at_call: int) -> None:
    """Lets a function raise for the victim, from its n-th call on."""
    calls, original = iter(range(1, 10**6)), getattr(owner, name)

    def poisoned(*arguments: Any) -> Any:
        if concerns(*arguments) and next(calls) >= at_call:
            raise OSError("poison")
        return original(*arguments)

    patch.setattr(owner, name, poisoned)


def is_marked(rules: Any, slot: int, params: Sampling, *_: object) -> bool:
    return params.repetition_penalty == MARK


def marks_rows(kind: str) -> Callable[..., bool]:
    """Whether the victim's slot is among those that a rule is applied to."""

    def concerns(rules: Any, logits: object, rows: object, index: object, slots: list[int]) -> bool:
        penalties, biases = rules._penalties, rules._rules
        if kind == "penalty":
            return any(penalties[slot].repetition == MARK for slot in slots if slot in penalties)
        return any(MARK in biases[slot].bias_values for slot in slots if slot in biases)

    return concerns


def has_marked_word(words: Any, *_: object) -> bool:
    return words._last.tolist() == [MARKED_WORD[-1]]


def is_victim(sequence: Any, *_: object) -> bool:
    return sequence.request.request_id == VICTIM


class Poisoned(tuple):
    """A client's draft that may be cut once, where it enters the engine."""

    has_entered = False

    def __getitem__(self, at: Any) -> Any:
        if self.has_entered:
            raise OSError("poison")
        entered = Poisoned(self)
        entered.has_entered = True
        return entered


Rules, Words, Penalties = logit_rules.LogitRules, logit_rules._BadWords, logit_rules._Penalties
Hook = tuple[str, Any, str, Callable[..., object], int]  # field to blame; what raises, for whom, from which call on
HOOKS: dict[str, Hook] = {
    "bias, add": ("logit_bias", Rules, "_add_bias", is_marked, 1),
    "bias": ("logit_bias", Rules, "_bias", marks_rows("bias"), LATE),
    "words, add": ("bad_words", Words, "__init__", lambda _, words, committed: words == (MARKED_WORD,), 1),
    "words, append": ("bad_words", Words, "append", has_marked_word, LATE),
    "words": ("bad_words", Words, "forbid", has_marked_word, LATE),
    "penalties, add": ("repetition_penalty", Rules, "_add_penalties", is_marked, 1),
    "penalties, append": ("repetition_penalty", Penalties, "append", lambda counts, _: counts.repetition == MARK, LATE),
    "penalties": ("repetition_penalty", Rules, "_penalize", marks_rows("penalty"), LATE),
    "log-probabilities": ("return_log_probs", NumpySampler, "log_probs", lambda *_: True, LATE),
    "context log-probabilities": ("return_context_log_probs", prefill, "_log_probs", lambda *_: True, 1),
    "context logits": ("return_context_logits", prefill, "context_logits", is_victim, 1),
    "logits": ("return_generation_logits", NumpySampler, "to_host", lambda *_: True, 2),  # the first are the prompt's
    "stop words": ("stop_words", commit, "_ends_with_stop", is_victim, LATE),
}  # fmt: skip
GRAMMAR_CALLS = ("start", "allowed", "advance", "rollback", "forced")
MODES: dict[str, Callable[[bool], FakeEngine]] = {
    "plain": lambda uses_rejection: open_fake("none", uses_rejection=uses_rejection),
    "n-grams": lambda uses_rejection: open_fake("fixed:4", has_ngrams=True, uses_rejection=uses_rejection),
    **{
        mode.value: lambda uses_rejection, mode=mode: open_forced(
            "fixed:3", forced(mode), ThreadLanes(), uses_rejection=uses_rejection
        )
        for mode in PipelineMode
    },
}
CASES = [*((mode, "match") for mode in MODES), ("plain", "rejection"), (PipelineMode.RUN_AHEAD.value, "rejection")]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def mode(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


def run(mode: tuple[str, str], requests: list[Request]) -> tuple[Driven, FakeEngine]:
    fake = MODES[mode[0]](mode[1] == "rejection")
    return drive(fake.engine, requests), fake


@pytest.fixture(scope="module")
def undisturbed(mode: tuple[str, str]) -> dict[str, list[int]]:
    driven, fake = run(mode, requests())
    assert all(output.error is None for output in driven.final.values())
    assert mode[0] == "plain" or fake.engine.metrics().num_accepted > 0
    return driven.tokens


def check(outcome: tuple[Driven, FakeEngine], undisturbed: dict[str, list[int]], field: str) -> None:
    driven, fake = outcome
    victim, tokens = driven.final[VICTIM], driven.tokens
    assert victim.finish_reason is FinishReason.ERROR and victim.error is not None
    assert (victim.error.code, victim.error.field) == (ErrorCode.INTERNAL, field) and "poison" in victim.error.message
    assert tokens[VICTIM] == undisturbed[VICTIM][: len(tokens[VICTIM])], "what left before was right"
    assert {**tokens, VICTIM: undisturbed[VICTIM]} == undisturbed
    assert fake.engine.metrics().num_failed_steps == 0


@pytest.mark.parametrize("hook", HOOKS)
def test_an_error_in_what_belongs_to_one_request_ends_it_alone(
    mode: tuple[str, str], undisturbed: dict[str, list[int]], hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    field, owner, name, concerns, at_call = HOOKS[hook]
    poison(monkeypatch, owner, name, concerns, at_call)
    check(run(mode, requests()), undisturbed, field)


@pytest.mark.parametrize("hook", GRAMMAR_CALLS)
def test_an_error_in_one_grammar_ends_its_request_alone(
    mode: tuple[str, str], undisturbed: dict[str, list[int]], hook: str
) -> None:
    if hook == "forced" and mode[0] == "plain":
        pytest.skip("nobody drafts what grammars force")
    grammar = ParityGrammar(hook, 1 if hook == "start" else LATE)
    check(run(mode, requests(grammar)), undisturbed, GUIDE)


def test_a_limit_that_only_drafts_reach_fails_nobody(mode: tuple[str, str], undisturbed: dict[str, list[int]]) -> None:
    """And one that the answer itself reaches fails it where plain decoding would."""
    answer = undisturbed[VICTIM]
    driven, _ = run(mode, requests(LimitedGrammar(answer)))
    assert driven.tokens == undisturbed and driven.final[VICTIM].error is None
    driven, _ = run(mode, requests(LimitedGrammar([*answer[:10], -1])))
    failed = driven.final[VICTIM].error
    assert failed is not None and (failed.code, failed.field) == (ErrorCode.INVALID, GUIDE)
    assert answer[:1] == driven.tokens[VICTIM][:1] and len(driven.tokens[VICTIM]) <= 11
    assert {**driven.tokens, VICTIM: answer} == undisturbed


def test_an_error_in_a_clients_draft_ends_its_request_alone(mode: tuple[str, str]) -> None:
    """As if it had brought none: under rejection sampling tokens depend on who drafts in a step."""

    def with_draft(draft: tuple[int, ...]) -> list[Request]:
        return [replace(r, draft_ids=draft) if r.request_id == VICTIM else r for r in requests()]

    undisturbed, _ = run(mode, with_draft(()))
    check(run(mode, with_draft(Poisoned((4, 7, 2)))), undisturbed.tokens, "draft_input_ids")


def test_an_error_of_the_device_fails_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what belongs to all is nobody's own."""
    fake = MODES["plain"](False)
    fake.targets[0].fails_at_call = 12
    driven = drive(fake.engine, requests())
    assert {output.finish_reason for output in driven.final.values()} == {FinishReason.ERROR}
    assert fake.engine.metrics().num_failed_steps == 1


class Client:
    """frontend.Responder of one request, of which one call may raise."""

    requested_outputs = ("output_ids",)

    def __init__(self, fails: str = "") -> None:
        self._fails = fails
        self.tokens: list[int] = []
        self.ends: SimpleQueue[Failure | None] = SimpleQueue()  # the error, or None

    def send(self, arrays: list[Any], *, is_final: bool) -> None:
        if self._fails == "send":
            raise OSError("poison")
        self.tokens += dict(arrays)["output_ids"][0, 0].tolist()
        if is_final:
            self.ends.put(None)

    def fail(self, failure: Failure) -> None:
        self.ends.put(failure)
        if self._fails == "send":
            raise OSError("poison")

    def is_cancelled(self) -> bool:
        if self._fails == "is_cancelled":
            raise OSError("poison")
        return False


@pytest.mark.parametrize("fails", ["add", "render", "send", "is_cancelled"])
def test_an_answer_that_cannot_be_made_or_sent_ends_alone(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fails in ("add", "render"):
        is_ours = lambda reply, *_: reply.parsed.request.prompt_ids[0] == 9  # noqa: E731
        poison(monkeypatch, Reply, fails, is_ours, 1)
    loop = EngineLoop(open_fake("fixed:4").engine, on_finished=lambda *_: 1 / 0, on_metrics=lambda _: 1 / 0)
    handshake = replace(HANDSHAKE, cancellation_period_s=0.001)
    frontend = Frontend(loop.subscribe(), handshake, is_decoupled=True)
    clients = [Client(), Client(fails), Client()]
    flags = {name: np.array([[True]]) for name in ("streaming", "exclude_input_in_output")}
    for first, client in zip((1, 9, 1), clients, strict=True):
        frontend.handle(token_request(first, 2, 3, max_tokens=40, **flags), "", client)
    expected = alone([request("r", [1, 2, 3], 40)])["r"]
    for client in (clients[0], clients[2]):
        assert client.ends.get(timeout=10) is None and client.tokens == expected
    failure = clients[1].ends.get(timeout=10)
    if fails == "is_cancelled":  # who cannot be asked counts as gone
        assert failure is None or failure.code is ErrorCode.CANCELLED
    else:
        assert failure is not None
        assert (failure.code, failure.field) == (ErrorCode.INTERNAL, "text_output")
    frontend.drain()
    frontend.close()
    loop.close()


def test_a_client_that_leaves_during_submission_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = EngineLoop(open_fake("none").engine)
    submit, client = loop.engine.submit, Client("is_cancelled")
    monkeypatch.setattr(loop.engine, "submit", lambda asked: time.sleep(0.1) or submit(asked))
    frontend = Frontend(loop.subscribe(), replace(HANDSHAKE, cancellation_period_s=0.001), is_decoupled=True)
    frontend.handle(token_request(1, 2, 3, max_tokens=40), "", client)
    failure = client.ends.get(timeout=10)
    assert failure is not None and failure.code is ErrorCode.CANCELLED
    frontend.close()
    loop.close()


def test_a_stop_request_ends_a_request_that_is_still_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("faser_backend.triton.frontend.LONG_TEXT_BYTES", -1)
    loop, stopped, client = EngineLoop(open_fake("none").engine), threading.Event(), Client()
    frontend = Frontend(loop.subscribe(), HANDSHAKE, is_decoupled=True)
    parse, flag = frontend.contract.parse, np.array([[True]])
    monkeypatch.setattr(frontend.contract, "parse", lambda *given, **more: stopped.wait(10) and parse(*given, **more))
    frontend.handle(token_request(1, 2, 3, max_tokens=90, exclude_input_in_output=flag), "id", client)
    acknowledgement = MagicMock()
    frontend.handle({"stop": flag}, "id", acknowledgement)
    acknowledgement.send.assert_called_once_with([], is_final=True)
    stopped.set()
    assert client.ends.get(timeout=10) is None and len(client.tokens) < 90
    frontend.drain()
    frontend.close()
    loop.close()


@pytest.mark.parametrize("policy", ["faser", "survival"])
def test_an_answer_that_fails_before_its_first_token_leaves_the_policy_able_to_decide(policy: str) -> None:
    engine, poisoned = open_fake(policy).engine, Sampling(grammar=ParityGrammar("allowed"))
    drive(engine, [request("lost", [1, 2, 3], 9, draft_ids=(3, 4), sampling=poisoned)])
    tokens = drive(engine, [request(f"r{n}", [1, 2, n], 9, draft_ids=(3, 4)) for n in range(3)]).tokens
    assert [len(each) for each in tokens.values()] == [9, 9, 9]


def test_an_error_behind_a_step_ends_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = open_fake("fixed:2", behind=deque())
    monkeypatch.setattr(fake.step_runner.scheduler.policy, "observe", lambda _: 1 / 0)
    loop = EngineLoop(fake.engine)
    requests = loop.subscribe()
    requests.submit(request("r", [1, 2, 3], 60), "")
    while not (last := requests.outputs.get(timeout=10)[-1]).is_final:
        pass
    assert last.error is not None and last.error.code is ErrorCode.UNAVAILABLE
    loop.close()


def test_the_garbage_collector_may_end_a_stream_while_the_loop_sends() -> None:
    loop = EngineLoop(open_fake("none").engine, on_finished=lambda *_: abandoned.close())
    abandoned, requests = loop.subscribe(), loop.subscribe()
    requests.submit(request("r", [1, 2, 3], 3), "")
    while not requests.outputs.get(timeout=10)[-1].is_final:
        pass
    loop.close()
