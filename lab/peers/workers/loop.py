"""How a library answers a benchmark from a process of its own: JSON lines, an order in, its answers out.

Needs the standard library alone, as the Python that runs it may have none of our packages. An order is
{"num_clients": n, "jobs": [fields of lab.answers.Job]}; what comes back is {"seconds": s, "answers": [fields of
lab.answers.Answer, without the digest]}, with times of time.perf_counter.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Record = dict[str, Any]


def serve(version: str, answer_all: Callable[[list[Record], int], list[Record]]) -> None:
    """Tells that it is ready, then answers orders until stdin ends. What libraries print goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps({"version": version}), file=out, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        start = time.perf_counter()
        answers = answer_all(order["jobs"], order["num_clients"])
        print(json.dumps({"seconds": time.perf_counter() - start, "answers": answers}), file=out, flush=True)


def new_answer() -> Record:
    """An answer to a request that is sent now."""
    return {"start_s": time.perf_counter(), "response_s": [], "num_tokens": 0, "num_drafted": 0, "num_accepted": 0} | {
        "token_ids": []
    }


def take(answer: Record, token_ids: list[int]) -> None:
    """Tokens that have just come."""
    answer["response_s"].append(time.perf_counter())
    answer["token_ids"] += token_ids
    answer["num_tokens"] += len(token_ids)
