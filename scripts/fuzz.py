#!/usr/bin/env python3
"""Ten thousand requests that nobody should send. See lab/abuse/fuzz.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faser_backend.lab.abuse.fuzz import main

if __name__ == "__main__":
    sys.exit(main())
