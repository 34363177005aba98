"""`scripts/fuzz.py --cases N`: sends requests that are wrong, and asks all the while for an answer that is known.

Exits with 1 and a line per broken promise: a server that is gone or no longer exact, a request without an answer or
with two, an error that shows a traceback. `--only NUMBER` sends one case of the seed again.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from lab.abuse import openai_attacks
from lab.abuse.cases import CONTRACTS, TARGETS, Case, known_crashes, make_case
from lab.abuse.clients import REFUSAL, TIMEOUT_S, GrpcClient, Reply, make_request, post
from lab.abuse.flight import END_S
from lab.abuse.served import Served, end_servers_on_sigterm, serving
from lab.tables import markdown_table

NUM_CLIENTS = 4
MODES = ("--decoupled", "--no-decoupled")  # streams, and unary calls
USUAL_ASKS = 40
PAUSE_S = 0.02  # of the well-behaved client, between an answer and its next request
MAX_SHOWN_WRONG = 3  # answers of the well-behaved client
MAX_SHOWN = 200  # characters of an answer that breaks a promise
TRACES = ("Traceback (most recent call last)", 'File "/')


@dataclass
class Outcome:
    """What a run of cases came to. Waits in seconds."""

    server: str  # its contract and mode
    num_cases: int = 0
    num_answered: int = 0  # by other than an error
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


class WellBehaved:
    """A client that asks for the same answer again and again, one request at a time."""

    def __init__(self, served: Served, contract: str) -> None:
        self._client = GrpcClient(served.url)
        target = TARGETS[contract][0]
        limit = "sampling_param_max_tokens" if contract == "llmapi" else "max_tokens"
        self._request = make_request(target.model, [{**target.values, limit: 16}], has_batch=contract != "llmapi")
        self.reference = self._client.ask(self._request).text
        if not self.reference:
            raise RuntimeError("no answer to compare with")
        self._is_over = threading.Event()

    def ask(self) -> tuple[float, str | None]:
        """Seconds, and what is wrong with the answer. That the queue is full is an answer."""
        reply = self._client.ask(self._request)
        if len(reply.errors) == 1 and REFUSAL in reply.errors[0]:
            return reply.seconds, None
        if reply.errors or reply.num_finals != 1:
            return reply.seconds, f"a well-behaved client got {reply.num_finals} ends, errors {reply.errors}"
        if reply.text != self.reference:
            return reply.seconds, f"a well-behaved client got {reply.text!r} in place of {self.reference!r}"
        return reply.seconds, None

    def watch(self, outcome: Outcome) -> None:
        """Until `end`."""
        while not self._is_over.wait(PAUSE_S):
            seconds, wrong = self.ask()
            outcome.waits.append(seconds)
            if (
                wrong is not None
                and sum(line.startswith("a well-behaved") for line in outcome.broken) < MAX_SHOWN_WRONG
            ):
                outcome.broken.append(wrong)

    def end(self) -> None:
        self._is_over.set()

    def close(self) -> None:
        self._client.close()


def send(case: Case, client: GrpcClient, http_port: int) -> Reply:
    """The reply. A request that Triton refuses to read, and a connection that it then closes, are answers as well."""
    if case.request is None:
        return post(http_port, case.path, case.body, headers=case.headers, method=case.method)[0]
    if not case.is_unary:
        return client.ask(case.request)
    reply = Reply(num_finals=1)
    try:
        client.stub.ModelInfer(case.request, timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        reply.errors.append(str(error.details()))  # pyright: ignore[reportAttributeAccessIssue]
        reply.is_lost = error.code() == grpc.StatusCode.DEADLINE_EXCEEDED  # pyright: ignore[reportAttributeAccessIssue]
    return reply


def broken_promise(reply: Reply, *, is_http: bool) -> str | None:
    """What is wrong with how a case was answered."""
    if reply.seconds >= TIMEOUT_S:
        return f"no answer within {TIMEOUT_S:.0f} s"
    if reply.num_finals != 1 and not (is_http and reply.is_lost):
        return f"{reply.num_finals} ends, errors {str(reply.errors)[:MAX_SHOWN]}"
    shown = next((error for error in reply.errors if any(trace in error for trace in TRACES)), None)
    return f"an error with a traceback: {shown[-MAX_SHOWN:]!r}" if shown else None


def fuzz(served: Served, contract: str, numbered: Iterable[tuple[int, Case]], name: str) -> Outcome:
    """Sends every case, NUM_CLIENTS at a time, until all are sent or the server is gone. name: of the server."""
    outcome, well_behaved = Outcome(name), WellBehaved(served, contract)
    for _ in range(USUAL_ASKS):
        time.sleep(PAUSE_S)
        outcome.usual.append(well_behaved.ask()[0])
    watch = threading.Thread(target=well_behaved.watch, args=(outcome,))
    start_s, lock, is_dead = time.monotonic(), threading.Lock(), threading.Event()
    todo = iter(numbered)

    def work() -> None:
        client = GrpcClient(served.url)
        while not is_dead.is_set():
            with lock:
                number, case = next(todo, (-1, None))
            if case is None:
                break
            reply = send(case, client, served.ports.http)
            wrong = broken_promise(reply, is_http=case.request is None)
            if served.process.poll() is not None or (reply.is_lost and not served.is_ready()):
                is_dead.set()
                wrong = "the server was gone"
            with lock:
                note(outcome, number, case, reply, wrong)
        client.close()

    watch.start()
    try:
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            for done in [pool.submit(work) for _ in range(NUM_CLIENTS)]:
                done.result()
    finally:
        well_behaved.end()
        watch.join()
    outcome.seconds = time.monotonic() - start_s
    outcome.broken += afterwards(served, well_behaved)
    well_behaved.close()
    return outcome


def note(outcome: Outcome, number: int, case: Case, reply: Reply, wrong: str | None) -> None:
    outcome.num_cases += 1
    outcome.num_answered += not reply.errors
    outcome.slowest = max(outcome.slowest, (reply.seconds, number, case.label))
    outcome.errors.update(error[:60] for error in reply.errors)
    if wrong is not None:
        outcome.broken.append(f"{outcome.server}, case {number} ({case.label}): {wrong}")


def afterwards(served: Served, well_behaved: WellBehaved) -> Iterator[str]:
    """What is wrong with the server once all cases are sent."""
    if not served.is_ready():
        with contextlib.suppress(subprocess.TimeoutExpired):
            served.process.wait(END_S)  # and say why
        yield f"the server is not ready; its log ends with:\n{served.last_words()}"
        return
    num_used = served.blocks_in_use_when_quiet(TIMEOUT_S)
    if num_used:
        yield f"{num_used:.0f} KV blocks are in use and nobody asks for anything"
    wrong = well_behaved.ask()[1]
    if wrong:
        yield f"afterwards: {wrong}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="in all, a quarter for each contract and mode")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one case of the seed")
    parser.add_argument("--known-crashes", action="store_true", help="send what is known to end Triton 2.51 as well")
    parser.add_argument("--openai", action="store_true", help="attack the port of OpenAI's API instead")
    parser.add_argument("--serve-options", default="--num-threads 1", help="of `faser serve`, separated by blanks")
    args = parser.parse_args(arguments)
    end_servers_on_sigterm()
    if args.cases < 1:
        parser.error(f"--cases {args.cases}: must be at least 1")
    if args.openai:
        return openai_attacks.run(args.serve_options.split())
    outcomes = []
    servers = [(contract, mode) for contract in CONTRACTS for mode in MODES]
    for contract, mode in servers:
        numbers = [args.only] if args.only is not None else range(args.cases // len(servers))
        cases: Any = ((number, make_case(args.seed, number, contract)) for number in numbers)
        if args.known_crashes:
            cases = itertools.chain(cases, ((-1, case) for case in known_crashes(contract)))
        with (
            tempfile.TemporaryDirectory(prefix="faser-fuzz-") as folder,
            serving([*args.serve_options.split(), mode, "--contract", contract], Path(folder) / "log") as served,
        ):
            outcomes.append(fuzz(served, contract, cases, f"{contract} {mode}"))
    rows = [outcome.row() for outcome in outcomes]
    print("\n".join(markdown_table(list(rows[0]), rows)))
    for outcome in outcomes:
        print(f"\n{outcome.server}, most frequent errors:")
        print("\n".join(f"  {count:5d}  {error!r}" for error, count in outcome.errors.most_common(12)))
    broken = [line for outcome in outcomes for line in outcome.broken]
    print("\n".join(f"broken promise: {line}" for line in broken), file=sys.stderr)
    return int(bool(broken))
