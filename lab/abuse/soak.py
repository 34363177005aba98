"""`scripts/soak.py --minutes N`: mixed traffic over gRPC and HTTP, with clients that leave, make mistakes and overflow.

A quiet server first answers every job by itself; afterwards each answer is compared with that: whole, or its beginning
where the client or a stop request ended it early. A refusal because the queue is full is an answer as well. The traffic
pauses now and then, so that what is still held then can be counted. Exits with 1 and a line per broken promise.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from faser_backend.serving.processes import is_running
from lab.abuse.cases import make_case
from lab.abuse.clients import REFUSAL, TIMEOUT_S, GrpcClient, Reply, make_request, post, read_response
from lab.abuse.flight import send_stop
from lab.abuse.fuzz import broken_promise, send
from lab.abuse.served import Served, end_servers_on_sigterm, report, serving
from lab.tables import markdown_table

NUM_CLIENTS = 8
QUEUE_SIZE = 8  # small, so that it overflows
# Blocks for one context of the demo pair: what twelve sequences need together is more, so that some are preempted.
SERVE_OPTIONS = (
    *("--num-threads", 1, "--max-num-seqs", 12, "--max-queue-size", QUEUE_SIZE, "--num-kv-blocks", 64),
    *("--policy", "fixed:4"),
)
QUIET_S = 60.0  # within which what clients left behind has come to its end
WARM_UP = 0.25  # of the samples, which growth leaves out: buffers and pools still grow to their size
Done = tuple[list[str], list[str]]  # what happened, and what should not have

TEXT_MODELS = ("ensemble", "tensorrt_llm_bls")
NUM_BURST = 28  # requests at once: more than run and wait
HALF_OPEN_S = 0.5
NUM_FUZZ = 10**9
_PROMPTS = (
    "def f(x):\n    return",
    "class Stack:\n    def push(self, item):\n",
    "import os\n\nfor name in os.listdir(",
    "# größe, naïve, 東京\nx = [",
)
_GUIDES = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[a-z]{4,12}( = [0-9]{1,3})?"}
_GREEDY = {"exclude_input_in_output": True}
_SAMPLED = _GREEDY | {"temperature": 1.0, "top_p": 1.0}
_LENGTHS = (16, 40, 160)
# The end id is no token, so that the lengths are fixed; what a grammar ends, ends.
JOBS: tuple[dict[str, Any], ...] = (
    *(
        {"text_input": prompt, "max_tokens": _LENGTHS[i % 3], "end_id": -1, "seed": i}
        | (_SAMPLED if i % 2 else _GREEDY)
        for i, prompt in enumerate(_PROMPTS * 3)
    ),
    *({"text_input": prompt, "max_tokens": 24, "seed": i} | _SAMPLED | _GUIDES for i, prompt in enumerate(_PROMPTS)),
)
TOKEN_JOB = {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 40, "end_id": -1, "seed": 7}
NUM_PLAIN = 3 * len(_PROMPTS)  # of the jobs: those without a grammar, greedy and sampled in turn


# -- jobs and their answers ------------------------------------------------------------------------------------------
def ask_tokens(client: GrpcClient) -> Reply:
    """The reply to TOKEN_JOB, its ids as text."""
    reply = client.ask(make_request("tensorrt_llm", [{**TOKEN_JOB, "streaming": True}]))
    reply.texts = {0: " ".join(map(str, reply.ids))}
    return reply


def ask_alone(client: GrpcClient) -> list[str]:
    """The answers of a quiet server: to each of JOBS, then to TOKEN_JOB. Raises RuntimeError where one is missing."""
    replies = [*(client.ask(make_request("ensemble", [job])) for job in JOBS), ask_tokens(client)]
    for reply in replies:
        if reply.errors or not reply.text:
            raise RuntimeError(f"a quiet server did not answer: {reply.errors}")
    return [reply.text for reply in replies]


def judge(reply: Reply, expected: Sequence[str], *, may_be_short: bool = False) -> tuple[str, str | None]:
    """What became of a request, and what is wrong with that. expected: the text of each of its prompts."""
    found = [reply.texts.get(i, "") for i in range(len(expected))]
    is_beginning = all(text.startswith(part) for part, text in zip(found, expected, strict=True))
    if reply.is_cut and is_beginning:
        return "left", None
    if not reply.is_cut and (reply.is_lost or reply.num_finals != 1):
        return "wrong", f"answered {reply.num_finals} times, errors {reply.errors}"
    if len(reply.errors) == 1 and REFUSAL in reply.errors[0]:
        return "refused", None
    if not reply.errors and not reply.is_cut and found == list(expected):
        return "exact", None
    if not reply.errors and may_be_short and is_beginning:
        return "short", None
    return "wrong", f"{found} in place of {list(expected)}, errors {reply.errors}"


class Client:
    """One client, with a connection of its own and its own luck."""

    def __init__(self, served: Served, expected: Sequence[str], seed: int, number: int, *, leaves_late: bool) -> None:
        """leaves_late: closes connections between an answer's last response and its end."""
        self._served, self._expected, self._rng = served, expected, np.random.default_rng([seed, number])
        self._grpc, self._number, self._num_acts, self._leaves_late = GrpcClient(served.url), number, 0, leaves_late

    def act(self) -> Done:
        """Does one thing, whole: everything once, then by chance."""
        names, weights = list(ACTIONS), np.array([weight for weight, _ in ACTIONS.values()], float)
        name = str(self._rng.choice(names, p=weights / weights.sum()))
        if self._num_acts < len(names):
            name = names[(self._number + self._num_acts) % len(names)]
        self._num_acts += 1
        done, broken = ACTIONS[name][1](self)
        return [f"{name}: {each}" for each in done], [f"{name}: {each}" for each in broken]

    def close(self) -> None:
        self._grpc.close()

    def one_of(self, *values: Any) -> Any:
        return values[int(self._rng.integers(len(values)))]

    def job(self) -> int:
        return self.one_of(*range(len(JOBS)))

    def judged(self, reply: Reply, jobs: Sequence[int], *, may_be_short: bool = False) -> Done:
        outcome, wrong = judge(reply, [self._expected[i] for i in jobs], may_be_short=may_be_short)
        return [outcome], [f"jobs {list(jobs)}: {wrong}"] if wrong else []

    def ask(self, jobs: Sequence[int], *, is_streamed: bool, leave_after: int | None = None) -> Done:
        request = make_request(self.one_of(*TEXT_MODELS), [{**JOBS[i], "stream": is_streamed} for i in jobs])
        return self.judged(self._grpc.ask(request, leave_after=leave_after), jobs)

    def batch(self) -> Done:
        start = self.one_of(0, 1)  # prompts of a batch have the same tensors
        jobs = [int(i) for i in self._rng.choice(np.arange(start, NUM_PLAIN, 2), 3)]
        return self.ask(jobs, is_streamed=self.one_of(True, False))

    def tokens(self) -> Done:
        return self.judged(ask_tokens(self._grpc), [len(JOBS)])

    def disconnect(self) -> Done:
        """Closes the connection while a long answer is under way: that the server lives through it is all."""
        job, client, reply = self.job(), GrpcClient(self._served.url), Reply()
        # Triton refuses the undeclared tensor, and keeps the connection of a client that leaves right after that.
        asked = {"input_lengths": 1} if self._leaves_late else {"max_tokens": 300, "stream": True}
        request = make_request(self.one_of(*TEXT_MODELS), [JOBS[job] | asked])
        call = client.stub.ModelStreamInfer(iter([request]), timeout=TIMEOUT_S)
        read_response(next(call), reply)
        reply.is_cut = not reply.num_finals or self._leaves_late
        if reply.is_cut:
            call.cancel()
        for response in () if reply.is_cut else call:
            read_response(response, reply)
        client.close()
        return (["left"], []) if reply.is_cut or not reply.errors else self.judged(reply, [job])

    def http(self, leave_after: int | None = None) -> Done:
        job, way = self.job(), self.one_of("generate", "generate_stream")
        body = json.dumps({**JOBS[job], "stream": way == "generate_stream"}).encode()
        path = f"/v2/models/{self.one_of(*TEXT_MODELS)}/{way}"
        return self.judged(post(self._served.ports.http, path, body, leave_after=leave_after), [job])

    def half_open(self) -> Done:
        """Announces a body that never comes."""
        address = ("127.0.0.1", self._served.ports.http)
        with socket.create_connection(address, HALF_OPEN_S) as connection:
            connection.sendall(b"POST /v2/models/ensemble/generate HTTP/1.1\r\nContent-Length: 100\r\n\r\n{")
            time.sleep(HALF_OPEN_S)
        return ["left"], []

    def malformed(self) -> Done:
        """A case of `fuzz`."""
        case = make_case(self._number, int(self._rng.integers(NUM_FUZZ)), "inflight_batcher")
        reply = send(case, self._grpc, self._served.ports.http)
        wrong = broken_promise(reply, is_http=case.request is None)
        return ["refused" if reply.errors else "answered"], [f"{case.label}: {wrong}"] if wrong else []

    def stop(self) -> Done:
        """A long answer, ended early by a stop request of another model once it has begun."""
        job, request_id = self.job() % NUM_PLAIN, f"client {self._number} act {self._num_acts}"
        stops: list[Reply] = []
        thread = threading.Thread(target=lambda: stops.append(send_stop(self._served, request_id)))
        request = make_request(self.one_of(*TEXT_MODELS), [{**JOBS[job], "stream": True}], request_id)
        reply = self._grpc.ask(request, on_first=thread.start)
        if thread.ident is not None:
            thread.join()
        done, broken = self.judged(reply, [job], may_be_short=True)
        return done, broken + [f"the stop request: {each}" for each in stops if each.errors or each.num_finals != 1]

    def overflow(self) -> Done:
        """More requests at once than run and wait: some are refused, and the rest are served."""
        job = self.job()
        request = make_request(self.one_of(*TEXT_MODELS), [{**JOBS[job], "stream": True}])
        with ThreadPoolExecutor(NUM_BURST) as pool:
            replies = list(pool.map(self._grpc.ask, [request] * NUM_BURST))
        judged = [self.judged(reply, [job]) for reply in replies]
        return [outcome for outcomes, _ in judged for outcome in outcomes], [
            line for _, lines in judged for line in lines
        ]


