#!/usr/bin/env python3
"""Runs half an hour of mixed traffic, cancels and mistakes, and checks for leaks and losses. See lab/abuse/soak.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faser_backend.lab.abuse.soak import main

if __name__ == "__main__":
    sys.exit(main())
