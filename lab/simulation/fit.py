"""Fits the simulator's acceptance process to the demo pair, and says how well it fits.

The target writes texts; then draft and exit heads are run over the true text, every position in one pass, which
gives the outcome that speculation would meet there. Half of the prompts are fitted, the other half judges.
Writes acceptance_demo.json, the simulator's data.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from engines.build import build_engines
from faser_backend.config import EngineConfig
from faser_backend.core.batch import RowBatch, SamplingRows
from faser_backend.core.request import Request, SamplingParams
from faser_backend.device.runtime import ModelPair
from faser_backend.device.sampler import NumpySampler
from faser_backend.manifest import EngineManifest
from faser_backend.serving.compose import build_engine
from faser_backend.serving.runtimes import open_runtime
from lab.drive import write_all
from lab.places import DEMO, ROOT
from lab.profiling.exit_fit import area_under_curve
from lab.prompts import DEMO_PROMPTS, read_prompts
from lab.simulation.acceptance import AcceptanceProcess, Latent

EXIT_LAYERS = (2, 4)
LEVELS = np.array([0.005, 0.02, 0.05, *np.arange(0.1, 0.91, 0.05), 0.93, 0.96, 0.98, 0.99, 0.998])
LENGTHS = range(1, 9)
LAGS = (1, 2, 4, 8, 16)
NUM_JUDGED = 400  # texts of the process that are compared with real ones


def write_texts(engine_dir: Path, prompts: list[str], num_tokens: int, temperature: float) -> list[np.ndarray]:
    """The target's own completions [prompt + num_tokens]; prompt i draws with seed i."""
    tokenizer = Tokenizer.from_file(str(engine_dir / "tokenizer.json"))
    texts = [np.array(tokenizer.encode(prompt).ids, np.int64) for prompt in prompts]
    requests = [
        Request(str(index), text, num_tokens, SamplingParams(temperature=temperature, seed=index))
        for index, text in enumerate(texts)
    ]
    config = EngineConfig.from_options(policy="none", max_num_seqs=16, max_queue_size=0)
    with closing(build_engine(engine_dir, config)) as engine:
        written = write_all(engine, requests)
    return [np.append(text, written[str(index)]) for index, text in enumerate(texts)]


