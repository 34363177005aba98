#!/usr/bin/env python3
"""Effects of formats of weights on a model, over its own answers. See lab/checks/weights.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faser_backend.lab.checks.weights import main

if __name__ == "__main__":
    sys.exit(main())
