"""The calibration phase of `faser profile`: how sure the draft may be, and what each exit adds to that.

Chains are recorded (chains.py), half of the texts are fitted, the other half is what every figure is of. An exit
that cannot be fitted, because the draft is never or always right, is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from faser_backend.core.errors import ConfigError
from faser_backend.core.request import Limits, Request, Sampling
from faser_backend.device.runtime import ModelPair
from faser_backend.lab.prompts import read_prompts
from faser_backend.manifest import EngineManifest
from faser_backend.policy.calibration import (
    KINDS,
    MARGIN_KNOTS,
    MarginCounts,
    MatchCalibration,
    logits,
    margin_bins,
    sigmoid,
)
from faser_backend.policy.early_exit import ExitCalibration
from faser_backend.policy.speculation import MAX_ADAPTIVE_TOKENS
from faser_backend.profiling.chains import Chains, MakeEngine, record_chains
from faser_backend.serving.profile_store import Calibration, ReliabilityBin
from faser_backend.text.prompts import PromptFormat
from faser_backend.text.tokenizer import TextTokenizer

RETENTION = 0.95  # of the tokens that would be accepted: an exit keeps so many
TEMPERATURES = (0.0, 0.8, 0.0, 1.0)  # half greedy
TOKENS_EACH = 64  # greedy texts of small models loop when they grow long, and loops are easy to draft
MAX_PROMPT_TOKENS = 256
MIN_OUTCOMES = 20  # accepted and rejected tokens each, in both halves, or nothing is fitted to them
_RIDGE = 1.0  # in rows of data: holds weights finite where outcomes can be told apart without error
_MAX_ITERATIONS = 50


def calibrate(
    make_engine: MakeEngine,
    engine_dir: Path,
    manifest: EngineManifest,
    num_requests: int,
    *,
    prompts: Path | None,
    seed: int,
    progress: Callable[[float], None],
    latest_s: float = math.inf,
) -> Calibration:
    """Lets the engine write and fits what was recorded. latest_s: as of record_chains."""
    rng = np.random.default_rng(seed)
    models = ModelPair(manifest.target, manifest.draft)
    limits = Limits(models.vocab_size, models.max_context)
    texts = [] if prompts is None else tokenised_prompts(prompts, engine_dir, manifest)
    requests = calibration_requests(texts, manifest.end_ids, limits, num_requests, rng)
    layers = {
        index: segment.last_layer for index, segment in enumerate(manifest.target.segments) if segment.has_exit_scores
    }
    chains = record_chains(make_engine, frozenset(layers), requests, MAX_ADAPTIVE_TOKENS, progress, latest_s=latest_s)
    return fit(chains, layers, source="own text" if prompts is None else prompts.name)


def tokenised_prompts(path: Path, engine_dir: Path, manifest: EngineManifest) -> list[np.ndarray]:
    """Token ids of each prompt of a file, as text models of this directory read it. Raises ConfigError."""
    tokenizer = TextTokenizer.from_file(engine_dir / manifest.tokenizer.name, PromptFormat.load(engine_dir, manifest))
    try:
        token_ids = [tokenizer.encode_prompt(prompt.text) for prompt in read_prompts(path)]
    finally:
        tokenizer.close()
    found = [np.array(ids, np.int64) for ids in token_ids if ids]
    if len(found) < 2:
        raise ConfigError(f"prompts {path}: {len(found)} prompts; at least 2 are needed, one of them held out")
    return found


def calibration_requests(
    prompts: list[np.ndarray], end_ids: tuple[int, ...], limits: Limits, num_requests: int, rng: np.random.Generator
) -> list[tuple[int, Request]]:
    """(group, request) pairs, every prompt at all temperatures; requests of one prompt are of one group.

    Without prompts the target writes its own texts: sampled ones start where texts start, at the end token, and greedy
    ones at a random token behind it, or all of them would be the same. None of them ends early.
    """
    longest = max(min(MAX_PROMPT_TOKENS, limits.max_context - TOKENS_EACH), 2)
    requests = []
    for index in range(num_requests):
        text, temperature = index // len(TEMPERATURES), TEMPERATURES[index % len(TEMPERATURES)]
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
    """layers: segment of each exit -> layers before it."""
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
        reliability=_reliability(*halves[1]),
        exits=tuple(_fit_exit(segment, layer, *halves) for segment, layer in sorted(layers.items()) if can_fit),
    )


def _counts(chains: Chains) -> MarginCounts:
    return MarginCounts.of(chains.margins[chains.is_tested], chains.is_accepted[chains.is_tested])


def _chances(counts: dict[str, MarginCounts], chains: Chains) -> np.ndarray:
    """[N, K] by draft margin, as serving would have them at the start."""
    greedy, sampled = (MatchCalibration(counts[kind]).curve.chances(chains.margins) for kind in KINDS)
    return np.where(chains.is_sampled[:, None], sampled, greedy)


def _fit_exit(
    segment: int, layer: int, fitted: tuple[Chains, np.ndarray], held_out: tuple[Chains, np.ndarray]
) -> ExitCalibration:
    """Bias and weights from the tested tokens of `fitted`, the threshold from its useful rows: chains, and chances of
    acceptance [N, K] by draft margin. Row j of a chain is useful where draft tokens 1..j are all accepted."""
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
    """[1 + F] bias and weights of P(outcome) = sigmoid(bias + features [n, F] @ weights), outcomes bool [n], by
    iteratively reweighted least squares."""
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
    """The largest threshold on survival [N, K] that keeps at least num_kept of the useful rows, bool [N, K]."""
    useful = np.sort(survival[is_useful])[::-1]
    return float(useful[min(num_kept, useful.size) - 1]) if num_kept and useful.size else 1.0


def _reliability(held_out: Chains, chances: np.ndarray) -> tuple[ReliabilityBin, ...]:
    tested = held_out.is_tested
    predicted, accepted, bins = chances[tested], held_out.is_accepted[tested], margin_bins(held_out.margins[tested])
    return tuple(
        ReliabilityBin(
            float(MARGIN_KNOTS[index]),
            float(predicted[bins == index].mean()),
            float(accepted[bins == index].mean()),
            int((bins == index).sum()),
        )
        for index in np.unique(bins)
    )


def _share(holds: np.ndarray, among: np.ndarray) -> float:
    """Returns the share of the entries `among` (bool) that hold; 0 of none."""
    return float((holds & among).sum()) / max(int(among.sum()), 1)
