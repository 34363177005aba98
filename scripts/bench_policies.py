#!/usr/bin/env python3
"""What scheduler and policy cost per step, without models. See lab/bench/policies.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab.bench.policies import main

if __name__ == "__main__":
    sys.exit(main())