class Tracer:
    """Runs draft and target over whole texts and reads what speculation would have met."""

    def __init__(self, engine_dir: Path) -> None:
        manifest = EngineManifest.load(engine_dir)
        models = ModelPair(manifest.target, manifest.draft)
        runtime = open_runtime(engine_dir, manifest, EngineConfig())
        self._num_blocks = -(-models.max_context // manifest.kv_block_size)
        self._target, self._draft = (
            runtime.open_runner(model, runtime.menu.whole, runtime.open_pool(model, self._num_blocks))
            for model in models.present
        )
        self._sampler = NumpySampler(manifest.target.spec.vocab_size, 1)

    def _begin(self, text: np.ndarray, first: int, temperature: float, seed: int) -> tuple[RowBatch, SamplingRows]:
        """The text as one prompt whose rows from `first` on are drawn, by a sampler that knows it as slot 0."""
        rows = RowBatch(
            text[:-1],
            np.array([0, text.size - 1]),
            np.zeros(1, np.int64),
            np.arange(self._num_blocks)[None],
            np.arange(first - 1, text.size - 1),
        )
        zeros = np.zeros(text.size - first, np.int64)
        drawing = SamplingRows(zeros, np.arange(first, text.size), zeros, zeros, np.zeros((1, 0), np.int64))
        self._sampler.add(0, SamplingParams(temperature=temperature, seed=seed), text[:first], first, ())
        return rows, drawing

    def trace(self, text: np.ndarray, num_tokens: int, temperature: float, seed: int) -> np.ndarray:
        """[2 + num_exits, num_tokens]: draft margin, match (0 or 1), and the exit margins."""
        first = text.size - num_tokens
        rows, drawing = self._begin(text, first, temperature, seed)
        drawn = self._sampler.sample_draft(self._draft.run_segment(0, rows, None), drawing, 4)
        assert drawn.candidates is not None
        candidates = np.zeros((rows.num_rows, 4), np.int64)
        candidates[first - 1 :] = drawn.candidates
        exit_margins, hidden = [], None
        for segment in sorted(self._target.exits):
            hidden, scores = self._target.run_segment_with_scores(segment, rows, hidden, candidates)
            hidden, scores = hidden.copy(), scores[first - 1 :]
            exit_margins.append(self._sampler.candidate_margins(scores, drawn.candidates, drawing, with_noise=True))
        self._sampler.remove(0)
        return np.array([drawn.margins, drawn.tokens == text[first:], *exit_margins], np.float64)


def fit(margins: np.ndarray, is_match: np.ndarray) -> AcceptanceProcess:
    """margins and is_match [num_texts, num_tokens]. Ease from the margins; luck by search over a grid."""
    ranks = margins.argsort(axis=None).argsort().reshape(margins.shape)
    inverse = np.vectorize(NormalDist().inv_cdf)
    scores = inverse((ranks + 0.5) / margins.size)
    ease = fit_latent(scores)
    knots = inverse(LEVELS)
    width = 0.35  # of the window, in normal scores, over which a chance is averaged
    weights = np.exp(-0.5 * ((scores.reshape(-1)[None] - knots[:, None]) / width) ** 2)
    chances = np.clip((weights @ is_match.reshape(-1)) / weights.sum(axis=1), 0.02, 0.995)
    start = AcceptanceProcess(ease, Latent(0.0, 0.0), knots, np.quantile(margins, LEVELS), chances)
    wanted = figures(is_match)
    best, best_error = start, np.inf
    for share in (0.0, 0.05, 0.1, 0.15, 0.2, 0.3):
        for persistence in (0.0, 0.2, 0.4, 0.6, 0.8):
            candidate = replace(start, luck=Latent(share, persistence)).at_level(float(is_match.mean()))
            error = distance(figures(candidate.sample(NUM_JUDGED, is_match.shape[1])[1]), wanted)
            if error < best_error:
                best, best_error = candidate, error
    # The shift belongs to the fit: a process that is stored has its own level.
    inverse_chances = inverse(best.chances) + best.shift
    return replace(best, chances=np.vectorize(NormalDist().cdf)(inverse_chances), shift=0.0)


def fit_latent(scores: np.ndarray) -> Latent:
    """Moments: the far autocorrelation is the request's share, the near one tells the memory of the rest."""
    far = float(np.mean([autocorrelation(scores, lag) for lag in (24, 32, 48, 64)]))
    share = min(max(far, 0.0), 0.9)
    near = (autocorrelation(scores, 1) - share) / (1.0 - share)
    return Latent(round(share, 4), round(float(np.clip(near, 0.0, 0.95)), 4))


def autocorrelation(values: np.ndarray, lag: int) -> float:
    """Of values [num_texts, num_tokens] about their common mean, so that the texts' levels count."""
    centred = values - values.mean()
    return float((centred[:, :-lag] * centred[:, lag:]).mean() / centred.var())


def figures(is_match: np.ndarray) -> dict[str, list[float]]:
    """What a process is judged by: mean accepted length per draft length, autocorrelation, spread over texts."""
    return {
        "match_rate": [float(is_match.mean())],
        "mean_accepted": [mean_accepted(is_match, length) for length in LENGTHS],
        "autocorrelation": [autocorrelation(is_match.astype(np.float64), lag) for lag in LAGS],
        "spread_over_texts": [float(is_match.mean(axis=1).std())],
    }


def mean_accepted(is_match: np.ndarray, length: int) -> float:
    """Draft tokens kept per round of `length`, over rounds that begin where the one before ended: right behind a
    miss more often than elsewhere, and misses come in clusters."""
    num_texts, num_tokens = is_match.shape
    runs = np.cumprod(np.lib.stride_tricks.sliding_window_view(is_match, length, axis=1), axis=2).sum(axis=2)
    position, texts = np.zeros(num_texts, np.int64), np.arange(num_texts)
    total = rounds = 0
    while texts.size:
        accepted = runs[texts, position[texts]]
        total, rounds = total + int(accepted.sum()), rounds + texts.size
        position[texts] += accepted + 1
        texts = texts[position[texts] <= num_tokens - length]
    return total / rounds


def distance(found: dict[str, list[float]], wanted: dict[str, list[float]]) -> float:
    accepted = np.array(found["mean_accepted"]) / np.array(wanted["mean_accepted"]) - 1.0
    memory = np.array(found["autocorrelation"]) - np.array(wanted["autocorrelation"])
    spread = np.array(found["spread_over_texts"]) - np.array(wanted["spread_over_texts"])
    return float((accepted**2).mean() + (memory**2).mean() + (spread**2).mean())


def auc_given_margin(values: np.ndarray, is_match: np.ndarray, margins: np.ndarray) -> float:
    """The AUC within tenths of the draft margin, averaged over the pairs that each tenth holds: what an exit tells
    beyond what the draft told already."""
    tenths = np.array_split(margins.argsort(), 10)
    pairs = [int(is_match[of].sum()) * int((~is_match[of]).sum()) for of in tenths]
    aucs = [
        area_under_curve(values[of], is_match[of]) if count else 0.0 for of, count in zip(tenths, pairs, strict=True)
    ]
    return float(np.average(aucs, weights=pairs))


def fit_traces(traces: np.ndarray) -> dict[str, Any]:
    """traces [num_texts, 2 + num_exits, num_tokens]; even texts are fitted, odd ones judge."""
    margins, is_match = traces[:, 0], traces[:, 1] > 0.5
    process = fit(margins[::2], is_match[::2])
    flat_margins, flat_match = margins.reshape(-1), is_match.reshape(-1)
    exits = {
        str(layer): {
            "auc": round(area_under_curve(values := traces[:, 2 + index].reshape(-1), flat_match), 4),
            "auc_given_margin": round(auc_given_margin(values, flat_match, flat_margins), 4),
        }
        for index, layer in enumerate(EXIT_LAYERS)
    }
    judged = {
        "fitted_texts": figures(is_match[::2]),
        "held_out_texts": figures(is_match[1::2]),
        "process": figures(process.sample(NUM_JUDGED, is_match.shape[1])[1]),
    }
    rounded = {name: {key: np.round(v, 4).tolist() for key, v in of.items()} for name, of in judged.items()}
    return {"process": process.as_dict(), "exits": exits, "judged_by": rounded, "num_texts": len(traces)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-tokens", type=int, default=100, help="of each text")
    parser.add_argument("--temperature", type=float, default=0.8, help="of the sampled texts")
    folder = ROOT / "lab" / "simulation"
    parser.add_argument("--output", type=Path, default=folder / "acceptance_demo.json")
    options = parser.parse_args()
    prompts = [prompt.text for prompt in read_prompts(DEMO_PROMPTS)]
    result: dict[str, Any] = {"lengths": list(LENGTHS), "lags": list(LAGS), "tokens_per_text": options.num_tokens}
    with tempfile.TemporaryDirectory(prefix="faser-fit-") as folder_name:
        engine_dir = Path(folder_name) / "engine"
        build_engines(DEMO / "target", DEMO / "draft", engine_dir, exit_layers=EXIT_LAYERS)
        tracer = Tracer(engine_dir)
        for kind, temperature in (("greedy", 0.0), ("sampled", options.temperature)):
            # Greedy decoding writes one text per prompt; sampling writes another with every seed.
            texts = write_texts(engine_dir, prompts * (3 if temperature else 1), options.num_tokens, temperature)
            traces = [tracer.trace(text, options.num_tokens, temperature, seed) for seed, text in enumerate(texts)]
            result[kind] = {"temperature": temperature} | fit_traces(np.array(traces))
            print(kind, json.dumps(result[kind]["judged_by"], indent=1), result[kind]["exits"])
    options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
