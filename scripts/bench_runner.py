#!/usr/bin/env python3
"""A model call of ONNX Runtime, and how much of it is attention. See lab/bench/rows.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab.bench.rows import runner_main as main

if __name__ == "__main__":
    sys.exit(main())