ACTIONS: dict[str, tuple[int, Callable[[Client], Done]]] = {  # by name: how often, and what
    "stream": (24, lambda client: client.ask([client.job()], is_streamed=True)),
    "unary": (16, lambda client: client.ask([client.job()], is_streamed=False)),
    "tokens": (8, Client.tokens),
    "batch": (8, Client.batch),
    "cancel": (12, lambda client: client.ask([client.job()], is_streamed=True, leave_after=client.one_of(0, 1, 2))),
    "disconnect": (4, Client.disconnect),
    "http": (16, Client.http),
    "http disconnect": (4, lambda client: client.http(client.one_of(0, 1, 200))),
    "half-open": (2, Client.half_open),
    "malformed": (8, Client.malformed),
    "stop": (5, Client.stop),
    "overflow": (2, Client.overflow),
}


# -- what the server holds -------------------------------------------------------------------------------------------
class Usage(NamedTuple):
    """What one process holds."""

    threads: float
    handles: float
    resident_mib: float


MAX_GROWTH = Usage(threads=8, handles=16, resident_mib=48.0)  # of a process, over all samples but the first


@dataclass
class Sample:
    """What the server held while nobody asked for anything."""

    minutes: float  # since the traffic began
    processes: dict[str, Usage]


def usage(pid: int) -> Usage | None:
    """None where it has ended."""
    try:
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
        )
        return Usage(int(status["Threads"]), len(os.listdir(f"/proc/{pid}/fd")), int(status["VmRSS"].split()[0]) / 1024)
    except (OSError, KeyError):
        return None


