"""The paths that measuring code reads and writes: below a checkout's root, or the working directory if installed."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_WRITTEN = ROOT if (ROOT / "pyproject.toml").is_file() else Path.cwd()
RESULTS = _WRITTEN / "benchmarks" / "results"
PEERS = _WRITTEN / "build" / "peers"  # peers of scripts/peers/install.sh, and models in their formats
