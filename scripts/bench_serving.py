#!/usr/bin/env python3
"""Serving speed, policy beside policy, in this process and through Triton. See lab/compare.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab.compare import main

if __name__ == "__main__":
    main(places="process,triton", policies="none,fixed:2,fixed:4,fixed:8", max_tokens=100, repeats=3, name="serving")
