#!/usr/bin/env python3
"""Times calls of few rows and whole prompts on a CPU. See lab/checks/rows.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faser_backend.lab.checks.rows import main

if __name__ == "__main__":
    main()
