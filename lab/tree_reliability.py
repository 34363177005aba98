"""How often nodes of trees are accepted, by rank among siblings and by depth, beside the chances that the draft gave.

    python -m lab.tree_reliability ENGINE_DIR --prompts question.jsonl --chat [--policies tree:8] [--draft model]

A node is tested where the target's draws led to its parent. Counts, not times: they do not depend on what else the
machine does. Writes NAME.md, NAME.json and NAME.png.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from faser_backend.config import EngineConfig
from faser_backend.core.errors import FaserError
from faser_backend.core.record import StepRecord
from faser_backend.core.tree import MOST_CHILDREN
from lab import environment
from lab.answers import jobs_of
from lab.drive import ClosedLoop, InProcess
from lab.options import add_prompt_options, asked_prompts, make_parser
from lab.prompts import interleaved
from lab.tables import markdown_table, write_results

NUM_BINS = 10
MOST_DEPTH = 4  # deeper nodes count as this deep
CLIENTS = 16


class Tested(NamedTuple):
    """A node whose parent was reached."""

    rank: int  # among its siblings, from 1
    depth: int
    chance: float  # that the draft gave it, its parent being reached
    is_accepted: bool


class Counter:
    """An observer of steps."""

    def __init__(self) -> None:
        self.nodes: list[Tested] = []
        self.num_trees = self.num_kept = 0

    def observe(self, record: StepRecord) -> None:
        tree, path = record.frontier.tree, record.acceptance.path
        if tree is None or path is None or tree.log_chances is None:
            return
        is_tree = (record.frontier.num_drafted > 0) & ~record.frontier.is_look_up
        for b in np.flatnonzero(is_tree).tolist():
            reached = set(path.rows[b, : record.acceptance.num_accepted[b] + 1].tolist())
            num_seen: dict[int, int] = defaultdict(int)
            log_chances = [0.0, *tree.log_chances[b].tolist()]  # by row
            for k, parent in enumerate(tree.parents[b, : record.frontier.num_drafted[b]].tolist()):
                num_seen[parent] += 1
                if parent in reached:
                    depth = min(int(tree.lines.depths[b, k + 1]), MOST_DEPTH)
                    chance = float(np.exp(log_chances[k + 1] - log_chances[parent]))
                    self.nodes.append(Tested(num_seen[parent], depth, chance, k + 1 in reached))
            self.num_trees += 1
            self.num_kept += len(reached) - 1


def by_rank_and_depth(nodes: list[Tested]) -> list[dict[str, Any]]:
    rows = []
    for depth in range(1, MOST_DEPTH + 1):
        for rank in range(1, MOST_CHILDREN + 1):
            own = [node for node in nodes if (node.depth, node.rank) == (depth, rank)]
            if own:
                rows.append({"depth": depth, "rank": rank} | _shares(own))
    return rows


def by_chance(nodes: list[Tested]) -> list[dict[str, Any]]:
    """Bins of equally many nodes."""
    ordered = sorted(nodes, key=lambda node: node.chance)
    return [
        _shares([ordered[i] for i in part]) for part in np.array_split(np.arange(len(ordered)), NUM_BINS) if part.size
    ]


def _shares(nodes: list[Tested]) -> dict[str, Any]:
    return {
        "tested": len(nodes),
        "given": float(np.mean([node.chance for node in nodes])),
        "accepted": float(np.mean([node.is_accepted for node in nodes])),
    }


def draw(path: Path, found: dict[str, list[Tested]]) -> None:
    """A curve for each law of the draws. Matplotlib is an extra."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 4.5), layout="constrained")
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1, label="as given")
    for (name, nodes), marker in zip(found.items(), "os^v", strict=False):
        bins = by_chance(nodes)
        axes.plot([each["given"] for each in bins], [each["accepted"] for each in bins], marker=marker, label=name)
    axes.set(xlabel="chance that the draft gave a node", ylabel="share that was accepted", xlim=(0, 1), ylim=(0, 1))
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = make_parser(
        __doc__, "seed", "output", policies="tree:8", temperatures="0,0.8", threads=None, max_tokens=64,
        name="tree_reliability",
    )  # fmt: skip
    parser.add_argument("engine_dir", type=Path)
    parser.add_argument("--draft", default="model", help="model or model+ngram, whose look-ups are not counted")
    parser.add_argument("--num-answers", type=int, default=60)
    add_prompt_options(parser)
    args = parser.parse_args()
    asked = asked_prompts(args, args.engine_dir)
    config = EngineConfig.from_options(
        policy=args.policies, draft=args.draft, max_num_seqs=CLIENTS, max_queue_size=0, num_threads=args.threads
    )
    meta = environment.describe(args.seed) | {"prompts": asked.as_dict()}
    found: dict[str, list[Tested]] = {}
    lines, rows = [], []
    place = InProcess(args.engine_dir, {args.policies: config})
    try:
        for temperature in map(float, args.temperatures.split(",")):
            counter = Counter()
            observers = place.engine(args.policies).stepper.observers
            observers.append(counter.observe)
            jobs = jobs_of(interleaved(asked.prompts), args.num_answers, args.max_tokens, temperature, args.seed)
            place.serve(args.policies, jobs, ClosedLoop(CLIENTS))
            observers.remove(counter.observe)
            found[f"T = {temperature:g}"] = counter.nodes
            table = by_rank_and_depth(counter.nodes)
            rows.append({"temperature": temperature, "nodes": table, "bins": by_chance(counter.nodes)})
            kept = counter.num_kept / max(counter.num_trees, 1)
            lines += [f"## T = {temperature:g}", "", f"{counter.num_trees} trees kept {kept:.2f} tokens each.", ""]
            lines += [*markdown_table(["depth", "rank", "tested", "given", "accepted"], table), ""]
    finally:
        place.close()
    note = (
        f"{args.engine_dir.name}, `{args.policies}`, {args.num_answers} answers of up to {args.max_tokens} tokens. A "
        f"node is tested where its parent was reached; nodes deeper than {MOST_DEPTH} count as {MOST_DEPTH} deep. "
        "Given: the mean chance that the draft gave, in whose place the price rule counts."
    )
    lines = [note, "", f"![reliability]({args.name}.png)", "", *lines]
    print(write_results(args.output / args.name, "Nodes of trees, by rank and depth", meta, lines, rows))
    draw(args.output / f"{args.name}.png", found)


if __name__ == "__main__":
    try:
        main()
    except FaserError as error:
        sys.exit(f"error: {error}")
