"""Answers that are under way when something happens to the server, and what becomes of them and of it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from faser_backend.serving.processes import is_running
from lab.abuse.clients import GrpcClient, Reply, make_request
from lab.abuse.served import Served, kill_leftovers, wait_until

NUM_STREAMS = 4
BEGIN_S = 30.0
END_S = 10.0  # within which clients know that a process is gone, and the server has ended: two, on an idle machine
REQUEST_ID = "1"  # as many a client calls its first request
LONG = {"text_input": "def f(x):\n    return", "max_tokens": 900, "end_id": -1, "exclude_input_in_output": True}


@dataclass
class Outcome:
    """A row of the table."""

    fault: str
    saw: str = ""  # by the clients
    then: str = ""  # what became of the server
    recovery_s: float | None = None  # from the start of a new server to its first right answer
    broken: list[str] = field(default_factory=list)

    def row(self) -> dict[str, object]:
        return {
            "fault": self.fault,
            "what clients saw": self.saw,
            "what became of the server": self.then,
            "a new start answers as before after": "" if self.recovery_s is None else f"{self.recovery_s:.1f} s",
            "as promised": "no: " + "; ".join(self.broken) if self.broken else "yes",
        }


def ask_long(client: GrpcClient, on_first: Callable[[], None] = lambda: None) -> Reply:
    return client.ask(make_request("ensemble", [{**LONG, "stream": True}], REQUEST_ID), on_first=on_first)


class Flight:
    """NUM_STREAMS long answers, all of which have begun once it is there."""

    def __init__(self, served: Served) -> None:
        self._client = GrpcClient(served.url)
        self.expected = ask_long(self._client).text
        begun = threading.Semaphore(0)

        def stream() -> tuple[float, Reply]:
            reply = ask_long(self._client, begun.release)
            return time.monotonic(), reply

        pool = ThreadPoolExecutor(NUM_STREAMS)
        self._ended = [pool.submit(stream) for _ in range(NUM_STREAMS)]
        pool.shutdown(wait=False)
        if not all(begun.acquire(timeout=BEGIN_S) for _ in self._ended):
            raise RuntimeError(f"{NUM_STREAMS} streams did not begin within {BEGIN_S:.0f} s")
        self._start_s = time.monotonic()

    def land(self, outcome: Outcome, *, should_end: bool) -> float:
        """Waits for every stream and judges it. Returns the seconds until the last had ended.

        should_end: with the whole answer; otherwise with an error.
        """
        moments, replies = zip(*(each.result() for each in self._ended), strict=True)
        self._client.close()
        last_s = max(moments) - self._start_s
        num_whole = sum(reply.text == self.expected and not reply.errors for reply in replies)
        errors = sorted({error for reply in replies for error in reply.errors})
        outcome.saw = f"{num_whole} of {NUM_STREAMS} streams whole, {NUM_STREAMS - num_whole} ended by an error"
        outcome.saw += f", the last after {last_s:.1f} s" + "".join(f"; {error!r}" for error in errors[:1])
        if should_end and num_whole != NUM_STREAMS:
            outcome.broken.append("answers in flight were lost")
        if not should_end and last_s > END_S and num_whole != NUM_STREAMS:
            outcome.broken.append(f"a client learned of it after {last_s:.1f} s only")
        for reply in replies:
            if not self.expected.startswith(reply.text):
                outcome.broken.append("tokens that no undisturbed run has")
            if not reply.errors and reply.text != self.expected:
                outcome.broken.append("an answer that ends early without an error")
            if reply.num_finals > 1:
                outcome.broken.append(f"an answer with {reply.num_finals} ends")
        return last_s


def wait_for_end(served: Served, processes: Mapping[str, int], outcome: Outcome, within_s: float) -> float:
    """Judges how the server ended: `faser serve` by itself, and nothing of it left. Returns the seconds it took."""
    start_s = time.monotonic()
    wait_until(lambda: served.process.poll() is not None and not any(map(is_running, processes.values())), within_s)
    seconds, status = time.monotonic() - start_s, served.process.poll()
    if status is None:
        outcome.broken.append(f"`faser serve` did not end within {within_s:.0f} s")
        served.stop()
    left = kill_leftovers(dict(processes), 0.0)
    if left:
        outcome.broken.append(f"left behind: {', '.join(left)}")
    outcome.then = f"ended with status {status} and all its processes after {seconds:.1f} s"
    return seconds


def kill_process(
    served: Served, name: str, within_s: float = END_S, *, number: signal.Signals = signal.SIGKILL
) -> Outcome:
    """Sends a signal to one process of a server with answers in flight; the server has ended when it returns."""
    outcome = Outcome(f"kill -{number.value if number is signal.SIGKILL else number.name} of {name}")
    flight, processes = Flight(served), served.processes()
    if name not in processes:
        raise LookupError(f"{name}: not among {', '.join(processes)}")
    os.kill(processes[name], number)
    wait_for_end(served, processes, outcome, within_s)
    flight.land(outcome, should_end=False)
    if served.process.returncode == 0:
        outcome.broken.append("status 0: whoever supervises would not start it anew")
    return outcome


def send_stop(served: Served, request_id: str) -> Reply:
    """The reply to a stop request on a connection of its own."""
    ids = {"input_ids": 1, "input_lengths": 1, "request_output_len": 1, "stop": True}
    client = GrpcClient(served.url)
    reply = client.ask(make_request("tensorrt_llm", [ids], request_id))
    client.close()
    return reply


def stop_as_a_stranger(served: Served) -> Outcome:
    """Sends a stop request with the id of answers in flight that are not one's own."""
    outcome, flight = Outcome("stop = true with the id of others, and --stop-requests off"), Flight(served)
    told = send_stop(served, REQUEST_ID).errors
    flight.land(outcome, should_end=True)
    outcome.then = f"the stranger was told {told[0]!r}" if told else "the stranger was answered"
    outcome.broken += [] if told else ["a stop request was taken"]
    return outcome
