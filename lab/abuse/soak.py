"""`scripts/soak.py --minutes N`: mixed traffic over gRPC and HTTP, with clients that leave, err and overflow the queue.

A quiet server first answers every job alone; each later answer must equal that, or its beginning if the client or a
stop request ended it early. Traffic pauses now and then to count resources still held, and goes on after its time
until everything has happened once. Exits with 1 and a line per broken promise.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from faser_backend.lab.abuse.cases import PROMPT, make_case, pick
from faser_backend.lab.abuse.clients import GrpcClient, Reply, ask_http, judge
from faser_backend.lab.abuse.fuzz import send
from faser_backend.lab.abuse.served import (
    SPECULATION,
    Served,
    Usage,
    end_servers_on_sigterm,
    metric,
    note,
    report,
    serving,
    usage,
)
from faser_backend.lab.bench.wire import tensor_request
from faser_backend.lab.checks.options import make_parser
from faser_backend.lab.tables import markdown_table
from faser_backend.serving.processes import is_running

NUM_CLIENTS = 8
# Blocks for one context of the demo pair: twelve sequences need more, so some are preempted. The queue is small, so
# that it overflows.
SERVE_OPTIONS = (
    *("--num-threads", 1, "--max-num-seqs", 12, "--max-queue-size", 8, "--num-kv-blocks", 64),
    *("--policy", "fixed:4"),
)
NUM_BURST = 28  # simultaneous requests: more than run and wait
HALF_OPEN_S = 0.5
MAX_EXTRA_S = 60.0  # on a busy machine, until everything has happened once
QUIET_S = 60.0  # within which requests of clients that left must end
WARM_UP = 0.25  # share of samples ignored by slopes: buffers and pools still grow
MAX_GROWTH = Usage(threads=8, handles=16, resident_mib=48.0)  # of a process, after the warm-up

# -- traffic ---------------------------------------------------------------------------------------------------------
TEXT_MODELS = ("ensemble", "tensorrt_llm_bls")
_PROMPTS = (
    PROMPT,
    "class Stack:\n    def push(self, item):\n",
    "import os\n\nfor name in os.listdir(",
    "# größe, naïve, 東京\nx = [",
)
_GUIDES = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[a-z]{4,12}( = [0-9]{1,3})?"}
_GREEDY = {"exclude_input_in_output": True}
_SAMPLED = _GREEDY | {"temperature": 1.0, "top_p": 1.0}
# The end id is no token, so lengths are fixed except by a grammar. The last job sends token ids.
JOBS: tuple[dict[str, Any], ...] = (
    *(
        {"text_input": prompt, "max_tokens": (16, 40, 160)[i % 3], "end_id": -1, "seed": i}
        | (_SAMPLED if i % 2 else _GREEDY)
        for i, prompt in enumerate(_PROMPTS * 3)
    ),
    *({"text_input": prompt, "max_tokens": 24, "seed": i} | _SAMPLED | _GUIDES for i, prompt in enumerate(_PROMPTS)),
    {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 40, "end_id": -1, "seed": 7, "streaming": True},
)
NUM_PLAIN, NUM_TEXTS = 3 * len(_PROMPTS), len(JOBS) - 1  # the former: without a grammar, greedy and sampled alternately
LONG_JOBS = range(2, NUM_PLAIN, 3)
Done = tuple[list[str], list[str]]  # what happened, and what was wrong


def ask_alone(client: GrpcClient) -> list[str]:
    """Returns a quiet server's answer to each of JOBS. Raises RuntimeError if one is missing."""
    models = ["ensemble"] * NUM_TEXTS + ["tensorrt_llm"]
    replies = [client.ask(tensor_request(model, job)) for model, job in zip(models, JOBS, strict=True)]
    for reply in replies:
        if reply.errors or not reply.text:
            raise RuntimeError(f"a quiet server did not answer: {reply.errors}")
    return [reply.text for reply in replies]


