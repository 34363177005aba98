#!/usr/bin/env python3
"""Checks that every policy, mode and exit gives plain decoding's tokens. See lab/checks/equality.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faser_backend.lab.checks.equality import main

if __name__ == "__main__":
    sys.exit(main())
