"""JSON schemas that are dear to follow or have no end, and what their requests do to those beside them."""

from __future__ import annotations

import json
import threading
import time
from contextlib import AbstractContextManager
from typing import Any, Protocol

from lab.abuse.clients import GrpcClient, Reply, make_request
from lab.abuse.flight import Outcome
from lab.abuse.served import Served

GUIDE = "guided_decoding_guide"
ATTACK_S = 15.0
NUM_NEIGHBOURS, NUM_ATTACKERS = 2, 3
MAX_WAIT_S = 2.0  # for 16 tokens beside the attackers: a fifth of it on an idle machine
NEIGHBOUR = {"text_input": "def f(x):\n    return", "max_tokens": 16, "end_id": -1, "stream": True}


def _chain(key: str) -> dict[str, Any]:
    """Each object must hold another one: no finite text follows it."""
    node = {"type": "object", "properties": {key: {"$ref": "#/$defs/n"}}, "required": [key]}
    return {"$ref": "#/$defs/n", "$defs": {"n": node}}


def _doubled(depth: int) -> dict[str, Any]:
    """Each object holds two: the whole text has 2 ** depth strings."""
    rules: dict[str, Any] = {f"d{depth}": {"type": "string"}}
    for level in range(depth):
        ref = {"$ref": f"#/$defs/d{level + 1}"}
        rules[f"d{level}"] = {"type": "object", "properties": {"a": ref, "b": ref}, "required": ["a", "b"]}
    return {"$ref": "#/$defs/d0", "$defs": rules}


def _later(chain: dict[str, Any]) -> dict[str, Any]:
    """`chain` behind a choice, where compiling does not look."""
    properties = {"a": {"type": "boolean"}, "n": {"$ref": "#/$defs/n"}}
    return {"type": "object", "properties": properties, "required": ["a", "n"], "$defs": chain["$defs"]}


SCHEMAS: dict[str, dict[str, Any]] = {
    "recursive": _chain("c"),
    "wide": {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(5000)}},
    "doubled": _doubled(60),
    "recursive later": _later(_chain("c")),
}


class Starts(Protocol):
    """What starts servers (faults.Bench)."""

    def ready(self) -> AbstractContextManager[Served]: ...


def hostile_schemas(bench: Starts) -> Outcome:
    with bench.ready() as served:
        return attack(served, ATTACK_S)


def ask_with_schema(client: GrpcClient, schema: dict[str, Any]) -> Reply:
    guide = {"guided_decoding_guide_type": "json_schema", GUIDE: json.dumps(schema)}
    return client.ask(make_request("ensemble", [{"text_input": "x = ", "max_tokens": 24, **guide}]))


def attack(served: Served, seconds: float) -> Outcome:
    """Well-behaved clients for so long alone, then as long beside requests with every schema: they get the same
    answers, within MAX_WAIT_S, and whoever sent a schema an answer or an error that names its field."""
    outcome, client = Outcome("JSON schemas without end"), GrpcClient(served.url)
    neighbour = make_request("ensemble", [NEIGHBOUR])
    expected = client.ask(neighbour).text
    waits: dict[str, list[float]] = {"alone": [], "attacked": []}
    attacks: list[Reply] = []

    def neighbours(phase: str, end_s: float) -> None:
        while time.monotonic() < end_s:
            reply = client.ask(neighbour)
            waits[phase].append(reply.seconds)
            if reply.errors or reply.text != expected:
                outcome.broken.append(f"a neighbour saw {reply.errors or reply.text!r}")

    def attackers(first: int, end_s: float) -> None:
        schemas = list(SCHEMAS.values())
        while time.monotonic() < end_s:
            attacks.append(ask_with_schema(client, schemas[first % len(schemas)]))
            first += 1

    for phase in waits:
        end_s = time.monotonic() + seconds
        threads = [threading.Thread(target=neighbours, args=(phase, end_s)) for _ in range(NUM_NEIGHBOURS)]
        if phase == "attacked":
            threads += [threading.Thread(target=attackers, args=(each, end_s)) for each in range(NUM_ATTACKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    client.close()
    longest = {phase: max(times) for phase, times in waits.items()}
    errors = [error for reply in attacks for error in reply.errors]
    outcome.saw = (
        f"{len(waits['attacked'])} right answers beside {len(attacks)} requests with schemas, of which {len(errors)} "
        f"got an error; the longest wait {longest['attacked'] * 1e3:.0f} ms, {longest['alone'] * 1e3:.0f} ms without"
    )
    outcome.then = "runs on" if served.is_ready() else "is not ready"
    outcome.broken += sorted({f"an error without its field: {error}" for error in errors if GUIDE not in error})
    outcome.broken += ["no schema was answered with an error"] if not errors else []
    outcome.broken += ["a schema's request was lost"] if any(reply.is_lost for reply in attacks) else []
    outcome.broken += ["a neighbour waited too long"] if longest["attacked"] > MAX_WAIT_S else []
    outcome.broken += [] if served.is_ready() else ["the server is not ready"]
    return outcome
