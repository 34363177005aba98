"""What overlap and early exit are worth, each against the ratio that decides it, in virtual time.

`python -m lab.simulation.mechanisms --output FOLDER [--profile ENGINE_DIR]` sweeps how long a draft call takes, and how
much an exit knows, on a named machine; with a profiled engine of this machine, its own place is worked out from its
profile and marked. Writes mechanisms.md and mechanisms.png.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import ScalarFormatter

from faser_backend.config import EngineConfig
from faser_backend.core.decision import WHOLE
from faser_backend.policy.cost_model import DRAFT, TARGET, CostModel
from lab.bench.plots import COLOURS, PRUNED, STYLE
from lab.options import make_parser
from lab.simulation.engine import World, build_sim_engine, run_closed_loop
from lab.simulation.worlds import behind_host, profile_world, roofline_world
from lab.tables import Column, markdown_table
from lab.traces import Trace

HARDWARE, PAIR = "h100", "qwen3-32b/0.6b"
NUM_PROMPT, NUM_OUTPUT = 171, 98
LENGTH = 4
DRAFT_CALLS_MS = (0.8, 1.5, 2.7, 4.0, 6.6, 10.0, 15.0)
EXIT_AUCS = (0.52, 0.6, 0.7, 0.8, 0.9, 0.97)
OVERLAP_CLIENTS, EXIT_CLIENTS = 16, 128  # few rows, where drafting shows; many, where a row costs something
OVERLAP_COLUMNS = (
    Column("draft call ms", "draft_call_ms", "{:.1f}"),
    Column("draft time / verify time", "ratio", "{:.2f}"),
    Column("run-ahead", "run_ahead", "{:.2f}x"),
    Column("ping-pong", "ping_pong", "{:.2f}x"),
    Column("`faser`, with overlap / without", "faser", "{:.2f}x"),
)
EXIT_COLUMNS = (
    Column("AUC of the exit", "auc", "{:.2f}"),
    Column("rows pruned of `fixed:4`", "share", "{:.1%}"),
    Column("`fixed:4`, exits on / off", "forced", "{:.2f}x"),
    Column("rows pruned beyond trimming", "share_trimmed", "{:.1%}"),
    Column("`faser`, exits allowed / not", "faser", "{:.2f}x"),
)

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Loop:
    """Clients that each ask for NUM_OUTPUT tokens, one after the other, until each was answered num_rounds times."""

    num_clients: int
    num_rounds: int = 4

    def run(self, world: World, policy: str, **options: str) -> Row:
        """Summary figures, with tokens per second of the whole run as `speed`."""
        size = self.num_clients * self.num_rounds
        trace = Trace(np.zeros(size), np.full(size, NUM_PROMPT), np.full(size, NUM_OUTPUT), "closed loop")
        config = EngineConfig.from_options(
            policy=policy, max_num_seqs=self.num_clients, max_prefill_tokens=2048, max_queue_size=0, **options
        )
        sim = build_sim_engine(world, config, seed=0, max_output_tokens=NUM_OUTPUT)
        found = run_closed_loop(sim, trace, self.num_clients).summary()
        return found | {"speed": found["num_tokens"] / found["makespan_s"]}


def phase_ratio(costs: CostModel, num_sequences: int, context: int) -> float:
    """Time of LENGTH draft calls over the time of one verification of LENGTH + 1 rows per sequence, on the whole."""
    draft = costs.call_us(DRAFT, WHOLE, num_sequences, num_sequences, num_sequences * context)
    rows = num_sequences * (LENGTH + 1)
    verify = costs.call_us(TARGET, WHOLE, rows, num_sequences, num_sequences * context)
    return float(LENGTH * np.ravel(draft)[0] / np.ravel(verify)[0])


def sweep_overlap() -> list[Row]:
    """A row per time of a draft call: gains over the same policy in turns."""
    rows, loop = [], Loop(OVERLAP_CLIENTS)
    for draft_call_ms in DRAFT_CALLS_MS:
        world = behind_host(_world(), draft_call_ms, None)
        in_turns = loop.run(world, f"fixed:{LENGTH}", pipeline="serial")["speed"]
        forced = {
            mode: loop.run(world, f"fixed:{LENGTH}", pipeline=mode)["speed"] / in_turns
            for mode in ("run_ahead", "ping_pong")
        }
        chosen = loop.run(world, "faser")["speed"] / loop.run(world, "faser", pipeline="serial")["speed"]
        ratio = phase_ratio(world.costs, OVERLAP_CLIENTS, NUM_PROMPT + NUM_OUTPUT // 2)
        rows.append({"draft_call_ms": draft_call_ms, "ratio": ratio, **forced, "faser": chosen})
    return rows


def sweep_exits() -> list[Row]:
    """A row per AUC of the exit: gains over the same policy without exits."""
    rows, loop = [], Loop(EXIT_CLIENTS)
    for auc in EXIT_AUCS:
        world = _world(exit_auc=auc)
        plain = loop.run(world, f"fixed:{LENGTH}", early_exit="off")["speed"]
        forced = loop.run(world, f"fixed:{LENGTH}", early_exit="on")
        trimmed = loop.run(world, "faser", early_exit="on")
        without = loop.run(world, "faser", early_exit="off")["speed"]
        rows.append(
            {
                "auc": auc,
                "share": forced["pruned_share"],
                "forced": forced["speed"] / plain,
                "share_trimmed": trimmed["pruned_share"],
                "faser": loop.run(world, "faser")["speed"] / without,
            }
        )
    return rows


def _world(exit_auc: float = 0.75) -> World:
    return roofline_world(HARDWARE, PAIR, max_context=NUM_PROMPT + NUM_OUTPUT, exit_auc=exit_auc)


def draw(overlap: list[Row], exits: list[Row], place: float | None, path: Path) -> None:
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
        ratios = [row["ratio"] for row in overlap]
        for key, label, colour in (
            ("run_ahead", f"fixed:{LENGTH}, run-ahead", COLOURS["fixed:4"]),
            ("ping_pong", f"fixed:{LENGTH}, ping-pong", COLOURS["gp-lcb"]),
            ("faser", "faser, free to choose", COLOURS["faser"]),
        ):
            left.plot(ratios, [row[key] for row in overlap], marker="o", markersize=4, label=label, color=colour)
        left.set(
            xscale="log", xlabel=f"time of {LENGTH} draft calls / time of the verification", ylabel="throughput, x"
        )
        left.xaxis.set_major_formatter(ScalarFormatter())
        left.xaxis.set_minor_formatter(ScalarFormatter())
        left.set_title(f"Overlap against turns, {OVERLAP_CLIENTS} requests")
        if place is not None:
            left.axvline(place, color=PRUNED, linestyle=":", linewidth=1)
            left.annotate("demo pair", (place, left.get_ylim()[0]), rotation=90, fontsize=8, ha="right", va="bottom")
        for key, share, label, colour in (
            ("forced", "share", f"fixed:{LENGTH}, exits on", COLOURS["fixed:4"]),
            ("faser", "share_trimmed", "faser, free to choose", COLOURS["faser"]),
        ):
            points = sorted((100 * row[share], row[key]) for row in exits)
            right.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label, color=colour)
        right.set(xlabel="draft rows that the exit prunes, % of those verified")
        right.set_title(f"Early exit against none, {EXIT_CLIENTS} requests")
        for axes in (left, right):
            axes.axhline(1.0, color="#6b6b6b", linewidth=0.8)
            axes.legend(fontsize=8)
        figure.tight_layout()
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _table(columns: tuple[Column, ...], rows: list[Row]) -> str:
    return "\n".join(markdown_table(columns, rows))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--profile", type=Path, help="a profiled engine of this machine")
    options = parser.parse_args()
    place = None
    if options.profile is not None:
        costs = profile_world(options.profile, OVERLAP_CLIENTS).costs
        place = phase_ratio(costs, OVERLAP_CLIENTS, NUM_PROMPT + NUM_OUTPUT // 2)
    overlap, exits = sweep_overlap(), sweep_exits()
    options.output.mkdir(parents=True, exist_ok=True)
    draw(overlap, exits, place, options.output / "mechanisms.png")
    text = (
        f"# Overlap and early exit, each against what decides it\n\nVirtual time: {HARDWARE}, {PAIR}, prompts of "
        f"{NUM_PROMPT} and answers of {NUM_OUTPUT} tokens in a closed loop, one seed. Throughput over the same policy "
        f"without the mechanism. Remade by `python -m lab.simulation.mechanisms --output FOLDER --profile ENGINE_DIR`."
        f"\n\n{OVERLAP_CLIENTS} requests, draft calls of a given time:\n\n{_table(OVERLAP_COLUMNS, overlap)}\n"
        f"\n{EXIT_CLIENTS} requests, exits that know a given amount beyond the draft's margin:\n\n"
        f"{_table(EXIT_COLUMNS, exits)}\n"
    )
    if place is not None:
        text += f"\nThe demo pair on this machine, by its profile: draft time / verify time {place:.2f}.\n"
    (options.output / "mechanisms.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
