#!/usr/bin/env python3
"""Matrix products alone, per weight format and number of rows. See lab/bench/rows_kernels.py."""

import os
import sys
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy is loaded: threads are callers of their own
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab.bench.rows_kernels import main

if __name__ == "__main__":
    sys.exit(main())
