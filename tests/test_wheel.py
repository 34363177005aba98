"""The wheel as a user gets it: installed in an environment of its own and used away from the checkout."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from faser_backend import places

ROOT = Path(__file__).resolve().parents[1]


def test_an_installed_wheel_generates_away_from_the_checkout():
    """scripts/check_wheel.sh without its servers: twine's checks, the data of the wheel, and a text."""
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "check_wheel.sh"), "--quick"],
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("PASSED") == 2, done.stdout  # the wheel and the source distribution
    assert "== 8 tokens, " in done.stdout and "accepted " in done.stdout, done.stdout


def test_a_checkout_uses_its_own_folders():
    assert places.data_folder() == ROOT
    assert places.DEMO_PAIR == ROOT / "models" / "demo" and places.MODEL_REPO == ROOT / "model_repo"


def test_an_installed_package_uses_what_it_brought(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "INSTALLED", tmp_path)
    assert places.data_folder() == tmp_path