class Client:
    """One client with its own connection and random generator."""

    def __init__(self, served: Served, expected: Sequence[str], seed: int, number: int) -> None:
        self.rng = np.random.default_rng([seed, number])
        self.grpc = GrpcClient(served.url)
        self._served, self._expected, self._number = served, expected, number
        self._num_acts = 0

    def act(self) -> Done:
        """Performs one action: each once, then at random."""
        names, weights = list(ACTIONS), np.array([weight for weight, _ in ACTIONS.values()], float)
        name = str(self.rng.choice(names, p=weights / weights.sum()))
        if self._num_acts < len(names):
            name = names[(self._number + self._num_acts) % len(names)]
        self._num_acts += 1
        done, broken = ACTIONS[name][1](self)
        return [f"{name}: {each}" for each in done], [f"{name}: {each}" for each in broken]

    def _judged(self, reply: Reply, jobs: Sequence[int], *, may_be_short: bool = False) -> Done:
        outcome, wrong = judge(reply, [self._expected[i] for i in jobs], may_be_short=may_be_short)
        return [outcome], [f"jobs {jobs}: {wrong}"] if wrong else []

    def _request(self, jobs: Sequence[int], values: Mapping[str, Any], request_id: str = "") -> Any:
        return tensor_request(
            pick(self.rng, TEXT_MODELS), *({**JOBS[i], **values} for i in jobs), request_id=request_id
        )

    def text(self, *, stream: bool = True, leave_after: int | None = None) -> Done:
        jobs = [int(self.rng.integers(NUM_TEXTS))]
        return self._judged(self.grpc.ask(self._request(jobs, {"stream": stream}), leave_after=leave_after), jobs)

    def tokens(self) -> Done:
        return self._judged(self.grpc.ask(tensor_request("tensorrt_llm", JOBS[-1])), [NUM_TEXTS])

    def batch(self) -> Done:
        start = int(self.rng.integers(2))  # prompts of a batch have the same tensors
        jobs = [int(i) for i in self.rng.choice(np.arange(start, NUM_PLAIN, 2), 3)]
        return self._judged(self.grpc.ask(self._request(jobs, {"stream": bool(self.rng.integers(2))})), jobs)

    def disconnect(self) -> Done:
        """Closes the connection during a long answer; the server must survive."""
        jobs, client = [int(self.rng.integers(NUM_TEXTS))], GrpcClient(self._served.url)
        reply = client.ask(self._request(jobs, {"max_tokens": 300, "stream": True}), leave_after=1)
        client.close()
        return (["left"], []) if reply.is_cut or not reply.errors else self._judged(reply, jobs)

    def http(self, leave_after: int | None = None) -> Done:
        job, way = int(self.rng.integers(NUM_TEXTS)), pick(self.rng, ("generate", "generate_stream"))
        body = json.dumps({**JOBS[job], "stream": way == "generate_stream"}).encode()
        path = f"/v2/models/{pick(self.rng, TEXT_MODELS)}/{way}"
        return self._judged(ask_http(self._served.ports[0], path, body, leave_after=leave_after), [job])

    def half_open(self) -> Done:
        """Announces a body that is never sent."""
        with socket.create_connection(("127.0.0.1", self._served.ports[0]), HALF_OPEN_S) as connection:
            connection.sendall(b"POST /v2/models/ensemble/generate HTTP/1.1\r\nContent-Length: 100\r\n\r\n{")
            time.sleep(HALF_OPEN_S)
        return ["left"], []

    def malformed(self) -> Done:
        """Sends a case of `fuzz`."""
        case = make_case(self._number, int(self.rng.integers(10**9)), "inflight_batcher")
        reply, wrong = send(case, self.grpc, self._served.ports[0])
        return ["refused" if reply.errors else "answered"], [f"{case.label}: {wrong}"] if wrong else []

    def stop(self) -> Done:
        """Starts a long answer and ends it early by a stop request through another model."""
        jobs, request_id = [int(self.rng.choice(LONG_JOBS))], f"client {self._number} request {self._num_acts}"
        request = self._request(jobs, {"stream": True}, request_id)
        with ThreadPoolExecutor(1) as pool:
            stops = []
            reply = self.grpc.ask(
                request, on_first=lambda: stops.append(pool.submit(ask_to_stop, self._served, request_id))
            )
        done, broken = self._judged(reply, jobs, may_be_short=True)
        stopped = [each.result() for each in stops]
        broken += [f"the stop request: {each}" for each in stopped if each.errors or each.num_finals != 1]
        return done, broken

    def overflow(self) -> Done:
        """Sends more requests at once than run and wait: some are refused, the rest are served."""
        jobs = [int(self.rng.integers(NUM_TEXTS))]
        request = self._request(jobs, {"stream": True})
        with ThreadPoolExecutor(NUM_BURST) as pool:
            judged = [self._judged(reply, jobs) for reply in pool.map(self.grpc.ask, [request] * NUM_BURST)]
        return [each for done, _ in judged for each in done], [each for _, broken in judged for each in broken]


