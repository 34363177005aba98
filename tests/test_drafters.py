"""`python -m lab.drafters`: contestants are what their names say, answers are the same, the page has a row of each."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from faser_backend.core.errors import ConfigError
from lab import drafters
from tests.serving_pair import build_pair


def test_names_say_who_drafts() -> None:
    for name, (policy, draft) in {
        "faser": ("faser", "auto"),
        "fixed:4 (ngram)": ("fixed:4", "ngram"),
        "tree:5 (model+ngram)": ("tree:5", "model+ngram"),
    }.items():
        config = drafters.config_of(name, 4, 1)
        assert (config.policy, config.draft, config.max_num_seqs) == (policy, draft, 4)
    with pytest.raises(ConfigError, match=r"'\(ngrams\)' must be one of \(ngram\), \(model\+ngram\)"):
        drafters.config_of("fixed:4 (ngrams)", 4, 1)


def test_contestants_take_turns_over_the_same_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the quick\nanother one\n")
    names = ["none", "tree:3", "fixed:2 (ngram)", "faser (model+ngram)"]
    engine_dir = build_pair(tmp_path / "pair")
    options = f"{engine_dir} --clients 1,2 --temperatures 0 --repeats 1 --max-tokens 6 --threads 1 --name found".split()
    words = [*options, "--prompts", str(prompts), "--policies", ",".join(names), "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["drafters", *words])
    drafters.main()
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [(row["clients"], row["policy"]) for row in rows] == [(n, name) for n in (1, 2) for name in names]
    assert all(row["num_different"] == 0 for row in rows)
    assert {row["ratios"][0] for row in rows if row["policy"] == "none"} == {1.0}
    assert next(row for row in rows if row["policy"] == "tree:3")["acceptance_rate"] > 0
    assert "| `faser (model+ngram)` |" in capsys.readouterr().out
