#!/usr/bin/env python3
"""Peak memory of building a checkpoint that is larger than it may need. See lab/bench/big_checkpoint.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab.bench.big_checkpoint import main

if __name__ == "__main__":
    sys.exit(main())
