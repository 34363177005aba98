"""Where measuring code reads and writes: below a checkout's root, or where it is called if it came in a wheel."""

from __future__ import annotations

from pathlib import Path

from faser_backend.places import DEMO_PAIR

ROOT = Path(__file__).resolve().parents[1]
DEMO = DEMO_PAIR
_WRITTEN = ROOT if (ROOT / "pyproject.toml").is_file() else Path.cwd()
RESULTS = _WRITTEN / "benchmarks" / "results"
PEERS = _WRITTEN / "build" / "peers"  # what scripts/peers/install.sh installs, and models in peers' layouts
