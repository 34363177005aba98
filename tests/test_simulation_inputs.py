"""What a simulation is fed: traces, machines and pairs, the acceptance process; and the command around them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from faser_backend.cli import app
from faser_backend.core.decision import WHOLE
from faser_backend.core.errors import ConfigError, FaserError
from faser_backend.policy.cost_model import DRAFT, TARGET
from faser_backend.policy.early_exit import logits
from lab.simulation.acceptance import VOCAB_SIZE, demo_process, fitted_fits
from lab.simulation.hardware import MACHINES, PAIRS
from lab.simulation.knowledge import RETENTION
from lab.simulation.roofline import kv_capacity_tokens, roofline
from lab.simulation.trace import (
    Trace,
    arriving_as,
    fitted_to,
    read_trace,
    scaled,
    with_mean_lengths,
    with_rate_curve,
)
from lab.simulation.worlds import roofline_world

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
LINES = [f"2023-11-16 18:15:{46 + i}.6805900,{374 + i},{44 + i}\n" for i in range(6)]


@pytest.fixture
def csv(tmp_path):
    def write(text: str = HEADER + "".join(LINES), name: str = "trace.csv"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def many(count: int = 4000) -> Trace:
    return Trace(np.arange(count) * 0.5, np.full(count, 100), np.full(count, 20), "made up")


# -- traces ------------------------------------------------------------------------------------------


def test_a_trace_is_read_as_it_is(csv):
    trace = read_trace(csv(), 4)
    assert trace.arrivals_s == pytest.approx([0, 1, 2, 3])
    assert trace.num_prompt_tokens.tolist() == [374, 375, 376, 377]
    assert trace.num_output_tokens.tolist() == [44, 45, 46, 47]
    assert trace.longest == 377 + 47
    assert trace.rate == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "column TIMESTAMP is missing"),
        ("TIMESTAMP,ContextTokens\n", "column GeneratedTokens is missing"),
        (HEADER, "holds no requests"),
        (HEADER + "yesterday,1,2\n", "line 2: TIMESTAMP = 'yesterday'"),
        (HEADER + LINES[0] + LINES[1].replace("375", "-3"), "line 3: ContextTokens = '-3': must be a positive"),
        (HEADER + LINES[0].replace(",44", ",0"), "line 2: GeneratedTokens = '0': must be a positive"),
        (HEADER + LINES[0].replace(",44", ""), "line 2: GeneratedTokens = None"),
        (HEADER + LINES[1] + LINES[0], "line 3: TIMESTAMP is earlier"),
    ],
)
def test_a_broken_trace_is_refused_by_line_and_column(csv, text, message):
    with pytest.raises(ConfigError, match=message):
        read_trace(csv(text))


def test_a_missing_file_and_too_few_requests_are_refused(csv, tmp_path):
    with pytest.raises(ConfigError, match="not readable as a trace"):
        read_trace(tmp_path / "nowhere.csv")
    with pytest.raises(ConfigError, match=r"requests = 7: .* holds 6"):
        read_trace(csv(), 7)


def test_scaling_keeps_the_shape_of_arrivals(csv):
    trace = read_trace(csv())
    faster = scaled(trace, 4.0)
    assert faster.rate == pytest.approx(4.0)
    assert faster.arrivals_s * 4 == pytest.approx(trace.arrivals_s)
    assert "4 requests/s" in faster.description


def test_a_rate_curve_has_its_mean_and_its_swing():
    trace = with_rate_curve(many(), 8.0, 35.0, seed=3)
    assert trace.rate == pytest.approx(8.0, rel=0.02)
    span = trace.arrivals_s[-1]
    # Over the twentieth around the peak and the two halves of it at the ends, the rate is near its extremes.
    at_peak = np.count_nonzero(np.abs(trace.arrivals_s / span - 0.5) < 0.025)
    at_trough = np.count_nonzero(np.abs(trace.arrivals_s / span - 0.5) > 0.475)
    assert 22 < at_peak / at_trough < 50
    assert (np.diff(trace.arrivals_s) >= 0).all()
    again, other = with_rate_curve(many(), 8.0, 35.0, seed=3), with_rate_curve(many(), 8.0, 35.0, seed=4)
    assert (trace.arrivals_s == again.arrivals_s).all() and (trace.arrivals_s != other.arrivals_s).any()


def test_a_constant_rate_is_poisson():
    gaps = np.diff(with_rate_curve(many(), 5.0, 1.0, seed=0).arrivals_s)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(("rate", "ratio"), [(0.0, 35.0), (-1.0, 35.0), (5.0, 0.5), (5.0, 2000.0)])
def test_impossible_curves_are_refused(rate, ratio):
    with pytest.raises(ConfigError, match=r"rate = |peak-trough = "):
        with_rate_curve(many(10), rate, ratio, seed=0)


def test_lengths_can_arrive_as_another_trace(csv):
    other = read_trace(csv())
    trace = arriving_as(many(6), other)
    assert (trace.arrivals_s == other.arrivals_s).all() and (trace.num_prompt_tokens == 100).all()
    with pytest.raises(ConfigError, match="6 requests are too few for 7"):
        arriving_as(many(7), other)


def test_lengths_are_fitted_to_a_context_and_the_report_says_so():
    fitted = fitted_to(many(), 60)
    assert fitted.longest <= 60 and fitted.num_output_tokens.min() >= 1
    assert "lengths scaled by 0.5" in fitted.description
    assert fitted_to(many(), 500).description == "made up"


def test_lengths_can_be_given_the_means_of_another_data_set(csv):
    trace = with_mean_lengths(read_trace(csv()), 755, 200)
    assert trace.num_prompt_tokens.mean() == pytest.approx(755, abs=1)
    assert trace.num_output_tokens.mean() == pytest.approx(200, abs=1)
    assert trace.num_prompt_tokens.std() > 1
    with pytest.raises(ConfigError, match="lengths = 0/200"):
        with_mean_lengths(trace, 0, 200)


# -- machines and pairs --------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_no_prediction_beats_the_data_sheet(machine, pair):
    costs = roofline(machine, pair)
    for name, model, ways in ((TARGET, pair.target, machine.num_gpus), (DRAFT, pair.draft, 1)):
        weights = model.num_layers * model.layer_weights
        for partition in costs.partitions:
            for rows in (1, 16, 512, 8192):
                bytes_us = 2 * weights / (ways * machine.bytes_per_s) * 1e6
                flops_us = 2 * weights * rows / (ways * machine.flops_per_s) * 1e6
                us = costs.call_us(name, partition, rows, min(rows, 64), 1000)
                assert us > max(bytes_us, flops_us)
                assert us >= costs.call_us(name, WHOLE, rows, min(rows, 64), 1000)


def test_a_small_batch_is_bound_by_memory_and_a_large_one_by_arithmetic():
    costs = roofline(MACHINES["h100"], PAIRS["qwen3-32b/0.6b"])
    one, eight, large, twice = (
        float(costs.call_us(TARGET, WHOLE, rows, max(rows // 64, 1), 0)) for rows in (1, 8, 2048, 4096)
    )
    assert eight < 1.05 * one
    assert 1.9 < twice / large < 2.1


def test_sizes_of_known_models():
    sizes = {pair.target.name: pair.target.weight_bytes / 2e9 for pair in PAIRS.values()}
    sizes |= {pair.draft.name: pair.draft.weight_bytes / 2e9 for pair in PAIRS.values()}
    known = {"Qwen3-32B": 32.8, "Qwen3-8B": 8.2, "Qwen3-0.6B": 0.6, "Llama-3.3-70B": 70.6, "Llama-3.2-1B": 1.24}
    assert sizes == pytest.approx(known, rel=0.01)


def test_a_pair_that_does_not_fit_is_refused_with_both_sizes():
    with pytest.raises(
        ConfigError, match=r"Llama-3.3-70B and Llama-3.2-1B need 144 GB of weights, .* more than 1 x 96"
    ):
        kv_capacity_tokens(MACHINES["h100"], PAIRS["llama3.3-70b/3.2-1b"])


@pytest.mark.parametrize(("hardware", "pair"), [("h1000", "qwen3-32b/0.6b"), ("h100", "gpt-2")])
def test_unknown_names_are_refused_with_the_known_ones(hardware, pair):
    with pytest.raises(ConfigError, match=r"unknown; known are .*(h100x2|llama3.3-70b/3.2-1b)"):
        roofline_world(hardware, pair, max_context=1000)


# -- the acceptance process ----------------------------------------------------------------------------


def test_a_path_depends_on_its_key_alone():
    process = demo_process("sampled").with_exits((0.8,))
    short, long, other = process.path((1, 2), 50), process.path((1, 2), 80), process.path((1, 3), 50)
    for name in ("tokens", "drafted", "margins"):
        assert (getattr(short, name) == getattr(long, name)[:50]).all()
        assert (getattr(short, name) != getattr(other, name)).any()
    assert (short.exit_margins == long.exit_margins[:, :50]).all()
    assert short.tokens.min() >= 0 and max(short.tokens.max(), short.drafted.max()) < VOCAB_SIZE


@pytest.mark.parametrize("level", [0.5, 0.75, 0.9])
def test_a_level_is_met_by_texts_that_it_was_not_adjusted_on(level):
    process = demo_process("sampled").at_level(level)
    paths = [process.path((7, text), 250) for text in range(500)]
    assert np.mean([path.tokens == path.drafted for path in paths]) == pytest.approx(level, abs=0.02)


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_the_fitted_process_accepts_as_the_held_out_texts_do(kind):
    judged = fitted_fits()[kind]["judged_by"]
    assert judged["process"]["mean_accepted"] == pytest.approx(judged["held_out_texts"]["mean_accepted"], rel=0.04)
    # And what is stored is what the code gives.
    stored, is_match = judged["process"], demo_process(kind).sample(400, fitted_fits()["tokens_per_text"])[1]
    assert is_match.mean() == pytest.approx(stored["match_rate"][0], abs=2e-3)


@pytest.mark.parametrize("auc", [0.6, 0.75, 0.9])
def test_exits_tell_accepted_from_rejected_as_well_as_asked_for(auc):
    process = demo_process("sampled").with_exits((auc,))
    _, is_match, (margins,) = process.sample(200, 100)
    rng = np.random.default_rng(0)
    right, wrong = (rng.choice(margins[of], 200_000) for of in (is_match, ~is_match))
    assert (right > wrong).mean() == pytest.approx(auc, abs=0.02)


def test_policies_are_told_the_truth_about_the_exit():
    world = roofline_world("h100", "qwen3-32b/0.6b", max_context=1000)
    (exit_,) = world.knowledge().exits
    assert exit_.retention == pytest.approx(RETENTION, abs=0.01)
    # Of tokens with a refined chance near 0.7, 70 % are accepted.
    margins, is_match, (exit_margins,) = world.process.sample(300, 100)
    knowledge = world.knowledge()
    assert set(knowledge.margins) == {"greedy", "sampled"}
    chances = np.interp(margins, *_curve(world.process, margins, is_match))
    refined = exit_.refined(chances, exit_margins)
    near = np.abs(refined - 0.7) < 0.05
    assert is_match[near].mean() == pytest.approx(0.7, abs=0.03)
    assert np.isfinite(logits(refined)).all()


def _curve(process, margins, is_match):
    """Mean of matches by margin, in 40 equal parts."""
    order = margins.argsort(axis=None)
    parts = np.array_split(order, 40)
    flat, match = margins.reshape(-1), is_match.reshape(-1)
    return [flat[part].mean() for part in parts], [match[part].mean() for part in parts]


# -- the command ---------------------------------------------------------------------------------------


def simulate(*arguments: object):
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def test_the_command_writes_figures_and_every_assumption(csv, tmp_path):
    output = tmp_path / "out"
    named = ("--hardware", "h100", "--pair", "qwen3-32b/0.6b", "--policies", "fixed:4")
    done = simulate("--trace", csv(), *named, "--requests", 6, "--rate", 3, "--output", output)
    assert done.exit_code == 0, done.output
    content = json.loads((output / "simulation.json").read_text())
    rows = {row["policy"]: row for row in content["rows"]}
    assert set(rows) == {"none", "fixed:4"}
    assert all(row["num_tokens"] == sum(range(44, 50)) for row in rows.values())
    assert rows["fixed:4"]["tpot_ms_p50"] < rows["none"]["tpot_ms_p50"]
    text = (output / "simulation.md").read_text()
    assert len(content["meta"]["assumptions"]) > 6
    assert all(line in text and line[:30] in done.output for line in content["meta"]["assumptions"])
    assert "gaps scaled by 0.3333 to 3 requests/s" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hardware", "h100"], "give either --hardware and --pair, or --profile"),
        (["--hardware", "h100", "--pair", "x", "--profile", "y"], "leave out --hardware and --pair"),
        (["--hardware", "h100", "--pair", "x", "--requests", 6], "pair = 'x': unknown"),
        (["--hardware", "h100", "--pair", "qwen3-8b/0.6b", "--requests", 0], "--requests = 0"),
        (["--hardware", "h100", "--pair", "qwen3-8b/0.6b", "--requests", 6, "--exit-auc", 0.4], "must lie in"),
        (["--hardware", "h100", "--pair", "qwen3-8b/0.6b", "--requests", 6, "--policies", "x"], "known are none"),
        (["--hardware", "h100", "--pair", "qwen3-8b/0.6b", "--policies", "faser (n-grams)"], "n-grams need texts"),
    ],
)
def test_options_that_make_no_sense_are_refused(csv, arguments, message):
    done = simulate("--trace", csv(), *arguments)
    assert done.exit_code != 0
    assert isinstance(done.exception, FaserError) and message in str(done.exception)


def test_separate_levels_move_acceptance_not_margins():
    process = demo_process("sampled")
    low, high = (process.at_level(level).path((0, 0), 300) for level in (0.4, 0.9))
    assert (low.margins == high.margins).all()
    assert ((low.tokens == low.drafted) <= (high.tokens == high.drafted)).all()
    assert replace(process, shift=100.0).path((0, 0), 9).drafted.tolist() == low.tokens[:9].tolist()
