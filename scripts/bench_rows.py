#!/usr/bin/env python3
"""What calls of few rows cost, beside what the machine could do. See lab/bench/rows.py."""

import os
import sys
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy is loaded: threads are callers of their own
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab.bench.rows import main

if __name__ == "__main__":
    sys.exit(main())
