"""`faser serve` and `faser reload`.

`faser serve` checks the options, starts Triton and the OpenAI server, watches both, and drains on a signal.
`faser reload` lets Triton load model `tensorrt_llm` a second time, with another engine directory. New requests go to
the new engine once it is ready, and the old engine closes after its last answer. Until then both are in memory.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from faser_backend.core.config import EngineConfig
from faser_backend.core.decision import WHOLE
from faser_backend.core.errors import ConfigError
from faser_backend.manifest import EngineManifest, read_manifest_fields
from faser_backend.policy.registry import make_policy
from faser_backend.serving.compose import served_models, serving_knowledge
from faser_backend.serving.loading import LOADING_FILE, shown_phases
from faser_backend.serving.model_source import demo_engine_dir
from faser_backend.serving.parameters import ServeOptions, given_parameters
from faser_backend.serving.processes import die_with_parent, ending
from faser_backend.serving.request_reports import line_logger
from faser_backend.serving.runtimes import check_device
from faser_backend.triton.launch_folder import HangWatch
from faser_backend.triton.link import socket_path
from faser_backend.triton.model_configs import CONTRACTS
from faser_backend.triton.server import DRAIN_S, ENGINE_MODEL, ERROR_REPLY_S, Administration, TritonServer, wait_for_end

DIRECTORY_KEY, LOAD_KEY = "gpt_model_path", "loaded_at"
OPENAI_START_S = 30.0
WATCH_S = 0.5  # between two checks of the processes


def check_engine(engine_dir: Path | None, config: EngineConfig) -> Path:
    """Returns the directory to serve, the demo pair's by default, checked before a server starts. Raises FaserError."""
    directory = engine_dir or demo_engine_dir()
    manifest = EngineManifest.load(directory)
    check_device(manifest.runtime)
    models = served_models(manifest, config)
    drafts_apart = models.draft is not None and not models.draft.spec.reads_target
    split = WHOLE if drafts_apart else None  # only devices list the real splits
    make_policy(config, lambda: serving_knowledge(directory, manifest, config), split)
    return directory


def serve_until_signalled(
    options: ServeOptions, parameters: Mapping[str, str], *, log_format: str = "text", openai: list[str] | None = None
) -> int:
    """Runs the server until SIGINT, SIGTERM or its own end. Returns the exit status, as docs/operating.md lists them.

    parameters: as in TritonServer. log_format: of the lines on stderr.
    openai: the command of the OpenAI server, which listens before Triton is ready and drains before it.
    """
    log = line_logger(log_format)
    is_signalled = threading.Event()
    signals: list[int] = []

    def note(number: int, _: object) -> None:
        signals.append(number)
        is_signalled.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    with TritonServer(options, parameters) as server, contextlib.ExitStack() as stack:
        phases = stack.enter_context(shown_phases(None if log_format == "text" else partial(log, "INFO")))
        loading = stack.enter_context((server.log_file.parent / LOADING_FILE).open("a+"))  # to which the engine writes
        openai_server = None
        if openai is not None:
            phases.begin("starting OpenAI's API")
            openai_server = OpenAIProcess(openai)
            stack.callback(openai_server.stop, is_hurried=lambda: True)
            openai_server.wait_for_line(should_stop=is_signalled.is_set)
        phases.begin(f"starting Triton Inference Server, log in {server.log_file}")

        def is_over() -> bool:
            for line in loading:
                phases.begin(line.strip())
            return is_signalled.is_set()

        server.wait_ready(should_stop=is_over)
        if openai_server is not None and not is_signalled.is_set():
            openai_server.connect(server.process.pid, should_stop=is_signalled.is_set)
        phases.end()
        is_started = not is_signalled.is_set()
        if is_started:
            print(_ready_line(options, openai_server), flush=True)
        models = server.model_processes()
        watch = HangWatch(server.log_file.parent.name, options.hang_timeout)
        while not is_signalled.wait(WATCH_S):
            _kill_hung(watch, server, openai_server, log)
            if openai_server is not None and openai_server.process.poll() is not None:
                log("ERROR", f"the OpenAI server ended with status {openai_server.process.returncode}")
                return 1
            before, models = models, server.model_processes()
            gone = [pid for pid in before if before[pid] not in models.values()]  # a replaced engine's process may end
            if server.process.poll() is None and not gone:
                continue
            if gone:
                # Triton would stay ready and let the requests of this model hang. A supervisor restarts `faser serve`.
                died = f"the process of model {before[gone[0]]!r} ended{ending(gone[0])}"
                reason = f"{died}; the server ends, log:\n{server.failure_reason()}"
                time.sleep(ERROR_REPLY_S)
                server.kill()
            else:
                reason = f"Triton ended with status {server.process.returncode}: {server.failure_reason()}"
            log("ERROR", reason)
            return 1
        log("INFO", "draining; a second signal ends at once" if is_started else "interrupted before it was ready")
        server.refuse()
        if openai_server is not None:
            openai_server.stop(is_hurried=lambda: len(signals) > 1)
        server.stop(is_hurried=lambda: len(signals) > 1)
    return 0 if is_started else 128 + signals[0]