def ask_to_stop(served: Served, request_id: str) -> Reply:
    """Sends a stop request for this id from a new connection."""
    client = GrpcClient(served.url)
    ids = {"input_ids": 1, "input_lengths": 1, "request_output_len": 1, "stop": True}
    reply = client.ask(tensor_request("tensorrt_llm", ids, request_id=request_id))
    client.close()
    return reply


ACTIONS: dict[str, tuple[int, Callable[[Client], Done]]] = {  # by name: frequency, action
    "stream": (24, Client.text),
    "unary": (16, lambda client: client.text(stream=False)),
    "tokens": (8, Client.tokens),
    "batch": (8, Client.batch),
    "cancel": (12, lambda client: client.text(leave_after=int(client.rng.integers(3)))),
    "disconnect": (4, Client.disconnect),
    "http": (16, Client.http),
    "http disconnect": (4, lambda client: client.http(leave_after=pick(client.rng, [0, 1, 200]))),
    "half-open": (2, Client.half_open),
    "malformed": (8, Client.malformed),
    "stop": (5, Client.stop),
    "overflow": (2, Client.overflow),
}
# Beginnings of the keys of Soak.num_done that a run must bring about.
EVERYTHING = (
    *(f"{name}: " for name in ACTIONS),
    *(f"{name}: exact" for name in ("stream", "unary", "tokens", "batch", "http")),
    *("stop: short", "overflow: refused"),
)


# -- what is still held ----------------------------------------------------------------------------------------------
@dataclass
class Sample:
    """The resources that the server holds while there is no traffic."""

    minutes: float  # since the traffic began
    blocks: float
    processes: dict[str, Usage]


@dataclass
class Soak:
    """The outcome of a run against a server."""

    num_done: Counter[str] = field(default_factory=Counter)  # by action and outcome
    broken: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    num_preemptions: int = 0

    @property
    def missing(self) -> list[str]:
        return [each for each in EVERYTHING if not any(key.startswith(each) for key in self.num_done)]


def soak(served: Served, seconds: float, num_pauses: int, seed: int) -> Soak:
    """Generates traffic for this many seconds, with pauses in which samples are taken."""
    result, lock, alone = Soak(), threading.Lock(), GrpcClient(served.url)
    start_s, expected, before = time.monotonic(), ask_alone(alone), served.processes()
    clients = [Client(served, expected, seed, number) for number in range(NUM_CLIENTS)]

    def work(client: Client) -> None:
        end_s = until_s
        while time.monotonic() < end_s and served.process.poll() is None:
            done, broken = client.act()
            with lock:
                result.num_done.update(done)
                note(result.broken, broken)
                end_s = until_s + (MAX_EXTRA_S if result.missing else 0.0)

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        for _ in range(num_pauses):
            until_s = time.monotonic() + seconds / num_pauses
            list(pool.map(work, clients))
            note(result.broken, sample(served, before, result.samples, start_s))
            minutes, num_done = (time.monotonic() - start_s) / 60, result.num_done.total()
            print(f"minute {minutes:.1f}: {num_done} answers, {len(result.broken)} broken promises", file=sys.stderr)
            if result.broken and not served.is_ready():
                break
    if served.is_ready():
        if ask_alone(alone) != expected:
            note(result.broken, ["afterwards, alone: other answers than before"])
        result.num_preemptions = int(metric(served.ports[2], SPECULATION, "preemptions"))
    for each in (alone, *(client.grpc for client in clients)):
        each.close()
    note(result.broken, [*growth(result.samples), *(f"{each}: never happened" for each in result.missing)])
    return result


