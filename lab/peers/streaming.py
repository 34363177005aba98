"""Peers behind an HTTP server of their own: a closed loop of clients that read server-sent events.

Knows nothing of what a request or an event of a peer looks like.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

from lab.answers import Answer, Job
from lab.bench.servers import START_TIMEOUT_S, ServerProcess
from lab.peers import turns


class StreamingServer(ServerProcess):
    """A peer's server on a loopback port, up once it is made. Raises RuntimeError where it does not come up."""

    path: str  # where requests are posted
    start_timeout_s = START_TIMEOUT_S

    def __init__(self, command: list[str], port: int, log: Path, env: dict[str, str] | None = None) -> None:
        self._url = f"http://127.0.0.1:{port}"
        super().__init__(command, self._url + "/health", log, env=env, **turns.OWN_GROUP)
        try:
            with turns.turn(self.process):
                self.wait_ready(self.start_timeout_s)
        except BaseException:
            self.stop()
            raise

    @abstractmethod
    def body(self, job: Job) -> dict[str, Any]:
        """The request for one job."""

    @abstractmethod
    def take(self, event: dict[str, Any], answer: Answer) -> tuple[str, bool]:
        """Writes an event's counters into the answer. Returns its text, and whether the answer has ended."""

    def run(self, jobs: list[Job], num_clients: int) -> tuple[list[Answer], float]:
        """num_clients requests in flight until all jobs are answered. Returns answers and seconds."""
        with turns.turn(self.process):
            return asyncio.run(self._run(jobs, num_clients))

    def stop(self) -> None:
        turns.stop(self.process)

    async def _run(self, jobs: list[Job], num_clients: int) -> tuple[list[Answer], float]:
        answers = [Answer(0.0, [], 0, 0, 0, "") for _ in jobs]
        work = iter([(self.body(job), answer) for job, answer in zip(jobs, answers, strict=True)])
        timeout = aiohttp.ClientTimeout(total=None, sock_read=120)
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            start = time.perf_counter()
            await asyncio.gather(*(self._client(session, work) for _ in range(num_clients)))
            return answers, time.perf_counter() - start

    async def _client(self, session: aiohttp.ClientSession, work: Iterator[tuple[dict[str, Any], Answer]]) -> None:
        for body, answer in work:
            text = hashlib.sha256()
            answer.start_s = time.perf_counter()
            async with session.post(self._url + self.path, json=body) as response:
                if response.status != 200:
                    raise RuntimeError(f"{self._url}{self.path}: {response.status}: {await response.text()}")
                async for line in response.content:
                    if not line.startswith(b"data: {"):  # a blank line between events, or the last one, [DONE]
                        continue
                    piece, has_ended = self.take(json.loads(line[6:]), answer)
                    # An answer may be nothing but the token that ends it: its end is its response then.
                    if piece or (has_ended and not answer.response_s):
                        answer.response_s.append(time.perf_counter())
                        text.update(piece.encode())
            answer.digest = text.hexdigest()
