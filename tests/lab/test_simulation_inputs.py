"""Inputs of a simulation: traces, machines and pairs, the acceptance process; and the command around them."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from faser_backend.cli.main import app
from faser_backend.core.decision import WHOLE
from faser_backend.core.errors import ConfigError, FaserError
from faser_backend.lab.shapes import MACHINES, PAIRS, layer_weights
from faser_backend.lab.simulation.acceptance import RETENTION, demo_process, fitted_fits
from faser_backend.lab.simulation.costs import kv_capacity_tokens, roofline
from faser_backend.lab.simulation.worlds import roofline_world, spread_levels
from faser_backend.policy.cost_model import DRAFT, TARGET
from tests.lab.test_replay import HEADER, csv

__all__ = ["csv"]  # a fixture


# -- machines and pairs --------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_no_prediction_beats_the_data_sheet(machine, pair):
    costs = roofline(machine, pair)
    for name, model, ways in ((TARGET, pair.target, machine.num_gpus), (DRAFT, pair.draft, 1)):
        weights = model.num_layers * layer_weights(model)
        for partition in costs.partitions:
            for rows in (1, 16, 512, 8192):
                bytes_us = 2 * weights / (ways * machine.bytes_per_s) * 1e6
                flops_us = 2 * weights * rows / (ways * machine.flops_per_s) * 1e6
                us = costs.call_us(name, partition, rows, min(rows, 64), 1000)
                assert us > max(bytes_us, flops_us)
                assert us >= costs.call_us(name, WHOLE, rows, min(rows, 64), 1000)


def test_a_pair_that_does_not_fit_is_refused_with_both_sizes():
    with pytest.raises(ConfigError, match=r"llama3.3-70b/3.2-1b need 144 GB of weights, .* more than 1 x 96"):
        kv_capacity_tokens(MACHINES["h100"], PAIRS["llama3.3-70b/3.2-1b"])


# -- the acceptance process ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_the_fitted_process_accepts_as_the_held_out_texts_do(kind):
    judged = fitted_fits()[kind]["judged_by"]
    assert judged["process"]["mean_accepted"] == pytest.approx(judged["held_out_texts"]["mean_accepted"], rel=0.04)
    # The stored values equal the code's.
    stored, is_match = judged["process"], demo_process(kind).sample(400, fitted_fits()["tokens_per_text"])[1]
    assert is_match.mean() == pytest.approx(stored["match_rate"][0], abs=2e-3)


def test_policies_are_told_the_truth_about_the_exit():
    world = roofline_world("h100", "qwen3-32b/0.6b", max_context=1000)
    (exit_,) = world.knowledge().exits
    assert exit_.retention == pytest.approx(RETENTION, abs=0.01)
    assert set(world.knowledge().margins) == {"greedy", "sampled"}


@pytest.mark.parametrize("levels", [[0.5], [0.9, 0.6], spread_levels(0.7, 0.15)], ids=["one", "mix", "spread"])
def test_requests_differ_as_planted_and_in_nothing_else(levels):
    process = demo_process("sampled").with_levels(levels)
    paths = [process.path((7, text), 400) for text in range(300)]
    rates = np.array([np.mean(path.tokens == path.drafted) for path in paths])
    assert rates.mean() == pytest.approx(np.mean(levels), abs=0.02)
    assert rates.std() == pytest.approx(np.std(levels), abs=0.03)
    if len(levels) == 2:
        assert np.mean(rates > 0.75) == pytest.approx(0.5, abs=0.1)


# -- the command ---------------------------------------------------------------------------------------


def simulate(*arguments: object):
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def test_loads_are_shares_of_a_capacity_and_the_oracle_leads(csv, tmp_path):
    path = csv(HEADER + "".join(f"2023-11-16 18:15:{index:02d}.0000000,200,60\n" for index in range(48)))
    named = ("--hardware", "h100", "--pair", "qwen3-8b/0.6b", "--policies", "fixed:4,survival,oracle")
    more = ("--loads", "0.5,1.2", "--mix", "0.9/0.5")
    done = simulate("--trace", path, *named, *more, "--requests", 48, "--output", tmp_path)
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "simulation.json").read_text())
    assert content["meta"]["capacity"]["policy"].startswith("fixed:")
    loads = list(dict.fromkeys(row["load"] for row in content["rows"]))
    assert [load.partition(",")[0] for load in loads] == ["Load 0.5", "Load 1.2"]
    for load in loads:
        rows = {row["policy"]: row for row in content["rows"] if row["load"] == load}
        assert set(rows) == {"none", "fixed:4", "survival", "oracle"}
        assert rows["fixed:4"]["headroom_share"] == 0.0 and rows["oracle"]["headroom_share"] == 1.0
        assert rows["oracle"]["tpot_ms_p50"] < min(rows[name]["tpot_ms_p50"] for name in ("fixed:4", "survival"))
        assert rows["oracle"]["rows_verified"] * 36 == rows["oracle"]["row_layers_accepted"], "no row is rejected"
    assert "half of them agree at 90%" in (tmp_path / "simulation.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--exit-auc", 0.8, "--profile", "x"], "give at most one of --exit-auc and --profile"),
        (["--hardware", "h100", "--seed", -1], "seed = -1: Input should be greater"),
        (["--hardware", "h100"], "give either --hardware and --pair, or --profile"),
        (["--hardware", "h100", "--pair", "x", "--requests", 6], "pair = 'x': unknown; known are qwen3-32b/0.6b"),
        (["--hardware", "h100", "--pair", "qwen3-8b/0.6b", "--policies", "faser (n-grams)"], "n-grams need texts"),
        (["--hardware", "h100", "--pair", "qwen3-8b/0.6b", "--loads", "0.5", "--rate", 2], "at most one of --rate and"),
        (["--hardware", "h100", "--pair", "qwen3-8b/0.6b", "--requests", 6, "--mix", "0.9"], "--mix = '0.9': must be"),
    ],
)
def test_options_that_make_no_sense_are_refused(csv, arguments, message):
    done = simulate("--trace", csv(), *arguments)
    assert done.exit_code != 0
    assert isinstance(done.exception, FaserError) and message in str(done.exception)