def sample(served: Served, before: Mapping[str, int], samples: list[Sample], start_s: float) -> list[str]:
    """Takes a sample of the quiet server. Returns broken promises."""
    gone = [name for name, pid in before.items() if not is_running(pid)]
    if gone or not served.is_ready():
        return [f"gone or not ready: {', '.join(gone) or 'the server'}; its log ends with:\n{served.last_words()}"]
    broken = served.held_blocks(QUIET_S)
    found = {name: usage(pid) for name, pid in served.processes().items()}
    held = {name: value for name, value in found.items() if value is not None}
    samples.append(Sample((time.monotonic() - start_s) / 60, held))
    return broken


def kept(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Those after the warm-up."""
    return samples[int(len(samples) * WARM_UP) :]


def lasting(samples: Sequence[Sample]) -> list[str]:
    """Names of the processes that were there all the time."""
    return [name for name in samples[0].processes if all(name in each.processes for each in samples)] if samples else []


def growth(samples: Sequence[Sample]) -> list[str]:
    """Broken promises: a process gained more than noise, and went on gaining: not in one step, as a buffer does that
    has grown to the largest request. Compares the medians of the three thirds of the time."""
    samples, broken = kept(samples), []
    if len(samples) < 3:
        return []
    for name in lasting(samples):
        held = np.array([each.processes[name] for each in samples])  # [samples, kinds]
        medians = np.array([np.median(part, axis=0) for part in np.array_split(held, 3)])
        steady = 3 * np.diff(medians, axis=0).min(axis=0)  # [kinds], over all of the time
        for what, gained, most in zip(Usage._fields, steady, MAX_GROWTH, strict=True):
            if gained > most:
                broken.append(f"{name}: {what} grew steadily, by {gained:.1f} at least; the limit is {most:g}")
    return broken


# -- the soak --------------------------------------------------------------------------------------------------------
@dataclass
class Soak:
    """What a run came to."""

    num_done: Counter[str] = field(default_factory=Counter)  # by action and outcome
    broken: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    num_preemptions: int = 0


def soak(served: Served, seconds: float, num_pauses: int, seed: int, *, leaves_late: bool = False) -> Soak:
    """Traffic for so many seconds in all, with pauses in which samples are taken. leaves_late: of Client."""
    result, lock, start_s = Soak(), threading.Lock(), time.monotonic()
    alone = GrpcClient(served.url)
    expected = ask_alone(alone)
    before = served.processes()
    clients = [Client(served, expected, seed, number, leaves_late=leaves_late) for number in range(NUM_CLIENTS)]

    def work(client: Client, until_s: float) -> None:
        while time.monotonic() < until_s and served.process.poll() is None:
            done, broken = client.act()
            with lock:
                result.num_done.update(done)
                result.broken += broken

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        for _ in range(num_pauses):
            until_s = time.monotonic() + seconds / num_pauses
            for done in [pool.submit(work, client, until_s) for client in clients]:
                done.result()
            result.broken += sample(served, before, result.samples, start_s)
            minutes, num_done = (time.monotonic() - start_s) / 60, result.num_done.total()
            print(f"minute {minutes:.1f}: {num_done} answers, {len(result.broken)} broken promises", file=sys.stderr)
            if result.broken and not served.is_ready():
                break
    if served.is_ready():
        pairs = zip(expected, ask_alone(alone), strict=True)
        result.broken += [
            f"afterwards, alone: job {i} has another answer" for i, (old, new) in enumerate(pairs) if old != new
        ]
        result.num_preemptions = int(served.metric("nv_trt_llm_speculative_decoding_metrics", "preemptions"))
    for client in (*clients, alone):
        client.close()
    result.broken += growth(result.samples)
    result.broken += [f"{name}: never happened" for name in ACTIONS if not any(name in key for key in result.num_done)]
    return result


def process_rows(samples: Sequence[Sample]) -> list[dict[str, str]]:
    """What each process held after the warm-up and at the end."""
    first, last = samples[0].processes, samples[-1].processes
    return [
        {"process": name}
        | {
            what: f"{one:.0f} -> {other:.0f}"
            for what, one, other in zip(Usage._fields, first[name], last[name], strict=True)
        }
        for name in lasting(samples)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--known-leak", action="store_true", help="leave as Triton 2.51 keeps connections open for")
    args = parser.parse_args(arguments)
    end_servers_on_sigterm()
    if not 0 < args.minutes <= 24 * 60:
        parser.error(f"--minutes {args.minutes}: must lie in (0, 1440]")
    num_pauses = max(5, int(args.minutes * 3))
    with serving(*SERVE_OPTIONS) as served:
        result = soak(served, args.minutes * 60, num_pauses, args.seed, leaves_late=args.known_leak)
    if samples := kept(result.samples):
        span = f"minutes {samples[0].minutes:.1f} to {samples[-1].minutes:.1f}, {len(samples)} samples"
        rows = process_rows(samples)
        print(
            "\n".join([f"Preemptions: {result.num_preemptions}. {span}:", "", *markdown_table(list(rows[0]), rows), ""])
        )
    done = [{"request, and what became of it": what, "times": num} for what, num in sorted(result.num_done.items())]
    return report(done, result.broken)