def sample(served: Served, before: Mapping[str, int], samples: list[Sample], start_s: float) -> list[str]:
    """Takes a sample of the quiet server. Returns broken promises."""
    gone = [name for name, pid in before.items() if not is_running(pid)]
    if gone or not served.is_ready():
        return [f"gone or not ready: {', '.join(gone) or 'the server'}; its log ends with:\n{served.last_words()}"]
    blocks = served.blocks_in_use_when_quiet(QUIET_S)
    found = {name: usage(pid) for name, pid in served.processes().items()}
    held = {name: value for name, value in found.items() if value is not None}
    samples.append(Sample((time.monotonic() - start_s) / 60, blocks, held))
    return [f"{blocks:.0f} KV blocks are in use without a request"] if blocks else []


def slopes(samples: Sequence[Sample]) -> dict[str, Usage]:
    """Returns the growth per minute of each process that ran all the time, by least squares."""
    if len(samples) < 2:
        return {}
    minutes = [each.minutes for each in samples]
    names = [name for name in samples[0].processes if all(name in each.processes for each in samples)]
    return {name: Usage(*np.polyfit(minutes, [each.processes[name] for each in samples], 1)[0]) for name in names}


def growth(samples: Sequence[Sample]) -> list[str]:
    """Returns broken promises: processes that gained more than noise, repeatedly. A single step is allowed, as a buffer
    grows once to the largest request."""
    warm = samples[int(len(samples) * WARM_UP) :]
    parts = np.array_split(np.arange(len(warm)), max(1, min(3, len(warm) // 2)))
    found = [slopes([warm[i] for i in part]) for part in (np.arange(len(warm)), *parts)]
    broken = []
    for name in found[0]:
        for what, limit, *per_minute in zip(Usage._fields, MAX_GROWTH, *(each[name] for each in found), strict=True):
            gained = (warm[-1].minutes - warm[0].minutes) * min(per_minute)
            if gained > limit:
                broken.append(f"{name}: {what} grew steadily, by {gained:.1f} at least; the limit is {limit:g}")
    return broken


def growth_table(samples: Sequence[Sample]) -> list[str]:
    warm = samples[int(len(samples) * WARM_UP) :]
    rows = []
    for name, per_minute in slopes(warm).items():
        held = zip(Usage._fields, warm[0].processes[name], warm[-1].processes[name], per_minute, strict=True)
        row = {what: f"{one:.0f} -> {other:.0f}, {gained:+.2f} per minute" for what, one, other, gained in held}
        rows.append({"process": name, **row})
    return markdown_table(["process", *Usage._fields], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, "seed")
    parser.add_argument("--minutes", type=float, default=30.0)
    args = parser.parse_args(arguments)
    end_servers_on_sigterm()
    if not 0 < args.minutes <= 24 * 60:
        parser.error(f"--minutes {args.minutes}: must lie in (0, 1440]")
    seconds = args.minutes * 60
    with serving(*SERVE_OPTIONS) as served:
        result = soak(served, seconds, max(5, int(seconds / 20)), args.seed)
    rows = [{"request, and what became of it": what, "times": num} for what, num in sorted(result.num_done.items())]
    status = report(rows, len(result.broken))
    blocks = max((each.blocks for each in result.samples), default=0)
    print(f"\nPreemptions: {result.num_preemptions}.\nKV blocks in use at the {len(result.samples)} pauses: ", end="")
    print(f"at most {blocks:.0f}. Processes, after the first {WARM_UP:.0%} of the pauses:\n")
    print("\n".join(growth_table(result.samples)))
    return status
