#!/usr/bin/env python3
"""The simulator's predictions beside real runs of the demo pair. See lab/simulation/check.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab.simulation.check import main

if __name__ == "__main__":
    sys.exit(main())
