"""`faser bench` on tiny engines: its files, its accounting, its contestants and its words."""

import asyncio
import json
import re
import shutil
from collections.abc import Generator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from faser_backend.core.config import EngineConfig
from faser_backend.core.errors import ConfigError, FaserError
from faser_backend.core.plan import StepRecord
from faser_backend.core.sequence import Sequence
from faser_backend.lab import answers
from faser_backend.lab import drive as driver
from faser_backend.lab.answers import Answer, Job, jobs_of
from faser_backend.lab.bench import command, compare, wire
from faser_backend.lab.bench.command import BenchRun, run_bench
from faser_backend.lab.bench.compare import add_comparisons, best_static, gain
from faser_backend.lab.bench.plan import TRIAL_WAVES, Speed, load_s
from faser_backend.lab.bench.report import render
from faser_backend.lab.bench.wire import make_request
from faser_backend.lab.checks.servers import LoadClient, serve_all
from faser_backend.lab.command_options import BenchOptions
from faser_backend.lab.contestants import LOADS, Contestant, Sizing, split_names
from faser_backend.lab.drive import ClosedLoop, InProcess, OpenLoop, OwnClock, take_turns
from faser_backend.lab.peers.programs import body_of
from faser_backend.lab.steps import count_lost, figures
from faser_backend.text.prompts import Prompt
from tests.engines import test_prompt_files
from tests.engines.test_prompt_files import load
from tests.support.harness import request, step_record
from tests.support.serving_pair import END_ID

CONTRACT = (
    "policy", "load", "tokens_per_s", "ttft_ms_p50", "tpot_ms_p50", "itl_ms_p99", "e2e_ms_p50", "mean_accepted",
    "rows_drafted", "rows_accepted", "rows_verified", "rows_pruned", "overlap_share", "repeats", "share_serial",
    "plan_us_mean", "plan_us_p99", "plan_share",
)  # fmt: skip
TINY = Sizing(2, 0.01, 1, 0.2, 6, (0.8,), bursty_ablations=False)
CHOSEN = "none,fixed:2,survival,fixed:4 (ping-pong)"

questions = test_prompt_files.questions  # four


