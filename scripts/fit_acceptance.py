#!/usr/bin/env python3
"""Fits the simulator's acceptance process to the demo pair. See lab/simulation/fit.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab.simulation.fit import main

if __name__ == "__main__":
    sys.exit(main())
