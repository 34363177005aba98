"""Do tokens depend on how they are decoded? Runs the same requests in many ways and explains differences.

Float rounding depends on the shape of a call, so two scores that are almost equal may change places:
a difference is explained when the reference's scores of the two tokens there are a near-tie. The rest
of such an answer follows from another prefix and is not compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from faser_backend.core.batch import RowBatch
from faser_backend.core.ports import ModelRunner
from faser_backend.core.record import StepRecord
from faser_backend.core.request import FinishReason, Request
from faser_backend.device.noise import GumbelNoise
from faser_backend.pipeline.engine import Engine
from faser_backend.pipeline.model_call import run_model

POLICIES = ("none", "fixed:2", "fixed:4", "fixed:8", "schedule:2:6,8:2", "goodput", "gp-lcb", "survival", "faser")
NEAR_TIE = 1e-3  # in units of scaled logits; logits of two call shapes differ by about 1e-5


@dataclass(frozen=True)
class Way:
    """A configuration to decode with: its name, and the options of an EngineConfig that make it."""

    name: str
    options: dict[str, str]


def ways(*, has_exits: bool) -> list[Way]:
    """Every policy as it decides by itself, then forced pipeline modes, forced early exit, and both at once."""
    chosen = [Way(policy, {"policy": policy}) for policy in POLICIES]
    for policy in ("fixed:4", "survival"):
        for early_exit in ("off", "on") if has_exits else ("off",):
            for mode in ("serial", "run_ahead", "ping_pong"):
                if (early_exit, mode) != ("off", "serial"):
                    options = {"policy": policy, "pipeline": mode, "early_exit": early_exit}
                    exits = ", early exit" if early_exit == "on" else ""
                    chosen.append(Way(f"{policy}, {mode}{exits}", options))
    return chosen


@dataclass
class Comparison:
    """Outcome of one way of decoding against the reference."""

    name: str
    num_answers: int = 0
    num_tokens: int = 0  # compared
    num_cancelled: int = 0
    num_preemptions: int = 0
    num_pruned: int = 0  # rows that left at an exit
    overlapped_share: float = 0.0  # of the steps that verified: the draft worked beside the target
    num_near_ties: int = 0
    largest_margin: float = 0.0  # among the near-ties
    unexplained: list[str] = field(default_factory=list)


def run_alone(engine: Engine, requests: Iterable[Request]) -> dict[str, list[int]]:
    """Each request by itself, one after the other."""
    tokens: dict[str, list[int]] = {}
    for request in requests:
        engine.submit(request)
        tokens[request.request_id] = []
        while engine.has_work:
            for output in engine.step():
                tokens[request.request_id] += output.token_ids
    return tokens


def run_mixed(
    engine: Engine, requests: list[Request], *, seed: int, max_concurrency: int, cancelled_share: float
) -> tuple[dict[str, list[int]], set[str]]:
    """Random arrivals, at most max_concurrency at once; a share is cancelled after a random token.

    Returns all tokens, and the ids that were cancelled.
    """
    rng = np.random.default_rng(seed)
    order = [requests[i] for i in rng.permutation(len(requests))]
    doomed = {r.request_id: int(rng.integers(r.max_tokens)) for r in order if rng.random() < cancelled_share}
    tokens: dict[str, list[int]] = {r.request_id: [] for r in order}
    cancelled: set[str] = set()
    num_open = 0
    while order or engine.has_work:
        while order and num_open < max_concurrency and (num_open == 0 or rng.random() < 0.3):
            engine.submit(order.pop())
            num_open += 1
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
            if output.is_final:
                num_open -= 1
                if output.finish_reason is FinishReason.CANCELLED:
                    cancelled.add(output.request_id)
            elif len(tokens[output.request_id]) > doomed.get(output.request_id, 10**9):
                engine.cancel(output.request_id)
        engine.check_integrity()
    return tokens, cancelled


class StepCounts:
    """Counts what a way is chosen for: an equality of steps that never overlapped or pruned would prove little."""

    def __init__(self, engine: Engine) -> None:
        self._num_verified = self._num_overlapped = self._num_pruned = 0
        engine.stepper.observers.append(self._observe)

    def _observe(self, record: StepRecord) -> None:
        self._num_verified += 1
        self._num_overlapped += bool(record.plan.drafts)
        self._num_pruned += int((record.frontier.num_rows - record.verification.num_kept).sum())

    def take(self, result: Comparison) -> None:
        """Enters the counts since the last time."""
        result.num_pruned = self._num_pruned
        result.overlapped_share = self._num_overlapped / max(self._num_verified, 1)
        self._num_verified = self._num_overlapped = self._num_pruned = 0


class Reference:
    """Plain decoding's answers, and a judge of how close any two tokens were."""

    def __init__(
        self, requests: list[Request], expected: dict[str, list[int]], runner: ModelRunner, block_size: int
    ) -> None:
        self._requests = requests
        self._expected = expected
        self._runner = runner
        self._block_size = block_size
        self._noise = GumbelNoise(runner.vocab_size)

    def compare(self, name: str, tokens: dict[str, list[int]], cancelled: set[str]) -> Comparison:
        """A cancelled answer must be a prefix of the expected one, every other answer equal to it."""
        result = Comparison(name)
        for request in self._requests:
            got, wanted = tokens[request.request_id], self._expected[request.request_id]
            result.num_answers += 1
            if request.request_id in cancelled:
                result.num_cancelled += 1
                wanted = wanted[: len(got)]
            result.num_tokens += len(got)
            if got != wanted:
                self._explain(result, request, got, wanted)
        return result

    def _explain(self, result: Comparison, request: Request, got: list[int], wanted: list[int]) -> None:
        index = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), None)
        if index is None:
            result.unexplained.append(f"{request.request_id}: {len(got)} tokens instead of {len(wanted)}")
            return
        margin = self.margin(request, wanted[:index], got[index], wanted[index])
        if margin < NEAR_TIE:
            result.num_near_ties += 1
            result.largest_margin = max(result.largest_margin, margin)
        else:
            result.unexplained.append(f"{request.request_id}: token {index} differs, margin {margin:.2e}")

    def margin(self, request: Request, prefix: list[int], token_a: int, token_b: int) -> float:
        """|score a - score b| after `prefix`, by the target in one plain call over the whole of it.

        A score is a logit / temperature + noise, or the logit if greedy.
        """
        token_ids = np.concatenate([request.prompt_ids, np.array(prefix, np.int64)])
        num_blocks = -(-token_ids.size // self._block_size)
        rows = RowBatch(
            token_ids,
            np.array([0, token_ids.size]),
            np.zeros(1, np.int64),
            np.arange(num_blocks)[None],
            np.array([token_ids.size - 1]),
        )
        scores = run_model(self._runner, rows)[0].astype(np.float64)
        sampling = request.sampling
        if not sampling.is_greedy:
            seeds = np.array([sampling.seed], np.uint64)
            scores = scores / sampling.temperature + self._noise.gumbel(seeds, np.array([token_ids.size]))[0]
        return float(abs(scores[token_a] - scores[token_b]))
