"""`scripts/fuzz.py --cases N`: sends requests that are wrong, and asks all the while for an answer that is known.

Exits with 1 and a line per broken promise: a server that is gone or no longer exact, a request without an answer or
with two, an error that shows a traceback. `--only NUMBER` sends one case of the seed again.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from lab.abuse import openai_attacks
from lab.abuse.cases import CONTRACTS, TARGETS, Case, known_crashes, make_case
from lab.abuse.clients import TIMEOUT_S, GrpcClient, Reply, make_request, post
from lab.abuse.flight import END_S
from lab.abuse.served import Bystander, Served, end_servers_on_sigterm, report, same_answer, serving

NUM_CLIENTS = 4
MODES = ("--decoupled", "--no-decoupled")  # streams, and unary calls
USUAL_ASKS = 40  # of a well-behaved client, before the cases are sent
MAX_SHOWN = 200  # characters of an answer that breaks a promise
TRACES = ("Traceback (most recent call last)", 'File "/')


@dataclass
class Fuzzed:
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
        usual, waits = np.array(self.usual) * 1e3, np.array(self.waits) * 1e3
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


def send(case: Case, client: GrpcClient, http_port: int) -> Reply:
    """The reply. A request that Triton refuses to read, and a connection that it then closes, are answers as well."""
    if case.request is None:
        return post(http_port, case.path, case.body, case.headers, case.method)
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


def fuzz(served: Served, contract: str, numbered: Iterable[tuple[int, Case]], name: str) -> Fuzzed:
    """Sends every case, NUM_CLIENTS at a time, until all are sent or the server is gone. name: of the server."""
    result, own, target = Fuzzed(name), GrpcClient(served.url), TARGETS[contract][0]
    limit = "sampling_param_max_tokens" if contract == "llmapi" else "max_tokens"
    request = make_request(target.model, [{**target.values, limit: 16}], has_batch=target.has_batch)
    ask = same_answer(own, request)
    alone = Bystander(ask)
    for _ in range(USUAL_ASKS):
        alone.once()
    lock, is_dead, todo, start_s = threading.Lock(), threading.Event(), iter(numbered), time.monotonic()

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
                result.num_cases += 1
                result.num_answered += not reply.errors
                result.slowest = max(result.slowest, (reply.seconds, number, case.label))
                result.errors.update(error[:60] for error in reply.errors)
                result.broken += [f"{name}, case {number} ({case.label}): {wrong}"] if wrong else []
        client.close()

    with Bystander(ask) as meanwhile, ThreadPoolExecutor(NUM_CLIENTS) as pool:
        for done in [pool.submit(work) for _ in range(NUM_CLIENTS)]:
            done.result()
    result.seconds = time.monotonic() - start_s
    result.usual, result.waits = alone.waits, meanwhile.waits
    result.broken += [*alone.wrong, *meanwhile.wrong]
    if served.is_ready():
        wrong = ask()
        result.broken += [*served.held_blocks(TIMEOUT_S), *([f"afterwards: {wrong}"] if wrong else [])]
    else:
        with contextlib.suppress(subprocess.TimeoutExpired):
            served.process.wait(END_S)  # and say why
        result.broken.append(f"the server is not ready; its log ends with:\n{served.last_words()}")
    own.close()
    return result


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
    options = args.serve_options.split()
    if args.openai:
        return openai_attacks.run(options)
    results, servers = [], list(itertools.product(CONTRACTS, MODES))
    for contract, mode in servers:
        numbers = [args.only] if args.only is not None else range(args.cases // len(servers))
        known = known_crashes(contract) if args.known_crashes else []
        cases = itertools.chain(
            ((number, make_case(args.seed, number, contract)) for number in numbers), ((-1, case) for case in known)
        )
        with serving(*options, mode, "--contract", contract) as served:
            results.append(fuzz(served, contract, cases, f"{contract} {mode}"))
    status = report([result.row() for result in results], [line for result in results for line in result.broken])
    for result in results:
        print(f"\n{result.server}, most frequent errors:")
        print("\n".join(f"  {count:5d}  {error!r}" for error, count in result.errors.most_common(12)))
    return status
