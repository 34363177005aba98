#!/usr/bin/env python3
"""Engine directories side by side, and llama.cpp beside them. See lab/bench/side_by_side.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab.bench.side_by_side import engines_main as main

if __name__ == "__main__":
    sys.exit(main())
