#!/usr/bin/env python3
"""Serving speed, policy beside policy, in this process and through Triton. See lab/bench/side_by_side.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab.bench.side_by_side import serving_main as main

if __name__ == "__main__":
    sys.exit(main())
