#!/usr/bin/env python3
"""A model call of ONNX Runtime, and how much of it is attention. See lab/bench/runner.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab.bench.runner import main

if __name__ == "__main__":
    sys.exit(main())
