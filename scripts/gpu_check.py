#!/usr/bin/env python3
"""Checks on a GPU what cannot be checked without one. See lab/gpu/command.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faser_backend.lab.gpu.command import main

if __name__ == "__main__":
    sys.exit(main())
