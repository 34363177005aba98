#!/usr/bin/env python3
"""This server beside other people's programs. See lab/bench/side_by_side.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lab.bench.side_by_side import peers_main as main

if __name__ == "__main__":
    sys.exit(main())
