"""The calibration phase of `faser profile`: chances of acceptance by draft margin, and what each exit adds to them.

The real engine generates with a fixed draft length, and pruners record exit margins but keep every row. Half of the
texts are fitted; every reported figure is of the other half. An exit that cannot be fitted, because the draft is almost
never or almost always right, is left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from faser_backend.core.config import EngineConfig
from faser_backend.core.decision import Decision, ExitView, Pruner
from faser_backend.core.errors import ConfigError, FaserError
from faser_backend.core.plan import StepRecord
from faser_backend.core.request import Limits, Request, Sampling
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.device.runtime import ModelPair
from faser_backend.manifest import EngineManifest
from faser_backend.pipeline.engine import Engine
from faser_backend.policy.calibration import KINDS, MarginCounts, MatchCalibration, logits, sigmoid
from faser_backend.policy.early_exit import NUM_CANDIDATES, ExitCalibration
from faser_backend.policy.speculation import MAX_ADAPTIVE_TOKENS, SpeculationPolicy
from faser_backend.serving.profile_store import Calibration
from faser_backend.text.prompts import PromptFormat, read_prompts
from faser_backend.text.tokenizer import TextTokenizer

MakeEngine = Callable[[EngineConfig], Engine]  # on the profiled runtime; the caller closes the engine
RETENTION = 0.95  # share of the acceptable tokens that an exit keeps
TEMPERATURES = (0.0, 0.8, 0.0, 1.0)  # half greedy
TOKENS_EACH = 64  # longer greedy texts of small models loop, and loops are easy to draft
MAX_PROMPT_TOKENS = 256
MIN_OUTCOMES = 20  # of accepted and of rejected tokens, in each half, to fit an exit
MIN_STEPS = 8  # of a calibration, even if time is up
_BY_CHAIN = ("num_drafted", "num_accepted", "group", "is_sampled")
_RIDGE = 1.0  # in rows of data: keeps weights finite if the outcomes are separable
_MAX_ITERATIONS = 50


@dataclass(frozen=True, slots=True, eq=False)
class Chains:
    """N chains of at most K draft tokens. Entries past num_drafted have no meaning."""

    margins: np.ndarray  # [N, K] float64, of the draft
    exit_margins: dict[int, np.ndarray]  # segment -> [N, K]
    num_drafted: np.ndarray  # [N]
    num_accepted: np.ndarray  # [N]
    group: np.ndarray  # [N] which text: chains of a group are held out together
    is_sampled: np.ndarray  # bool [N]: the request samples

    @property
    def is_drafted(self) -> np.ndarray:
        """bool [N, K]"""
        return np.arange(self.margins.shape[1]) < self.num_drafted[:, None]

    @property
    def is_accepted(self) -> np.ndarray:
        """bool [N, K]"""
        return np.arange(self.margins.shape[1]) < self.num_accepted[:, None]

    @property
    def is_tested(self) -> np.ndarray:
        """bool [N, K]: the accepted tokens, and the first rejected one."""
        return np.arange(self.margins.shape[1]) < np.minimum(self.num_accepted + 1, self.num_drafted)[:, None]

    def take(self, index: np.ndarray) -> Chains:
        return Chains.joined([self], lambda arrays: arrays[0][index])

    @staticmethod
    def joined(parts: list[Chains], join: Callable[[list[np.ndarray]], np.ndarray] = np.concatenate) -> Chains:
        """Returns one Chains whose arrays are joined from those of the parts."""
        segments = parts[0].exit_margins
        return Chains(
            join([part.margins for part in parts]),
            {segment: join([part.exit_margins[segment] for part in parts]) for segment in segments},
            *(join([getattr(part, name) for part in parts]) for name in _BY_CHAIN),
        )


class ProbePolicy(SpeculationPolicy):
    """A policy for measuring: a fixed length for all sequences, and one pruner."""

    def __init__(self, num_draft_tokens: int, pruner: Pruner | None = None) -> None:
        self._num_draft_tokens, self._pruner = num_draft_tokens, pruner

    def decide(self, sequences: Sequence[RunningSequence], num_prefilling: int = 0) -> Decision:
        return Decision([self._num_draft_tokens] * len(sequences), pruner=self._pruner)


class ChainRecorder:
    """A pruner that keeps every row and records exit margins; `observe` adds the outcome of each step."""

    num_candidates = NUM_CANDIDATES

    def __init__(self, exits: frozenset[int], num_draft_tokens: int, group_of: dict[str, int]) -> None:
        self.exits, self._width, self._group_of = exits, num_draft_tokens, group_of
        self._exit_margins: dict[int, np.ndarray] = {}
        self.records: list[Chains] = []  # of the steps that drafted

    def keep(self, view: ExitView) -> np.ndarray:
        self._exit_margins[view.segment] = view.exit_margins
        return view.num_rows

    def observe(self, record: StepRecord) -> None:
        frontier, exit_margins = record.frontier, self._exit_margins
        self._exit_margins = {}
        if frontier.margins is None or not frontier.num_drafted.any():
            return
        groups = [self._group_of[sequence.request.request_id] for sequence in record.plan.decodes]
        samples = np.array([not sequence.request.sampling.is_greedy for sequence in record.plan.decodes])
        margins = {segment: self._padded(exit_margins[segment]) for segment in self.exits}
        outcomes = (frontier.num_drafted, record.acceptance.num_accepted, np.array(groups, np.int64), samples)
        chains = Chains(self._padded(frontier.margins), margins, *outcomes)
        self.records.append(chains.take(np.flatnonzero(chains.num_drafted)))

    def chains(self) -> Chains:
        """Returns all recorded chains. Raises FaserError if there are none."""
        if not self.records:
            raise FaserError("calibration: nothing was drafted")
        return Chains.joined(self.records)

    def _padded(self, array: np.ndarray) -> np.ndarray:
        return np.pad(array.astype(np.float64), ((0, 0), (0, self._width - array.shape[1])))


def record_chains(
    make_engine: MakeEngine,
    exits: frozenset[int],
    requests: list[tuple[int, Request]],
    num_draft_tokens: int,
    *,
    latest_s: float = math.inf,
) -> Chains:
    """Runs all (group, request) pairs side by side, to their ends or until latest_s on the clock of time.monotonic.

    At least MIN_STEPS steps are recorded. Raises FaserError if a request fails or nothing is drafted.
    """
    config = EngineConfig.from_options(policy=f"fixed:{num_draft_tokens}", max_queue_size=0)
    recorder = ChainRecorder(exits, num_draft_tokens, {request.request_id: group for group, request in requests})
    with closing(make_engine(config)) as engine:
        engine.step_runner.scheduler.policy = ProbePolicy(num_draft_tokens, recorder if exits else None)
        engine.step_runner.observers.append(recorder.observe)
        for _, request in requests:
            engine.submit(request)
        while engine.has_work and (time.monotonic() <= latest_s or len(recorder.records) < MIN_STEPS):
            for output in engine.step():
                if output.error is not None:
                    raise FaserError(f"request {output.request_id} failed: {output.error}")
    return recorder.chains()


def calibrate(
    make_engine: MakeEngine,
    engine_dir: Path,
    manifest: EngineManifest,
    num_requests: int,
    *,
    prompts: Path | None,
    seed: int,
    latest_s: float = math.inf,
) -> Calibration:
    """Generates with the real engine, and fits the recorded chains. latest_s: see record_chains."""
    rng = np.random.default_rng(seed)
    models = ModelPair(manifest.target, manifest.draft)
    limits = Limits(models.vocab_size, models.max_context)
    texts = [] if prompts is None else tokenised_prompts(prompts, engine_dir, manifest)
    requests = calibration_requests(texts, manifest.end_ids, limits, num_requests, rng)
    layers = {
        index: segment.last_layer for index, segment in enumerate(manifest.target.segments) if segment.has_exit_scores
    }
    chains = record_chains(make_engine, frozenset(layers), requests, MAX_ADAPTIVE_TOKENS, latest_s=latest_s)
    return fit(chains, layers, source="own text" if prompts is None else prompts.name)


def tokenised_prompts(path: Path, engine_dir: Path, manifest: EngineManifest) -> list[np.ndarray]:
    """Returns the token ids of each prompt of a file. Raises ConfigError for fewer than two prompts."""
    formats = PromptFormat.load(engine_dir, manifest)
    with closing(TextTokenizer.from_file(engine_dir / manifest.tokenizer.name, formats)) as tokenizer:
        token_ids = [tokenizer.encode_prompt(prompt.text) for prompt in read_prompts(path)]
    found = [np.array(ids, np.int64) for ids in token_ids if ids]
    if len(found) < 2:
        raise ConfigError(f"prompts {path}: {len(found)} prompts; at least 2 are needed, one of them held out")
    return found


def calibration_requests(
    prompts: list[np.ndarray], end_ids: tuple[int, ...], limits: Limits, num_requests: int, rng: np.random.Generator
) -> list[tuple[int, Request]]:
    """Returns (group, request) pairs: every prompt greedily and sampled, as one group.

    Without prompts the target writes its own texts. Sampled ones start behind the end token, as texts do; greedy ones
    behind one more, random token, or they would all be equal. No request ends early.
    """
    longest = max(min(MAX_PROMPT_TOKENS, limits.max_context - TOKENS_EACH), 2)
    requests = []
    for index in range(num_requests):
        text, temperature = index // (2 if prompts else len(TEMPERATURES)), TEMPERATURES[index % len(TEMPERATURES)]
        if prompts:
            group = text % len(prompts)
            prompt = prompts[group][-longest:]
        else:
            group, prompt = text, np.array(end_ids[:1], np.int64)
            if temperature == 0.0 or not end_ids:
                prompt = np.append(prompt, rng.integers(0, limits.vocab_size))
        max_tokens = min(TOKENS_EACH, limits.max_context - prompt.size)
        sampling = Sampling(temperature=temperature, seed=index)
        requests.append((group, Request(f"calibration-{index}", prompt, max_tokens, sampling)))
    return requests


def fit(chains: Chains, layers: dict[int, int], source: str) -> Calibration:
    """Fits chances and exits to one half of the groups, and tests them on the other.

    layers: segment of each exit -> layers before it. source: the name of the texts.
    """
    is_held_out = chains.group % 2 == 1
    fitted, held_out = chains.take(~is_held_out), chains.take(is_held_out)
    counts = {kind: _counts(fitted.take(fitted.is_sampled == index)) for index, kind in enumerate(KINDS)}
    halves = [(half, _chances(counts, half)) for half in (fitted, held_out)]
    outcomes = [half.is_accepted[half.is_tested] for half in (fitted, held_out)]
    can_fit = all(min(half.sum(), (~half).sum()) >= MIN_OUTCOMES for half in outcomes)
    return Calibration(
        source=source,
        num_fitted=outcomes[0].size,
        num_held_out=outcomes[1].size,
        margins=counts,
        exits=tuple(_fit_exit(segment, layer, *halves) for segment, layer in sorted(layers.items()) if can_fit),
    )


def _counts(chains: Chains) -> MarginCounts:
    return MarginCounts.of(chains.margins[chains.is_tested], chains.is_accepted[chains.is_tested])


def _chances(counts: dict[str, MarginCounts], chains: Chains) -> np.ndarray:
    """Returns the chances of acceptance [N, K] by draft margin, as serving starts with."""
    greedy, sampled = (MatchCalibration(counts[kind]).curve.chances(chains.margins) for kind in KINDS)
    return np.where(chains.is_sampled[:, None], sampled, greedy)


def _fit_exit(
    segment: int, layer: int, fitted: tuple[Chains, np.ndarray], held_out: tuple[Chains, np.ndarray]
) -> ExitCalibration:
    """Fits bias and weights to the tested tokens of `fitted`, and the threshold to its useful rows.

    fitted, held_out: chains, and their chances of acceptance [N, K] by draft margin. Row j of a chain is useful if all
    of draft tokens 1..j are accepted.
    """
    chains, chances = fitted
    features = np.stack([logits(chances), chains.exit_margins[segment]], axis=-1)[chains.is_tested]
    bias, chance_weight, margin_weight = map(float, fit_logistic(features, chains.is_accepted[chains.is_tested]))
    weights = (segment, layer, bias, chance_weight, margin_weight)
    unscaled = ExitCalibration(*weights, 0.0, 1.0, (0.0,), 1.0, 0.0)
    num_kept = int(np.ceil(RETENTION * chains.num_accepted.sum()))
    survival = unscaled.survival(chances, chains.exit_margins[segment])
    threshold = threshold_for(survival, chains.is_accepted, num_kept)
    trim = threshold_for(np.cumprod(chances, axis=1), chains.is_accepted, num_kept)
    chains, chances = held_out
    stays = unscaled.survival(chances, chains.exit_margins[segment]) >= threshold
    enters = chains.is_drafted & (np.cumprod(chances, axis=1) >= trim)
    is_drafted, accepted = chains.is_drafted, chains.is_accepted
    return ExitCalibration(
        *weights,
        threshold,
        retention=_share(stays, accepted),
        pruned_shares=tuple(_share(~stays[:, j], is_drafted[:, j]) for j in range(is_drafted.shape[1])),
        trimmed_retention=_share(stays, accepted & enters),
        trimmed_pruned_share=_share(~stays, enters),
    )


def fit_logistic(features: np.ndarray, outcomes: np.ndarray) -> np.ndarray:
    """Returns bias and weights [1 + F] of P(outcome) = sigmoid(bias + features [N, F] @ weights), outcomes bool [N].

    The method is iteratively reweighted least squares with a ridge penalty.
    """
    design = np.column_stack([np.ones(len(features)), features])
    penalty = np.diag([0.0] + [_RIDGE] * features.shape[1])
    weights = np.zeros(design.shape[1])
    for _ in range(_MAX_ITERATIONS):
        probs = sigmoid(design @ weights)
        gradient = design.T @ (outcomes - probs) - penalty @ weights
        curvature = (design * (probs * (1.0 - probs))[:, None]).T @ design + penalty
        step = np.linalg.solve(curvature + 1e-9 * np.eye(weights.size), gradient)
        weights = weights + step
        if np.abs(step).max() < 1e-8:
            break
    return weights


def threshold_for(survival: np.ndarray, is_useful: np.ndarray, num_kept: int) -> float:
    """Returns the largest threshold on survival [N, K] that keeps num_kept of the useful rows, bool [N, K]."""
    useful = np.sort(survival[is_useful])[::-1]
    return float(useful[min(num_kept, useful.size) - 1]) if num_kept and useful.size else 1.0


def _share(holds: np.ndarray, among: np.ndarray) -> float:
    """Returns the share of the entries `among` (bool) that hold; 0 if there are none."""
    return float((holds & among).sum()) / max(int(among.sum()), 1)