def _ready_line(options: ServeOptions, openai_server: OpenAIProcess | None) -> str:
    names = {"HTTP": options.http_port, "gRPC": options.grpc_port, "metrics": options.metrics_port}
    ports = ", ".join(f"{name} {options.host}:{port}" for name, port in names.items())
    line = f"ready: {ports}; models {', '.join(CONTRACTS[options.contract])}"
    return line if openai_server is None else f"{line}; {openai_server.address}"


def _kill_hung(
    watch: HangWatch, server: TritonServer, openai_server: OpenAIProcess | None, log: Callable[[str, str], None]
) -> None:
    """Kills processes without progress; the caller then sees a dead process and ends the server."""
    names = {pid: f"model {model!r}" for pid, model in server.model_processes().items()}
    names[server.process.pid] = "Triton"
    if openai_server is not None:
        names[openai_server.process.pid] = "the OpenAI server"
    for pid, seconds in watch.hung(names).items():
        log("ERROR", f"the process of {names[pid]} has made no progress for {seconds:.0f} s; it is killed")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class OpenAIProcess:
    """A process of `faser openai`. It prints a line once it listens, and one once it has reached the engine."""

    def __init__(self, command: list[str]) -> None:
        self.address = ""
        self._engine_socket = socket_path(os.getpid())  # not by Triton's id: until it is ready, it may start again
        self._engine_socket.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [*command, f"--engine-socket={self._engine_socket}"],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches `faser serve`, which then drains it once
            preexec_fn=die_with_parent,  # noqa: PLW1509 - one system call, no lock and no allocation
        )

    def connect(self, server_pid: int, *, should_stop: Callable[[], bool]) -> None:
        """Lets it reach the engine of this Triton server, and waits until it has."""
        self._engine_socket.symlink_to(socket_path(server_pid))
        self.wait_for_line(should_stop=should_stop)

    def wait_for_line(self, *, should_stop: Callable[[], bool]) -> None:
        """Raises ConfigError if it ends or prints nothing in OPENAI_START_S. Its own error goes to stderr."""
        assert self.process.stdout is not None
        deadline_s = time.monotonic() + OPENAI_START_S
        while not should_stop() and time.monotonic() < deadline_s:
            if select.select([self.process.stdout], [], [], 0.2)[0]:
                if not (line := self.process.stdout.readline().strip()):
                    break
                self.address = self.address or line
                return
        if not should_stop():
            raise ConfigError("the OpenAI server did not start; its error is above")

    def stop(self, *, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Drains the server: it refuses new requests. Kills it after DRAIN_S, or once is_hurried returns true."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            wait_for_end(self.process, DRAIN_S, is_hurried)
        self.process.kill()
        self.process.wait()
        self._engine_socket.unlink(missing_ok=True)


def reload_engine(admin: Administration, engine_dir: Path, timeout_s: float, lora: Sequence[str] | None = None) -> Path:
    """Loads this directory into the server, with other options unchanged. Returns the directory that it replaces.

    lora: adapters instead of those that are loaded; None: the same. Raises ManifestError or ConfigError if the
    directory does not fit, and AdminError if the server refuses it. After an error the old engine keeps serving.
    """
    config = admin.config(ENGINE_MODEL)
    parameters = given_parameters(config)
    served = parameters.get(DIRECTORY_KEY)
    if served is None:
        raise ConfigError(f"model {ENGINE_MODEL} has no {DIRECTORY_KEY}: its configuration names no directory")
    new = check_engine(engine_dir, EngineConfig.from_parameters(parameters))
    # The OpenAI server and clients keep sending the old ids, so another vocabulary needs another server.
    old_hash, new_hash = (str(read_manifest_fields(each).get("vocab_hash"))[:12] for each in (Path(served), new))
    if old_hash != new_hash:
        limit = f"vocabulary {new_hash} differs from the running engine's, {old_hash}; start another server for it"
        raise ConfigError(f"--engine-dir = {new}: {limit}")
    config["parameters"][DIRECTORY_KEY] = {"string_value": str(new.resolve())}
    if lora is not None:
        config["parameters"]["lora"] = {"string_value": "\n".join(lora)}
    config["parameters"][LOAD_KEY] = {"string_value": str(time.time_ns())}  # Triton ignores an unchanged configuration
    admin.load(ENGINE_MODEL, config, timeout_s)
    return Path(served)
