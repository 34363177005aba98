"""The former name of `faser_backend.triton.model`, which model repositories of earlier versions import."""

import sys
from importlib import import_module

sys.modules[__name__] = import_module("faser_backend.triton.model")