@pytest.fixture(scope="module")
def output(engine_dir: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs it once; most tests here read the files."""
    home = tmp_path_factory.mktemp("bench")
    options = BenchOptions(output=home, engine_dir=engine_dir, policies=CHOSEN, prompts=questions, seed=3, is_chat=True)
    run_bench(options, TINY, command="faser bench --test")
    return home


@pytest.fixture(scope="module")
def bench(output: Path) -> dict:
    return json.loads((output / "bench.json").read_text())


def test_every_contestant_has_a_row_per_load(bench):
    rows = bench["rows"]
    closed = {(row["policy"], row["load"], row["temperature"]) for row in rows if row["load"] != "bursty"}
    names = split_names(CHOSEN)
    assert closed == {(name, load, 0.8) for name in names for load in ("low", "middle", "saturating")}
    bursty = {row["policy"] for row in rows if row["load"] == "bursty"}
    assert bursty == set(names) - {"fixed:4 (ping-pong)"}  # a short run has no bursty ablations
    assert all(name in row for row in rows for name in CONTRACT)
    assert all(row["repeats"] == 2 and row["num_different"] == 0 for row in rows)
    assert all(row["aa_spread"]["least"] <= row["aa_spread"]["median"] <= row["aa_spread"]["most"] for row in rows)


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
    assert {row["policy"] for row in best} == {"fixed:2"} and len(best) == 4


def test_report_is_one_file_that_says_what_it_is(output: Path, bench):
    html = (output / "report.html").read_text()
    assert not re.search(r'(?:src|href)="(?!https://ui\.perfetto\.dev|#)', html)
    assert html.count("<svg") == 1 and len(html) < 3_000_000
    for text in ("faser bench --test", bench["meta"]["commit"], "synthetic", "survival", "seed 3", "<td>writing</td>"):
        assert text in html
    assert "had only guesses" in html  # these engines were never profiled
    assert "Roofline" in html and "Roofline" not in render(bench | {"meta": bench["meta"] | {"roofline": None}})
    assert "rag 1 of 1" in html and "question.jsonl, as messages" in html  # what was left out, what is asked


def test_bad_options_are_named_before_anything_runs(engine_dir, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    for options, message in (
        (BenchOptions(output=tmp_path, policies="oracle"), "--policies = 'oracle': unknown; known are none"),
        (BenchOptions(output=tmp_path, engine_dir=engine_dir, prompts=file), "the file holds no prompts"),
        (BenchOptions(output=tmp_path, budget_s=-1.0), "--budget-s = -1: must be above 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            run_bench(options, TINY, command="")
    monkeypatch.setattr(wire, "CONNECT_TIMEOUT_S", 0.1)
    with pytest.raises(ConfigError, match="no server answers there by gRPC"):
        asyncio.run(wire.run_jobs("127.0.0.1:1", [], 1))


def test_a_profile_takes_a_third_of_the_budget_and_an_invalid_one_is_not_missing(engine_dir, tmp_path, monkeypatch):
    budgets, copy = [], Path(shutil.copytree(engine_dir, tmp_path / "engine"))
    monkeypatch.setattr(command, "demo_engine_dir", lambda: copy)

    def profile(folder: Path, *, budget_s: float, **_: object) -> None:
        (folder / "profile.json").touch()
        budgets.append(budget_s)

    monkeypatch.setattr(command, "run_profile", profile)
    with pytest.raises(ConfigError, match=r"none\.csv: not readable as a trace"):  # before anything is measured
        BenchRun(BenchOptions(output=tmp_path, trace=tmp_path / "none.csv"), TINY)
    BenchRun(BenchOptions(output=tmp_path, policies="none", budget_s=60.0), TINY)
    assert budgets == pytest.approx([20.0], abs=2.0) and not (copy / "profile.json").exists()
    (copy / "profile.json").write_text("{}")
    assert BenchRun(BenchOptions(output=tmp_path, policies="none", engine_dir=copy), TINY).warnings == []


def recorded(sequence: Sequence, first: int, drafted: list[int], *, rows: int, kept: int, accepted: int) -> StepRecord:
    record = step_record([sequence], [len(drafted)], [accepted], num_kept=np.array([kept]))
    frontier = replace(record.frontier, drafted=np.array([drafted]), num_rows=np.array([rows]))
    return replace(record, frontier=frontier, num_tokens=np.array([first]))


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
        ([10, 11, 12, 99], 1, 0, 0, (2, 1)),  # none was accepted
        ([12, 13, 14, 15, 16], 1, 1, 1, (1, 0)),  # the answer ends first
    ],
)
def test_lost_tokens_are_those_that_the_answer_has_in_their_place(drafted, rows, kept, accepted, lost):
    sequence = Sequence.from_request(request("r", [1, 2], max_tokens=4), 0)
    sequence.append([10, 11, 12, 13])
    first = 4 if drafted[0] == 12 else 2
    records = [recorded(sequence, first, drafted, rows=rows, kept=kept, accepted=accepted)]
    assert count_lost(records) == lost
    found = figures(SimpleNamespace(records=records, target_laps=[]), 3)  # pyright: ignore[reportArgumentType]
    assert found["retention"] == (accepted / (accepted + sum(lost)) if any(lost) else 1.0)


# -- chats and categories ----------------------------------------------------------------------------


def test_a_chat_ends_where_the_model_ends_it_and_goes_to_everyone_alike(engine_dir: Path, questions: Path):
    (job,) = jobs_of(load(questions, engine_dir).prompts, 1, 8, 0.0, 0)
    place, plain, sent, names = InProcess(engine_dir), replace(job, is_chat=False), make_request(job, 0), []
    assert place.request(0, job).prompt_ids.tolist() == list(job.prompt_ids) == body_of(job)["prompt"]
    for each, end_ids, own in ((plain, (), {"text_input", "end_id"}), (job, (END_ID,), {"messages"})):
        assert place.request(0, each).end_ids == end_ids and body_of(each)["ignore_eos"] is not each.is_chat
        names = [tensor.name for tensor in make_request(each, 0).inputs]
        assert {"messages", "text_input", "end_id"} & {*names} == own
    message = sent.raw_input_contents[names.index("messages")][4:]
    assert json.loads(message) == [{"role": "user", "content": job.prompt}]


def test_a_server_answers_messages_as_the_engines_in_process(engine_dir: Path, questions: Path, tmp_path: Path):
    prompts = load(questions, engine_dir, max_tokens=300).prompts
    alone = InProcess(engine_dir)
    alone.open("fixed:4", EngineConfig.from_options(policy="fixed:4"))
    options = ["--engine-dir", str(engine_dir), "--policy", "fixed:4", "--num-threads", "1"]
    with ExitStack() as stack:
        stack.callback(alone.close)
        served = serve_all(stack, LoadClient(stack), {"served": options}, tmp_path)["served"]
        for chat in (True, False):
            jobs = [replace(job, is_chat=chat) for job in jobs_of(prompts, 12, 300, 1.0, 0)]
            if not chat:  # completions of the bare text
                jobs = [replace(job, prompt_ids=()) for job in jobs]
            here, there = (found[0] for found in (alone.run("fixed:4", jobs, 4), served(jobs, 4)))
            assert [trace.num_tokens for trace in here] == [trace.num_tokens for trace in there]
            assert [trace.num_accepted for trace in here] == pytest.approx([t.num_accepted for t in there], abs=4)
            has_ended = [trace.num_tokens < 300 for trace in here]
            assert any(has_ended) if chat else not any(has_ended)


def answer(seconds: float, num_tokens: int, num_accepted: int) -> Answer:
    responses = [1.0 + seconds * (step + 1) / 2 for step in range(2)]
    return Answer(1.0, responses, num_tokens, num_tokens, num_accepted, "")


def test_figures_of_a_category_are_those_of_its_requests():
    jobs = [Job("", 8, 0.0, 0, category) for category in ("a", "b", "a", "")]
    traces = [answer(1.0, 8, 4), answer(4.0, 8, 6), answer(3.0, 8, 0), answer(2.0, 8, 4)]
    traces[3].num_steps = 5  # of them one without a bonus token
    found = answers.summarise_categories(jobs, traces)
    assert list(found) == ["a", "b", "(none)"]
    assert (found["a"]["num_answers"], found["a"]["num_tokens"]) == (2, 16)
    assert [found[name]["request_tokens_per_s"] for name in found] == pytest.approx([4.0, 2.0, 4.0])
    assert [found[name]["mean_emitted"] for name in found] == pytest.approx([16 / 12, 4.0, 8 / 5])
    assert found["b"]["e2e_ms_p50"] == pytest.approx(4000.0)
    merged = answers.merge_categories([found, {name: {**found[name], "request_tokens_per_s": 1.0} for name in found}])
    reference = {name: {"request_tokens_per_s_repeats": [2.0, 1.0]} for name in found}
    answers.add_category_speedups(merged, reference)
    assert merged["a"]["request_tokens_per_s_repeats"] == pytest.approx([4.0, 1.0])
    assert merged["a"]["speedup"] == pytest.approx(1.5) and merged["a"]["num_answers"] == 2
    assert answers.summarise_categories(jobs[3:], traces[3:]) == {}
    sizing = replace(TINY, num_categories=9)  # so one client has nine jobs in each of a warm-up and two repeats
    assert load_s(LOADS[0], sizing, [Contestant("none")], {"low": Speed(1.0, 0.0)}) == TRIAL_WAVES + 3 * 9


# -- turns ---------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replaces the machine's clock."""
    machine = SimpleNamespace(s=100.0, perf_counter_ns=lambda: round(machine.s * 1e9))
    monkeypatch.setattr(driver, "time", machine)
    return machine


def worker(machine: SimpleNamespace, clock: OwnClock, num_steps: int, step_s: float) -> Generator[float, None, float]:
    """Returns how long it believes to have worked."""
    start_s = clock.now_s()
    for step in range(num_steps):
        machine.s += step_s
        yield (step + 1) / num_steps
    return clock.now_s() - start_s


def test_time_is_each_ones_own(machine: SimpleNamespace):
    clocks = {"quick": OwnClock(), "slow": OwnClock()}
    shares: list[float] = []
    runs = {"slow": worker(machine, clocks["slow"], 10, 0.5), "quick": worker(machine, clocks["quick"], 100, 0.01)}
    assert take_turns(runs, clocks, shares.append, 0.1) == pytest.approx({"slow": 5.0, "quick": 1.0})
    assert machine.s == pytest.approx(106.0)
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert shares[0] == pytest.approx(0.05)  # a step that is longer than a turn ends it
    assert shares[1] == pytest.approx(0.1)  # ten steps make a turn
    before_s = clocks["slow"].now_s()
    machine.s += 1.0
    assert clocks["slow"].now_s() - before_s == pytest.approx(1.0)  # afterwards clocks run as ever


def test_an_error_ends_all_and_stops_no_clock(machine: SimpleNamespace):
    def failing() -> Generator[float, None, float]:
        yield 0.5
        raise FaserError("no")

    clocks = {"a": OwnClock(), "b": OwnClock()}
    with pytest.raises(FaserError, match="no"):
        take_turns({"a": worker(machine, clocks["a"], 9, 1.0), "b": failing()}, clocks, lambda share: None, 0.1)
    before = [clock.now_ns() for clock in clocks.values()]
    machine.s += 1.0
    assert [clock.now_ns() - ns for clock, ns in zip(clocks.values(), before, strict=True)] == [10**9, 10**9]


def test_turns_change_no_answer_and_idle_time_is_not_waited_for(engine_dir: Path):
    with closing(InProcess(engine_dir)) as place:
        for name in ("none", "fixed:3"):
            place.open(name, EngineConfig.from_options(policy=name, enable_prefix_reuse=False))
        jobs = jobs_of([Prompt("def f(x):"), Prompt("return")], 6, 12, 0.8, 5)
        alone, _ = place.run("none", jobs, 2)
        together = place.serve_in_turns(["fixed:3", "none"], jobs, ClosedLoop(2))
        assert list(together) == ["fixed:3", "none"]
        for traces, seconds in together.values():
            assert [trace.digest for trace in traces] == [trace.digest for trace in alone]
            assert max(trace.response_s[-1] for trace in traces) - min(trace.start_s for trace in traces) <= seconds
        # Requests an hour apart: each begins when it is due by the run's own clock.
        traces, seconds = place.serve_in_turns(["none"], jobs[:3], OpenLoop([0.0, 3600.0, 7200.0]))["none"]
        assert [round(trace.start_s - traces[0].start_s) for trace in traces] == [0, 3600, 7200]
        assert 7200.0 <= seconds < 7300.0


# -- words ---------------------------------------------------------------------------------------------


def row(policy: str, speed: float, *, spread: float = 0.01, load: str = "low", e2e: float = 10.0, **fields) -> dict:
    note = {"(no exit)": {"early_exit": "off"}}
    spec, _, ablation = policy.partition(" ")
    return {
        "policy": policy, "spec": spec, "options": note.get(ablation, {}), "load": load, "temperature": 0.8,
        "tokens_per_s": speed, "tokens_per_s_repeats": [speed, speed * (1 - spread), speed * (1 + spread)],
        "e2e_ms_p50": e2e, "e2e_ms_p50_repeats": [e2e, e2e * (1 + spread), e2e * (1 - spread)],
        "num_different": 0, "num_jobs": 4, "repeats": 3, **fields,
    }  # fmt: skip


def test_bursts_are_judged_by_latency_and_the_best_static_length_with_them():
    rows = [row("none", 100, load="bursty", e2e=30.0)]
    rows += [row("fixed:2", 100, load="bursty", e2e=20.0), row("fixed:4", 101, load="bursty", e2e=25.0)]
    add_comparisons(rows)
    assert [each["is_best_static"] for each in rows] == [False, True, False]
    assert gain(rows[1], rows[0]) == rows[1]["e2e_gain_none"] == pytest.approx(1.5)
    assert best_static(rows[:1]) is None


def test_ratios_are_taken_within_a_repeat_and_told_with_their_range():
    """A machine that was half as fast in the second repeat was so for both."""
    slow, fast = row("none", 100), row("faser", 110)
    slow["tokens_per_s_repeats"], fast["tokens_per_s_repeats"] = [100, 50, 120], [110, 54, 126]
    rows = [slow, fast]
    add_comparisons(rows)
    assert fast["speedup_none"] == pytest.approx(1.08) and fast["speedup_none_range"] == pytest.approx([1.05, 1.1])
    assert compare.ratio_of(fast, "none") == "1.08"


def test_a_ratio_within_the_spread_of_equal_engines_is_marked():
    rows = [row("none", 100), row("none (again)", 94), row("faser", 105), row("fixed:2", 110)]
    add_comparisons(rows)
    assert [each["policy"] for each in rows] == ["none", "faser", "fixed:2"], "the second engine has no row"
    assert [compare.ratio_of(each, "none") for each in rows] == ["1.00", "1.05 (~1)", "1.10"]
    assert compare.equal_engines(rows[1]) == "0.94-0.94"
    assert compare.headline(rows) == [
        "Against plain decoding, faser is level under low load (1.05x).",
        "Against the best fixed length, known only afterwards, faser is level under low load (0.95x).",
        "Differences up to 6% under low load are noise; all 8 answers equal those of plain decoding.",
    ]
    assert "ahead under low load (1.10x)" in compare.headline(rows[::2])[0], "without faser, of the last"
