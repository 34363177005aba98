import os
import sys

sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))  # which Triton's interpreter ignores

from faser_backend.triton.model import TextModel as TritonPythonModel  # noqa: E402

__all__ = ["TritonPythonModel"]
