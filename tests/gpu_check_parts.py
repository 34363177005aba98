"""Parts that misbehave, for the tests of the harness of scripts/gpu_check.py."""

from __future__ import annotations

import os
import time

from lab.gpu.worker import Context, Result


def well(context: Context) -> Result:
    return {"device": context.device, "earlier": sorted(context.results), "process": os.getpid()}


def raises(context: Context) -> Result:
    context.save({"known": 1})
    raise ValueError("as it had to")


def hangs(context: Context) -> Result:
    context.save({"known": 2})
    time.sleep(600)
    return {}


def dies(context: Context) -> Result:
    os.kill(os.getpid(), 9)
    return {}


def prints(context: Context) -> Result:
    print("nothing of this is an event")
    os.write(1, b"nor of this\n")
    return {"printed": True}


def holds_no_json(context: Context) -> Result:
    return {"value": object()}
