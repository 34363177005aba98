"""Where a checkout keeps what measuring code reads and writes."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DEMO = ROOT / "models" / "demo"
ANCHORS = ROOT / "build" / "anchors"  # what scripts/anchors/build_llama.sh makes
PEERS = ROOT / "build" / "peers"  # what scripts/peers/install.sh installs, and models in the layouts that peers read
