"""What a soak's clients do: requests of every kind, and how each should have been answered.

Every answer is judged against that of the same job on a quiet server: whole, or its beginning where the client or a
stop request ended it early. A refusal because the queue is full is an answer as well.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lab.abuse.cases import make_case
from lab.abuse.clients import REFUSAL, TIMEOUT_S, GrpcClient, Reply, make_request, post, read_response
from lab.abuse.fuzz import broken_promise, send
from lab.abuse.served import Served

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

    def __init__(
        self,
        served: Served,
        expected: Sequence[str],
        rng: np.random.Generator,
        number: int,
        *,
        leaves_late: bool = False,
    ) -> None:
        """leaves_late: closes connections between an answer's last response and its end."""
        self._served, self._expected, self._rng, self._number = served, expected, rng, number
        self._grpc = GrpcClient(served.url)
        self._leaves_late = leaves_late
        self._num_acts = 0
        self._num_sent = 0  # requests that were to be stopped

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

    def _job(self) -> int:
        return int(self._rng.integers(len(JOBS)))

    def _model(self) -> str:
        return TEXT_MODELS[int(self._rng.integers(len(TEXT_MODELS)))]

    def _judged(self, reply: Reply, jobs: Sequence[int], *, may_be_short: bool = False) -> Done:
        outcome, wrong = judge(reply, [self._expected[i] for i in jobs], may_be_short=may_be_short)
        return [outcome], [f"jobs {list(jobs)}: {wrong}"] if wrong else []

    def _ask(self, jobs: Sequence[int], *, is_streamed: bool, leave_after: int | None = None) -> Done:
        prompts = [{**JOBS[i], "stream": is_streamed} for i in jobs]
        return self._judged(self._grpc.ask(make_request(self._model(), prompts), leave_after=leave_after), jobs)

    def stream(self) -> Done:
        return self._ask([self._job()], is_streamed=True)

    def unary(self) -> Done:
        return self._ask([self._job()], is_streamed=False)

    def tokens(self) -> Done:
        return self._judged(ask_tokens(self._grpc), [len(JOBS)])

    def batch(self) -> Done:
        start = int(self._rng.integers(2))  # prompts of a batch have the same tensors
        jobs = [int(i) for i in self._rng.choice(np.arange(start, NUM_PLAIN, 2), 3)]
        return self._ask(jobs, is_streamed=bool(self._rng.integers(2)))

    def cancel(self) -> Done:
        return self._ask([self._job()], is_streamed=True, leave_after=int(self._rng.integers(3)))

    def disconnect(self) -> Done:
        """Closes the connection while a long answer is under way: that the server lives through it is all."""
        job, client, reply = self._job(), GrpcClient(self._served.url), Reply()
        # Triton refuses the undeclared tensor, and keeps the connection of a client that leaves right after that.
        asked = {"input_lengths": 1} if self._leaves_late else {"max_tokens": 300, "stream": True}
        call = client.stub.ModelStreamInfer(iter([make_request(self._model(), [JOBS[job] | asked])]), timeout=TIMEOUT_S)
        read_response(next(call), reply)
        reply.is_cut = not reply.num_finals or self._leaves_late
        if reply.is_cut:
            call.cancel()
        for response in () if reply.is_cut else call:
            read_response(response, reply)
        client.close()
        return (["left"], []) if reply.is_cut or not reply.errors else self._judged(reply, [job])

    def http(self) -> Done:
        return self._post(self._job())

    def http_disconnect(self) -> Done:
        return self._post(self._job(), leave_after=int(self._rng.choice([0, 1, 200])))

    def half_open(self) -> Done:
        """Announces a body that never comes."""
        address = ("127.0.0.1", self._served.ports.http)
        with socket.create_connection(address, HALF_OPEN_S) as connection:
            connection.sendall(b"POST /v2/models/ensemble/generate HTTP/1.1\r\nContent-Length: 100\r\n\r\n{")
            time.sleep(HALF_OPEN_S)
        return ["left"], []

    def _post(self, job: int, leave_after: int | None = None) -> Done:
        way = str(self._rng.choice(["generate", "generate_stream"]))
        body = json.dumps({**JOBS[job], "stream": way == "generate_stream"}).encode()
        path = f"/v2/models/{self._model()}/{way}"
        return self._judged(post(self._served.ports.http, path, body, leave_after=leave_after)[0], [job])

    def malformed(self) -> Done:
        """A case of `fuzz`."""
        case = make_case(self._number, int(self._rng.integers(NUM_FUZZ)), "inflight_batcher")
        reply = send(case, self._grpc, self._served.ports.http)
        wrong = broken_promise(reply, is_http=case.request is None)
        return ["refused" if reply.errors else "answered"], [f"{case.label}: {wrong}"] if wrong else []

    def stop(self) -> Done:
        """A long answer, ended early by a stop request of another model once it has begun."""
        job, self._num_sent = self._job() % NUM_PLAIN, self._num_sent + 1
        request_id = f"client {self._number} request {self._num_sent}"
        stops: list[Reply] = []

        def send_stop() -> None:
            ids = {"input_ids": 1, "input_lengths": 1, "request_output_len": 1, "stop": True}
            with_connection = GrpcClient(self._served.url)
            stops.append(with_connection.ask(make_request("tensorrt_llm", [ids], request_id)))
            with_connection.close()

        thread = threading.Thread(target=send_stop)
        request = make_request(self._model(), [{**JOBS[job], "stream": True}], request_id)
        reply = self._grpc.ask(request, on_first=thread.start)
        if thread.ident is not None:
            thread.join()
        done, broken = self._judged(reply, [job], may_be_short=True)
        broken += [f"the stop request: {each}" for each in stops if each.errors or each.num_finals != 1]
        return done, broken

    def overflow(self) -> Done:
        """More requests at once than run and wait: some are refused, and the rest are served."""
        job, replies = self._job(), list[Reply]()
        request = make_request(self._model(), [{**JOBS[job], "stream": True}])
        threads = [threading.Thread(target=lambda: replies.append(self._grpc.ask(request))) for _ in range(NUM_BURST)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        judged = [self._judged(reply, [job]) for reply in replies]
        broken = [line for _, lines in judged for line in lines]
        if len(replies) != NUM_BURST:
            broken.append(f"{len(replies)} of {NUM_BURST} requests came back")
        return [outcome for outcomes, _ in judged for outcome in outcomes], broken


ACTIONS: dict[str, tuple[int, Callable[[Client], Done]]] = {  # by name: how often, and what
    "stream": (24, Client.stream),
    "unary": (16, Client.unary),
    "tokens": (8, Client.tokens),
    "batch": (8, Client.batch),
    "cancel": (12, Client.cancel),
    "disconnect": (4, Client.disconnect),
    "http": (16, Client.http),
    "http disconnect": (4, Client.http_disconnect),
    "half-open": (2, Client.half_open),
    "malformed": (8, Client.malformed),
    "stop": (5, Client.stop),
    "overflow": (2, Client.overflow),
}
