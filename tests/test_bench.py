"""`faser bench` on tiny engines: every file that it writes, its accounting, and who takes part."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from engines.build import build_engines
from faser_backend.core.decision import PipelineMode
from faser_backend.core.errors import ConfigError
from faser_backend.core.sequence import Sequence
from faser_backend.policy import registry
from faser_backend.policy.baselines import FixedLength
from lab.bench import command
from lab.bench.command import BenchOptions, run_bench
from lab.bench.timeline import LANES
from lab.contestants import POLICIES, Contestant, Sizing, choose_contestants, split_names
from lab.steps import StepLog, StepNote, count_lost, figures
from tests.harness import drive, fake_engine, request
from tests.serving_pair import write_pair

CONTRACT = (
    "policy", "load", "tokens_per_s", "ttft_ms_p50", "tpot_ms_p50", "itl_ms_p99", "e2e_ms_p50", "mean_accepted",
    "rows_drafted", "rows_verified", "rows_pruned", "overlap_share", "repeats",
)  # fmt: skip
TINY = Sizing(2, 0.01, 1, 0.3, 2, 6, (0.0, 0.8), bursty_ablations=False)
CHOSEN = "none,fixed:2,goodput,fixed:4 (ping-pong)"
FILES = ("bench.json", "report.html", "timeline.json")


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> BenchOptions:
    """A pair with an exit, and short prompts of its own."""
    home = tmp_path_factory.mktemp("bench")
    pair = write_pair(home / "pair")
    build_engines(pair / "target", pair / "draft", home / "engine", exit_layers=(1,))
    prompts = home / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"def f{i}(x):\n    return x"}) + "\n" for i in range(5)))
    return BenchOptions(home / "out", home / "engine", CHOSEN, prompts=prompts, seed=3)


@pytest.fixture(scope="module")
def output(options: BenchOptions) -> Path:
    run_bench(options, TINY, command="faser bench --test")
    return options.output


@pytest.fixture(scope="module")
def bench(output: Path) -> dict:
    return json.loads((output / "bench.json").read_text())


def test_every_contestant_has_a_row_per_load_and_temperature(bench):
    rows = bench["rows"]
    closed = {(row["policy"], row["load"], row["temperature"]) for row in rows if row["load"] != "bursty"}
    names = split_names(CHOSEN)
    assert closed == {(name, load, t) for name in names for load in ("low", "middle", "saturating") for t in (0.0, 0.8)}
    bursty = {row["policy"] for row in rows if row["load"] == "bursty"}
    assert bursty == set(names) - {"fixed:4 (ping-pong)"}  # ablations sit out a short run's bursts
    assert all(name in row for row in rows for name in CONTRACT)
    assert all(row["repeats"] == 2 and row["num_different"] == 0 for row in rows)


def test_rows_add_up(bench):
    for row in bench["rows"]:
        tokens = row["row_layers_accepted"] // 3  # the tiny target has three layers
        assert row["rows_verified"] + row["rows_trimmed"] <= row["rows_drafted"] + tokens
        work = sum(row[f"row_layers_{part}"] for part in ("accepted", "rejected", "pruned"))
        assert work == row["rows_verified"] * 3 - row["row_layers_saved_by_exit"]
        assert row["tokens_per_s_min"] <= row["tokens_per_s"] <= row["tokens_per_s_max"]
        if row["policy"] == "none":
            assert row["rows_drafted"] == 0 and row["speedup_none"] == 1.0 and row["row_layers_rejected"] == 0
    best = [row for row in bench["rows"] if row["is_best_static"]]
    assert {row["policy"] for row in best} == {"fixed:2"} and len(best) == 8


def test_report_is_one_file_that_tells_what_it_is(output: Path, bench):
    html = (output / "report.html").read_text()
    assert not re.search(r'(?:src|href)="(?!https://ui\.perfetto\.dev|#)', html)
    assert html.count("<svg") == 2 and len(html) < 3_000_000
    for text in ("faser bench --test", bench["meta"]["commit"], "synthetic", "goodput", "seed 3"):
        assert text in html
    assert "had only guesses" in html  # these engines were never profiled


def test_timeline_slices_nest_in_their_lanes(output: Path, bench):
    events = json.loads((output / "timeline.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["tid"] for event in slices} == set(LANES.values())
    steps = [event for event in slices if event["name"].startswith("step")]
    assert all(event["args"]["tokens"] >= event["args"]["batch_size"] > 0 for event in steps)
    auto = next(e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == "faser, auto")
    for event in steps:
        told = {"reason", "best_mode", "best_tokens_per_ms"} & set(event["args"])
        assert len(told) == (3 if event["pid"] == auto else 0), event
    for place in {(event["pid"], event["tid"]) for event in slices}:
        open_until: list[float] = []
        for event in sorted((e for e in slices if (e["pid"], e["tid"]) == place), key=lambda e: (e["ts"], -e["dur"])):
            while open_until and open_until[-1] <= event["ts"] + 1e-3:
                open_until.pop()
            end = event["ts"] + event["dur"]
            assert not open_until or end <= open_until[-1] + 1e-3, event
            open_until.append(end)
    assert len(bench["meta"]["timelines"]) == len({event["pid"] for event in slices})


def test_files_are_replaced_together_or_not_at_all(options, tmp_path, monkeypatch):
    old = {name: f"old {name}" for name in FILES}
    for name, text in old.items():
        (tmp_path / name).write_text(text)
    again = BenchOptions(tmp_path, options.engine_dir, "none", prompts=options.prompts)

    def interrupted(content: dict) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "render", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_bench(again, TINY, command="")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == old


def test_bad_options_are_named_before_anything_runs(options, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match=r"--output = .*: File exists; name a directory"):
        run_bench(BenchOptions(file, options.engine_dir), TINY, command="")
    with pytest.raises(ConfigError, match="--policies = 'best': unknown; known are none"):
        run_bench(BenchOptions(tmp_path, options.engine_dir, "best"), TINY, command="")
    empty = BenchOptions(tmp_path, options.engine_dir, "none", prompts=file)
    with pytest.raises(ConfigError, match="the file holds no prompts"):
        run_bench(empty, TINY, command="")


def test_a_registered_policy_takes_part_by_itself(monkeypatch):
    mine, theirs = (registry.NamedPolicy(usage, lambda _: FixedLength(3)) for usage in ("mine", "theirs:K"))
    monkeypatch.setattr(registry, "POLICIES", {**registry.POLICIES, "mine": mine, "theirs": theirs})
    chosen, missing = choose_contestants(None)
    assert Contestant("mine") in chosen and any("theirs:K" in text for text in missing)
    monkeypatch.setattr(registry, "POLICIES", {"none": registry.POLICIES["none"]})
    chosen, missing = choose_contestants(None)
    assert [contestant.name for contestant in chosen] == ["none", "oracle"] and len(missing) == len(POLICIES) - 1


@pytest.mark.parametrize("policy", ["none", "fixed:4", "survival"])
def test_figures_agree_with_the_answers(policy: str):
    engine, target = fake_engine(policy)
    log = StepLog(engine)
    done = drive(engine, [request(f"r{i}", [1, 2, i], max_tokens=20) for i in range(6)])
    found = figures(log, sum(target.num_layers))
    stats = [output.stats for output in done.final.values() if output.stats is not None]
    assert found["rows_drafted"] == sum(each.num_drafted for each in stats)
    assert found["row_layers_accepted"] == 6 * 20 * sum(target.num_layers)
    assert found["mean_length"] == pytest.approx(found["rows_drafted"] / sum(each.num_steps for each in stats))
    assert found["rows_verified"] + found["rows_trimmed"] == found["rows_drafted"] + sum(e.num_steps for e in stats)
    assert found["share_serial"] == 1.0 and 0 < found["step_overhead_share"] <= 1 and found["plan_us_p50"] > 0


def note(sequence: Sequence, first: int, drafted: list[int], *, rows: int, kept: int, accepted: int) -> StepNote:
    counts = (np.array([value]) for value in (first, len(drafted), rows, kept, accepted))
    num_tokens, num_drafted, num_rows, num_kept, num_accepted = counts
    emitted = np.minimum(num_accepted + 1, num_kept)
    chain = np.array([drafted])
    times = (0.0, 0.0, 0.0)
    return StepNote(
        0, 1, PipelineMode.SERIAL, [sequence], set(), num_tokens, chain, num_drafted, num_rows, num_kept,
        num_accepted, emitted, 0, *times,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("drafted", "rows", "kept", "accepted", "lost"),
    [
        ([10, 11, 12, 13], 5, 5, 4, (0, 0)),  # nothing was dropped
        ([10, 11, 12, 13], 2, 2, 2, (2, 0)),  # both dropped tokens are in the answer
        ([10, 11, 12, 13], 5, 2, 2, (0, 2)),  # the same by an exit
        ([10, 11, 12, 13], 3, 2, 2, (1, 1)),  # one row pruned, one never there
        ([10, 11, 99, 13], 2, 2, 2, (0, 0)),  # the first dropped token is wrong, so what follows it is, too
        ([10, 99, 12, 13], 2, 2, 1, (0, 0)),  # a rejection before them: they were lost anyway
        ([10, 11, 12, 99], 1, 1, 1, (2, 0)),
        ([12, 13, 14, 15, 16], 1, 1, 1, (1, 0)),  # the answer ends first
    ],
)
def test_lost_tokens_are_those_that_the_answer_has_in_their_place(drafted, rows, kept, accepted, lost):
    sequence = Sequence.from_request(request("r", [1, 2], max_tokens=4), 0)
    sequence.append([10, 11, 12, 13])
    first = 4 if drafted[0] == 12 else 2
    assert count_lost([note(sequence, first, drafted, rows=rows, kept=kept, accepted=accepted)]) == lost


def test_the_oracle_drafts_what_it_saw_accepted(options: BenchOptions, tmp_path: Path):
    """After its warm-up every token that it drafts is kept, and its answers are everybody's."""
    asked = BenchOptions(tmp_path, options.engine_dir, "none,oracle", prompts=options.prompts, seed=4)
    run_bench(asked, TINY, command="faser bench --test")
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    oracle = [row for row in rows if row["policy"] == "oracle"]
    assert {row["load"] for row in oracle} == {row["load"] for row in rows}
    assert all(row["row_layers_rejected"] == 0 for row in oracle if row["load"] != "bursty"), "no row in vain"
