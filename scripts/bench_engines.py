#!/usr/bin/env python3
"""Engine directories side by side, and llama.cpp beside them. See lab/bench/engines.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab.bench.engines import main

if __name__ == "__main__":
    sys.exit(main())
