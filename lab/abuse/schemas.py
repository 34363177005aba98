"""JSON schemas that are dear to follow or have no end, and what their requests do to those beside them."""

from __future__ import annotations

import itertools
import json
import time
from contextlib import ExitStack
from typing import Any

from lab.abuse.clients import GrpcClient, Reply, make_request
from lab.abuse.flight import Outcome
from lab.abuse.served import Bystander, Served, same_answer

GUIDE = "guided_decoding_guide"
NUM_NEIGHBOURS, NUM_ATTACKERS = 2, 3
MAX_WAIT_S = 2.0  # for 16 tokens beside the attackers: a fifth of it on an idle machine
NEIGHBOUR = {"text_input": "def f(x):\n    return", "max_tokens": 16, "end_id": -1, "stream": True}


def _doubled(depth: int) -> dict[str, Any]:
    """Each object holds two: the whole text has 2 ** depth strings."""
    rules: dict[str, Any] = {f"d{depth}": {"type": "string"}}
    for level in range(depth):
        ref = {"$ref": f"#/$defs/d{level + 1}"}
        rules[f"d{level}"] = {"type": "object", "properties": {"a": ref, "b": ref}, "required": ["a", "b"]}
    return {"$ref": "#/$defs/d0", "$defs": rules}


_NODE = {"$ref": "#/$defs/n"}
# Each object must hold another one: no finite text follows it.
_CHAIN = {"n": {"type": "object", "properties": {"c": _NODE}, "required": ["c"]}}
_CHOICE = {"type": "object", "properties": {"a": {"type": "boolean"}, "n": _NODE}, "required": ["a", "n"]}
SCHEMAS: dict[str, dict[str, Any]] = {
    "recursive": {**_NODE, "$defs": _CHAIN},
    "wide": {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(5000)}},
    "doubled": _doubled(60),
    "recursive later": {**_CHOICE, "$defs": _CHAIN},  # behind a choice, where compiling does not see it
}


def attack(served: Served, seconds: float) -> Outcome:
    """Well-behaved clients for so long alone, then as long beside requests with every schema: they get the same
    answers, within MAX_WAIT_S, and whoever sent a schema an answer or an error that names its field."""
    outcome, client = Outcome("JSON schemas without end"), GrpcClient(served.url)
    ask = same_answer(client, make_request("ensemble", [NEIGHBOUR]))
    attacks, turns = list[Reply](), itertools.cycle(SCHEMAS.values())

    def send_schema() -> None:
        guide = {"guided_decoding_guide_type": "json_schema", GUIDE: json.dumps(next(turns))}
        attacks.append(client.ask(make_request("ensemble", [{"text_input": "x = ", "max_tokens": 24, **guide}])))

    longest, num_answers = [], 0
    for num_attackers in (0, NUM_ATTACKERS):
        with ExitStack() as stack:
            neighbours = [stack.enter_context(Bystander(ask)) for _ in range(NUM_NEIGHBOURS)]
            for _ in range(num_attackers):
                stack.enter_context(Bystander(send_schema))
            time.sleep(seconds)
        waits = [wait for each in neighbours for wait in each.waits]
        longest.append(max(waits))
        num_answers = len(waits)
        outcome.broken += [line for each in neighbours for line in each.wrong]
    client.close()
    errors = [error for reply in attacks for error in reply.errors]
    outcome.saw = (
        f"{num_answers} answers beside {len(attacks)} requests with schemas, of which {len(errors)} got an error; "
        f"the longest wait {longest[1] * 1e3:.0f} ms, {longest[0] * 1e3:.0f} ms without"
    )
    outcome.then = "runs on" if served.is_ready() else "is not ready"
    outcome.broken += sorted({f"an error without its field: {error}" for error in errors if GUIDE not in error})
    outcome.broken += ["no schema was answered with an error"] if not errors else []
    outcome.broken += ["a schema's request was lost"] if any(reply.is_lost for reply in attacks) else []
    outcome.broken += ["a neighbour waited too long"] if longest[1] > MAX_WAIT_S else []
    outcome.broken += [] if served.is_ready() else ["the server is not ready"]
    return outcome
