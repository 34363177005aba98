#!/usr/bin/env python3
"""Kills and halts processes; shows what clients see. See lab/abuse/faults.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faser_backend.lab.abuse.faults import main

if __name__ == "__main__":
    sys.exit(main())
