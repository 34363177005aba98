#!/usr/bin/env python3
"""Measures the effect of weight formats on a model's own answers. See lab/checks/weights.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faser_backend.lab.checks.weights import main

if __name__ == "__main__":
    sys.exit(main())
