"""`scripts/fuzz.py --cases N`: sends malformed requests, and checks a known answer all the while.

Exits with 1 and a line per broken promise: a server that is gone or no longer exact, a request without exactly one
answer, an error with a traceback. `--only NUMBER` sends one case of the seed again.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from faser_backend.lab.abuse.cases import CONTRACTS, TARGETS, Case, make_case
from faser_backend.lab.abuse.clients import PAUSE_S, TIMEOUT_S, GrpcClient, Neighbour, Reply, ask_http
from faser_backend.lab.abuse.served import Served, end_servers_on_sigterm, note, report, serving
from faser_backend.lab.bench.wire import tensor_request
from faser_backend.lab.checks.options import count, make_parser

NUM_CLIENTS = 4
MODES = ("--decoupled", "--no-decoupled")  # streams, unary calls
USUAL_ASKS = 40
END_S = 10.0  # for a server that is ending to log why
MAX_SHOWN = 200  # characters of an answer that breaks a promise
TRACES = ("Traceback (most recent call last)", 'File "/')
LIMITS = {"inflight_batcher": "max_tokens", "llmapi": "sampling_param_max_tokens"}


@dataclass
class Fuzzed:
    """The outcome of a run of cases against a server. Waits are in seconds."""

    server: str  # contract and mode
    num_cases: int = 0
    num_answered: int = 0  # without an error
    seconds: float = 0.0
    usual: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    slowest: tuple[float, int, str] = (0.0, -1, "")  # seconds, number and label of a case
    errors: Counter[str] = field(default_factory=Counter)

    def row(self) -> dict[str, Any]:
        usual, waits = (np.array(values or [0.0]) * 1e3 for values in (self.usual, self.waits))
        seconds, number, label = self.slowest
        return {
            "server": self.server,
            "cases": self.num_cases,
            "answered without an error": self.num_answered,
            "seconds": round(self.seconds),
            "a well-behaved client's requests": len(waits),
            "its usual wait ms: median / longest": f"{np.median(usual):.0f} / {usual.max():.0f}",
            "its wait meanwhile ms: median / p99 / longest": (
                f"{np.median(waits):.0f} / {np.percentile(waits, 99):.0f} / {waits.max():.0f}"
            ),
            "slowest case": f"{seconds:.1f} s: case {number} ({label})",
            "broken promises": len(self.broken),
        }


def send(case: Case, client: GrpcClient, http_port: int) -> tuple[Reply, str | None]:
    """Returns the reply, and what is wrong with it. A request that Triton refuses to read, and a connection that it
    then closes, count as answers."""
    is_http = case.request is None
    if is_http:
        reply = ask_http(http_port, case.path, case.body, headers=case.headers, method=case.method)
    else:
        reply = client.ask(case.request, is_unary=case.is_unary)
    return reply, broken_promise(reply, is_http=is_http)


def broken_promise(reply: Reply, *, is_http: bool) -> str | None:
    if reply.seconds >= TIMEOUT_S:
        return f"no answer within {TIMEOUT_S:.0f} s"
    if reply.num_finals != 1 and not (is_http and reply.is_lost):
        return f"{reply.num_finals} ends, errors {str(reply.errors)[:MAX_SHOWN]}"
    shown = next((error for error in reply.errors if any(trace in error for trace in TRACES)), None)
    return f"an error with a traceback: {shown[-MAX_SHOWN:]!r}" if shown else None


def fuzz(served: Served, contract: str, make: Callable[[int], Case], numbers: Iterable[int], name: str = "") -> Fuzzed:
    """Sends the cases, NUM_CLIENTS at a time, until all are sent or the server is gone."""
    outcome, lock, todo, asker = Fuzzed(name), threading.Lock(), iter(numbers), GrpcClient(served.url)
    target = TARGETS[contract][0]
    request = tensor_request(target.model, {**target.values, LIMITS[contract]: 16}, has_batch=target.has_batch)
    neighbour = Neighbour(lambda: asker.ask(request))
    if not neighbour.expected:
        raise RuntimeError("no answer to compare with")
    for _ in range(USUAL_ASKS):
        time.sleep(PAUSE_S)
        neighbour.ask_once()
    outcome.usual = neighbour.waits
    is_dead = False

    def work(_: int) -> None:
        nonlocal is_dead
        client = GrpcClient(served.url)
        for number in todo:  # shared by all threads
            if is_dead:
                break
            case = make(number)
            reply, wrong = send(case, client, served.ports[0])
            with lock:
                if served.process.poll() is not None or (reply.is_lost and not served.is_ready()):
                    is_dead, wrong = True, "the server was gone"
                outcome.num_cases += 1
                outcome.num_answered += not reply.errors
                outcome.slowest = max(outcome.slowest, (reply.seconds, number, case.label))
                outcome.errors.update(error[:60] for error in reply.errors)
                note(outcome.broken, [f"{name}, case {number} ({case.label}): {wrong}"] if wrong else [])
        client.close()

    start_s = time.monotonic()
    with neighbour, ThreadPoolExecutor(NUM_CLIENTS) as pool:
        list(pool.map(work, range(NUM_CLIENTS)))
    outcome.seconds, outcome.waits = time.monotonic() - start_s, neighbour.waits.copy()
    note(outcome.broken, afterwards(served, neighbour))
    asker.close()
    return outcome


def afterwards(served: Served, neighbour: Neighbour) -> Iterator[str]:
    """Yields the server's faults after all cases, and those of the neighbour's answers meanwhile."""
    if served.is_ready():
        num_used = served.blocks_in_use_when_quiet(TIMEOUT_S)
        if num_used:
            yield f"{num_used:.0f} KV blocks are in use without a request"
        neighbour.ask_once()
    else:
        with contextlib.suppress(subprocess.TimeoutExpired):
            served.process.wait(END_S)  # so that its log is complete
        yield f"the server is not ready; its log ends with:\n{served.last_words()}"
    yield from neighbour.wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, "seed")
    parser.add_argument("--cases", type=count, default=10_000, help="Send this many, a quarter per contract and mode.")
    parser.add_argument("--only", type=int, help="Send only this case of the seed.")
    args = parser.parse_args(arguments)
    end_servers_on_sigterm()
    outcomes, servers = [], [(contract, mode) for contract in CONTRACTS for mode in MODES]
    for contract, mode in servers:
        numbers = [args.only] if args.only is not None else range(-(-args.cases // len(servers)))

        def make(number: int, contract: str = contract) -> Case:
            return make_case(args.seed, number, contract)

        with serving("--num-threads", 1, mode, "--contract", contract) as served:
            outcomes.append(fuzz(served, contract, make, numbers, f"{contract} {mode}"))
    status = report([outcome.row() for outcome in outcomes], sum(len(outcome.broken) for outcome in outcomes))
    for outcome in outcomes:
        print(f"\n{outcome.server}, most frequent errors:")
        print("\n".join(f"  {count:5d}  {error!r}" for error, count in outcome.errors.most_common(12)))
    return status
