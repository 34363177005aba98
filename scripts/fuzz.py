#!/usr/bin/env python3
"""Sends ten thousand malformed requests. See lab/abuse/fuzz.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faser_backend.lab.abuse.fuzz import main

if __name__ == "__main__":
    sys.exit(main())
