"""What `faser bench` says of its numbers: who wins, what pays, and when not to believe it."""

from __future__ import annotations

import pytest

from lab.answers import merge_repeats
from lab.bench.compare import add_comparisons, best_static, gain, in_words, is_clear, spread_warning
from lab.drive import ClosedLoop, OpenLoop


def row(policy: str, speed: float, *, spread: float = 0.01, load: str = "low", e2e: float = 10.0, **fields) -> dict:
    note = {
        "(no exit)": {"early_exit": "off"},
        "(run-ahead)": {"pipeline": "run_ahead"},
        "(n-grams)": {"draft": "ngram"},
    }
    spec, _, ablation = policy.partition(" ")
    return {
        "policy": policy,
        "spec": spec,
        "options": note.get(ablation, {}),
        "load": load,
        "temperature": 0.8,
        "tokens_per_s": speed,
        "tokens_per_s_min": speed * (1 - spread),
        "tokens_per_s_max": speed * (1 + spread),
        "tokens_per_s_repeats": [speed, speed * (1 - spread), speed * (1 + spread)],
        "e2e_ms_p50": e2e,
        "e2e_ms_p50_repeats": [e2e, e2e * (1 + spread), e2e * (1 - spread)],
        "num_different": 0,
        "num_jobs": 4,
        "repeats": 3,
        "rows_pruned": 0,
        "rows_drafted": 0,
        "share_serial": 1.0,
        "share_run_ahead": 0.0,
        **fields,
    }


def test_the_best_policy_leads_unless_none_beats_plain_decoding():
    rows = [row("none", 100), row("fixed:2", 150), row("fixed:4", 140), row("fixed:8", 80), row("faser", 200)]
    assert "`faser` leads" in in_words(rows)[0] and "slower than `none`: `fixed:8`" in in_words(rows)[0]
    assert "leads" not in in_words([row("none", 100), row("fixed:4", 90)])[0]


@pytest.mark.parametrize(
    ("whole", "without", "verdict"),
    [
        (row("faser", 200, rows_pruned=9), row("faser (no exit)", 150), "Early exit pays on `faser` (1.33x)"),
        (row("faser", 150, rows_pruned=9), row("faser (no exit)", 200), "Early exit costs on `faser` (0.75x)"),
        (row("faser", 150, rows_pruned=9), row("faser (no exit)", 151), "Early exit makes no clear difference"),
        (row("faser", 200), row("faser (no exit)", 150), "Early exit was never chosen by `faser`"),
    ],
)
def test_a_mechanism_is_judged_by_taking_it_out(whole: dict, without: dict, verdict: str):
    assert verdict in in_words([row("none", 100), whole, without])[0]


def test_a_forced_mechanism_is_judged_only_if_it_ran():
    plain = row("fixed:4", 100)
    ran = row("fixed:4 (run-ahead)", 120, share_run_ahead=0.9)
    assert "Running ahead pays on `fixed:4` (1.20x)" in in_words([row("none", 50), plain, ran])[0]
    looked_up = row("fixed:4 (n-grams)", 80, rows_drafted=9)
    assert "Drafting by n-grams costs on `fixed:4` (0.80x)" in in_words([row("none", 50), plain, looked_up])[0]
    idle = row("fixed:4 (run-ahead)", 120)
    assert (
        "`fixed:4 (run-ahead)` was asked for, but nothing of it came to run"
        in in_words([row("none", 50), plain, idle])[0]
    )


def test_bursts_are_judged_by_latency_and_the_best_static_length_with_them():
    rows = [row("none", 100, load="bursty", e2e=30.0)]
    rows += [row("fixed:2", 100, load="bursty", e2e=20.0), row("fixed:4", 101, load="bursty", e2e=25.0)]
    add_comparisons(rows)
    assert [each["is_best_static"] for each in rows] == [False, True, False]
    assert gain(rows[1], rows[0]) == rows[1]["e2e_gain_none"] == pytest.approx(1.5)
    assert best_static(rows[:1]) is None


def test_differing_answers_and_busy_machines_are_told():
    assert "the same, token by token" in in_words([row("none", 1), row("fixed:4", 2)])[-1]
    assert "3 of 4 answers differ" in in_words([row("none", 1), row("fixed:4", 2, num_different=3)])[-1]
    assert spread_warning([row("none", 100)]) == []
    assert "40%" in spread_warning([row("none", 100, spread=0.2)])[0]


def test_loops_and_repeats():
    closed = ClosedLoop(4)
    assert closed.num_due(9.0, 0) == 4 and closed.num_due(9.0, 3) == 7 and closed.due_s(5, 2.5) == 2.5
    opened = OpenLoop([0.0, 0.5, 0.5, 2.0])
    assert [opened.num_due(now, 0) for now in (0.0, 0.4, 0.5, 3.0)] == [1, 1, 3, 4] and opened.due_s(3, 9.0) == 2.0
    runs = [{"tokens_per_s": 3.0, "e2e_ms_p50": 9.0, "n": 1}, {"tokens_per_s": 5.0, "e2e_ms_p50": 7.0, "n": 4}]
    assert merge_repeats(runs) == {
        "tokens_per_s": 4.0, "e2e_ms_p50": 8.0, "n": 1, "tokens_per_s_repeats": [3.0, 5.0],
        "e2e_ms_p50_repeats": [9.0, 7.0],
    }  # fmt: skip


def test_ratios_are_taken_within_a_repeat_and_told_with_their_range():
    """A machine that was half as fast in the second repeat was so for both."""
    slow, fast = row("none", 100), row("faser", 110)
    slow["tokens_per_s_repeats"], fast["tokens_per_s_repeats"] = [100, 50, 120], [110, 54, 126]
    rows = [slow, fast]
    add_comparisons(rows)
    assert fast["speedup_none"] == pytest.approx(1.08) and fast["speedup_none_range"] == pytest.approx([1.05, 1.1])
    assert is_clear(fast, slow) and not is_clear(row("faser", 101), slow)
    fast["tokens_per_s_repeats"][1] = 49
    assert not is_clear(fast, slow), "one repeat says otherwise"
    assert "1.05x (0.98 to 1.10) of `none`" in in_words(rows)[0]
