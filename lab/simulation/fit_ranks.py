"""Fits the ranks of the target's tokens among the draft's to the demo pair, and says how well they fit.

    python -m lab.simulation.fit_ranks

The target writes texts at temperature 0.8; the draft is run over the true text, every position in one pass. Half of
the texts are fitted, the other half judges. Writes ranks_demo.json, the simulator's data.
"""

from __future__ import annotations

import argparse
import json

import numpy as np

from faser_backend.core.tree import MOST_CHILDREN
from faser_backend.serving.demo_engine import demo_engine_dir
from lab.places import ROOT
from lab.prompts import DEMO_PROMPTS, read_prompts
from lab.simulation.fit import Tracer, write_texts
from lab.simulation.ranks import RANKS_FILE, RankLaw

TEMPERATURE = 0.8
SEEDS_PER_PROMPT = 3


class RankTracer(Tracer):
    """Runs the draft over whole texts."""

    def ranks(self, text: np.ndarray, num_tokens: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Of the last num_tokens positions: ranks [n] of the text's tokens, C beyond the draft's C best, and these
        tokens' scores [n, C]."""
        first = text.size - num_tokens
        rows, drawing = self._begin(text, first, TEMPERATURE, seed)
        children = self._sampler.sample_children(self._draft.run_segment(0, rows, None), drawing, MOST_CHILDREN)
        self._sampler.remove(0)
        is_it = children.tokens == text[first:, None]
        return np.where(is_it.any(axis=1), is_it.argmax(axis=1), MOST_CHILDREN), children.scores


def held_out_difference(law: RankLaw, margins: np.ndarray, ranks: np.ndarray) -> list[float]:
    """[C] share of positions of at most each rank in the process less that in the traces, matches being the same."""
    drawn = law.draw(np.random.default_rng(0), margins, ranks == 0)
    return [float((drawn <= rank).mean() - (ranks <= rank).mean()) for rank in range(MOST_CHILDREN)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-tokens", type=int, default=100, help="of each text")
    options = parser.parse_args()
    engine_dir = demo_engine_dir()
    prompts = [prompt.text for prompt in read_prompts(DEMO_PROMPTS)] * SEEDS_PER_PROMPT
    texts = write_texts(engine_dir, prompts, options.num_tokens, TEMPERATURE)
    tracer = RankTracer(engine_dir)
    traces = [tracer.ranks(text, options.num_tokens, seed) for seed, text in enumerate(texts)]
    fitted, judged = (
        (np.concatenate([ranks for ranks, _ in half]), np.concatenate([scores for _, scores in half]))
        for half in (traces[::2], traces[1::2])
    )
    law = RankLaw.fitted(fitted[1][:, 0] - fitted[1][:, 1], *fitted)
    within = [float((judged[0] <= rank).mean()) for rank in range(MOST_CHILDREN)]
    difference = held_out_difference(law, judged[1][:, 0] - judged[1][:, 1], judged[0])
    result = {
        "temperature": TEMPERATURE,
        "num_texts": len(texts),
        "shares": law.shares.round(4).tolist(),
        "leads": law.leads.round(3).tolist(),
        "held_out_within_rank": np.round(within, 4).tolist(),
        "process_less_held_out": np.round(difference, 4).tolist(),
    }
    print(json.dumps({name: result[name] for name in ("held_out_within_rank", "process_less_held_out")}))
    (ROOT / "lab" / "simulation" / RANKS_FILE).write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
