"""The calibration phase of `faser profile`: how sure the draft may be, and what each exit adds to that.

Chains are recorded (chains.py), half of the texts are fitted, the other half is what every figure is of. An exit
that cannot be fitted, because the draft is never or always right, is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from faser_backend.core.errors import ConfigError
from faser_backend.core.request import Limits, Request, SamplingParams
from faser_backend.device.runtime import ModelPair
from faser_backend.manifest import EngineManifest
from faser_backend.policy.calibration import KINDS, MARGIN_KNOTS, MarginCounts, MatchCalibration, logits, margin_bins
from faser_backend.policy.early_exit import ExitCalibration
from faser_backend.policy.speculation import MAX_ADAPTIVE_TOKENS
from faser_backend.serving.profile_calibration import Calibration, ExitReport, ReliabilityBin
from faser_backend.serving.prompts import PromptFormat
from faser_backend.serving.tokenizer import TextTokenizer
from lab.profiling.chains import Chains, MakeEngine, record_chains
from lab.profiling.exit_fit import Survivals, area_under_curve, fit_logistic, replay, threshold_for
from lab.prompts import read_prompts

NUM_REQUESTS, QUICK_NUM_REQUESTS = 128, 32
TEMPERATURES = (0.0, 0.8, 0.0, 1.0)  # half greedy
TOKENS_EACH = 64  # greedy texts of small models loop when they grow long, and loops are easy to draft
MIN_REQUESTS = 2 * len(TEMPERATURES)  # a group to fit and one to hold out
MAX_PROMPT_TOKENS = 256
REPLAYED_LENGTHS = (4, MAX_ADAPTIVE_TOKENS)
MIN_OUTCOMES = 20  # accepted and rejected tokens each, in both halves, or nothing is fitted to them


def calibrate(
    make_engine: MakeEngine,
    engine_dir: Path,
    manifest: EngineManifest,
    *,
    prompts: Path | None,
    retention: float,
    is_quick: bool,
    seed: int,
    progress: Callable[[float], None],
    share: float = 1.0,
    latest_s: float = math.inf,
) -> Calibration:
    """Lets the engine write and fits what was heard. share: of the requests, where there is little time; latest_s:
    as of record_chains.

    Raises ConfigError for options out of range.
    """
    if not 0.0 < retention <= 1.0:
        raise ConfigError(f"retention = {retention}: must lie in (0, 1]")
    rng = np.random.default_rng(seed)
    models = ModelPair(manifest.target, manifest.draft)
    limits = Limits(models.vocab_size, models.max_context)
    texts = [] if prompts is None else tokenised_prompts(prompts, engine_dir, manifest)
    most = num_requests_of(is_quick=is_quick)
    num_requests = max(round(share * most), min(MIN_REQUESTS, most))
    requests = calibration_requests(texts, manifest.end_ids, limits, num_requests, rng)
    depths = {
        index: (segment.last_layer, manifest.target.spec.num_layers)
        for index, segment in enumerate(manifest.target.segments)
        if segment.has_exit_scores
    }
    chains = record_chains(make_engine, frozenset(depths), requests, MAX_ADAPTIVE_TOKENS, progress, latest_s=latest_s)
    return fit(chains, depths, retention, source="own text" if prompts is None else prompts.name)


def num_requests_of(*, is_quick: bool) -> int:
    return QUICK_NUM_REQUESTS if is_quick else NUM_REQUESTS


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
        sampling = SamplingParams(temperature=temperature, seed=index)
        requests.append((group, Request(f"calibration-{index}", prompt, max_tokens, sampling)))
    return requests


def fit(chains: Chains, depths: dict[int, tuple[int, int]], retention: float, source: str) -> Calibration:
    """depths: segment of each exit -> layers before it and of the whole target."""
    is_held_out = chains.group % 2 == 1
    fitted, held_out = chains.take(~is_held_out), chains.take(is_held_out)
    counts = {kind: _counts(fitted.take(fitted.is_sampled == index)) for index, kind in enumerate(KINDS)}
    chances = Chances(_chances(counts, fitted), _chances(counts, held_out))
    outcomes = [half.is_accepted[half.is_tested] for half in (fitted, held_out)]
    can_fit = all(min(half.sum(), (~half).sum()) >= MIN_OUTCOMES for half in outcomes)
    return Calibration(
        source=source,
        retention=retention,
        num_fitted=outcomes[0].size,
        num_held_out=outcomes[1].size,
        margins=counts,
        reliability=_reliability(held_out, chances.held_out),
        exits=tuple(
            _fit_exit(segment, depth, fitted=fitted, held_out=held_out, chances=chances, retention=retention)
            for segment, depth in sorted(depths.items())
            if can_fit
        ),
    )


class Chances(NamedTuple):
    """[N, K] of acceptance by draft margin, of chains of each half."""

    fitted: np.ndarray
    held_out: np.ndarray


def _counts(chains: Chains) -> MarginCounts:
    return MarginCounts.of(chains.margins[chains.is_tested], chains.is_accepted[chains.is_tested])


def _chances(counts: dict[str, MarginCounts], chains: Chains) -> np.ndarray:
    """[N, K] by draft margin, as serving would have them at the start."""
    greedy, sampled = (MatchCalibration(counts[kind]).curve.chances(chains.margins) for kind in KINDS)
    return np.where(chains.is_sampled[:, None], sampled, greedy)


def _fit_exit(
    segment: int, depth: tuple[int, int], *, fitted: Chains, held_out: Chains, chances: Chances, retention: float
) -> ExitReport:
    """Bias and weights from the tested tokens of `fitted`, the threshold from its useful rows."""
    features = np.stack([logits(chances.fitted), fitted.exit_margins[segment]], axis=-1)[fitted.is_tested]
    bias, chance_weight, margin_weight = map(float, fit_logistic(features, fitted.is_accepted[fitted.is_tested]))
    weights = (segment, depth[0], bias, chance_weight, margin_weight)
    unscaled = ExitCalibration(*weights, 0.0, 1.0, (0.0,), 1.0, 0.0)
    before, after = (
        Survivals(half, np.cumprod(chance, axis=1), unscaled.survival(chance, half.exit_margins[segment]))
        for half, chance in zip((fitted, held_out), chances, strict=True)
    )
    num_kept = int(np.ceil(retention * fitted.num_accepted.sum()))
    threshold = threshold_for(before.at_exit, fitted.is_accepted, num_kept)
    trim = threshold_for(before.by_draft, fitted.is_accepted, num_kept)
    tested, accepted = held_out.is_tested, held_out.is_accepted
    stays, enters = after.at_exit >= threshold, held_out.is_drafted & (after.by_draft >= trim)
    is_drafted = held_out.is_drafted
    calibration = ExitCalibration(
        *weights,
        threshold,
        retention=_share(stays, accepted),
        pruned_shares=tuple(_share(~stays[:, j], is_drafted[:, j]) for j in range(is_drafted.shape[1])),
        trimmed_retention=_share(stays, accepted & enters),
        trimmed_pruned_share=_share(~stays, enters),
    )
    refined = calibration.refined(chances.held_out, held_out.exit_margins[segment])
    return ExitReport(
        calibration,
        margin_auc=area_under_curve(held_out.exit_margins[segment][tested], accepted[tested]),
        draft_auc=area_under_curve(held_out.margins[tested], accepted[tested]),
        both_auc=area_under_curve(refined[tested], accepted[tested]),
        replays={
            length: replay(_shortened(before, length), _shortened(after, length), retention, depth)
            for length in REPLAYED_LENGTHS
        },
    )


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


def _shortened(survivals: Survivals, length: int) -> Survivals:
    chains, by_draft, at_exit = survivals
    return Survivals(chains.shortened(length), by_draft[:, :length], at_exit[:, :length])


def _share(holds: np.ndarray, among: np.ndarray) -> float:
    """Of the entries `among` (bool), how many hold; 0 of none."""
    return float((holds & among).sum()) / max(int(among.sum()), 1)
