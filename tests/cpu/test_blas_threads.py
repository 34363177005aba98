"""Numpy's library keeps to one thread in a process that serves: its threads would stay awake on the engine's cores."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.serving_pair import build_pair

CODE = """
import sys
from pathlib import Path
import numpy as np
from threadpoolctl import threadpool_info
from faser_backend.core.config import EngineConfig
from faser_backend.serving.compose import open_engine

numpys = {each["filepath"] for each in threadpool_info()}  # other packages bring libraries of their own

def threads():
    return max(each["num_threads"] for each in threadpool_info() if each["filepath"] in numpys)

before = threads()
engine, _ = open_engine(Path(sys.argv[1]), EngineConfig.from_options())
print(before, threads())
engine.close()
"""


def test_an_open_engine_leaves_one_thread_to_numpy(tmp_path: Path):
    environment = {"PATH": "", "PYTHONPATH": str(Path(__file__).parents[2]), "OPENBLAS_NUM_THREADS": "2"}
    ended = subprocess.run(
        [sys.executable, "-c", CODE, str(build_pair(tmp_path))],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.stdout.split() == ["2", "1"], ended.stderr
