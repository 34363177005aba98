"""Parts that misbehave, for tests of the harness of scripts/gpu_check.py; quick to import."""

import os
import time

from faser_backend.lab.gpu.harness import Context


def well(context: Context) -> dict:
    return {"device": context.device, "process": os.getpid()}


def raises(context: Context) -> dict:
    context.save({"known": 1})
    raise ValueError("as it had to")


def finds_errors(_: Context) -> dict:
    return {"cases": [{"is_right": True}, {"is_right": False}, {}]}


def hangs(context: Context) -> dict:
    context.save({"known": 2})
    time.sleep(600)
    return {}


def dies(_: Context) -> dict:
    os.kill(os.getpid(), 9)
    return {}


def prints(_: Context) -> dict:
    os.write(1, b"nothing of this is a result\n")
    return {"printed": True}


def holds_no_json(_: Context) -> dict:
    return {"value": object()}
