"""Launches Triton Inference Server over a copy of model_repo, and calls its administration over HTTP.

The server comes from nvidia-pytriton's wheel, or from PATH (NVIDIA's container). The copy in a temporary folder holds
the chosen parameters and transaction policy, so neither site-packages nor the checkout is written to.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from faser_backend.core.errors import ConfigError, FaserError
from faser_backend.places import GPU_DEVICE, MODEL_REPO, MODEL_REPO_LLMAPI, PACKAGES
from faser_backend.serving.parameters import KEY_HEADER, ServeOptions, check_host, grpc_tls_options, restriction_options
from faser_backend.serving.processes import arguments, children, die_with_parent, is_running
from faser_backend.serving.request_reports import JSON_START, forward_options
from faser_backend.triton.launch_folder import DRAIN_FILE, LaunchFolder, clear_shared_memory, drained_file
from faser_backend.triton.model_configs import known_keys, launch_text

_RAISED = re.compile(r"TritonModelException: (.*?)(?:\n\nAt:|;?\n|$)", re.DOTALL)


class AdminError(FaserError):
    """The server refuses a call, or does not answer."""


class Administration:
    """A client of one server's administration. Every method raises AdminError."""

    def __init__(self, address: str, key: str) -> None:
        """address: HOST:PORT of Triton's HTTP port."""
        self._address, self._key = address, key

    def config(self, model: str) -> dict[str, Any]:
        """Returns the configuration that a model was loaded with."""
        return self._ask(f"/v2/models/{model}/config", 10.0)

    def load(self, model: str, config: dict[str, Any], timeout_s: float) -> None:
        """Loads a model. A loaded one serves until the new one is ready, and stays if loading fails."""
        self._ask(f"/v2/repository/models/{model}/load", timeout_s, {"parameters": {"config": json.dumps(config)}})

    def unload(self, model: str, timeout_s: float) -> None:
        """Makes a model not ready. It finishes its requests."""
        self._ask(f"/v2/repository/models/{model}/unload", timeout_s, {})

    def _ask(self, path: str, timeout_s: float, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://{self._address}{path}", data, {KEY_HEADER: self._key})
        try:
            return json.loads(fetch(request, timeout_s) or "null")
        except urllib.error.HTTPError as error:
            raise AdminError(_reason(error)) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise AdminError(f"{self._address}: Triton's HTTP port does not answer ({reason})") from None


def fetch(request: urllib.request.Request | str, timeout_s: float) -> bytes:
    """Returns what this server answers, asked without a proxy, as a key is for it alone. Raises what urllib raises."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout_s) as answer:
        return answer.read()


def _reason(error: urllib.error.HTTPError) -> str:
    """Returns the error that a model raised, else Triton's."""
    text = error.read().decode(errors="replace")
    try:
        message = str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        message = text.strip() or f"status {error.code}"
    if error.code == 403:
        return f"the server refuses the admin key ({message})"
    raised = _RAISED.search(message)
    return raised[1].strip() if raised else message


REPOSITORIES = {"inflight_batcher": MODEL_REPO, "llmapi": MODEL_REPO_LLMAPI}
PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
PYTHON_LIBRARY = f"libpython{PYTHON_VERSION}.so.1.0"
DRAIN_S = 60.0  # time for requests in flight to end
UNLOAD_S = 4.0  # time for Triton to end after the last answer; an open stream of an idle client would keep it running
ERROR_REPLY_S = 0.5  # time for frontends to answer requests of a dead process with an error
DRAIN_POLL_S = 0.05
MAX_LOG_BYTES = 64 << 20  # of the server's log, which then begins again
UNLOAD_CALL_S = 2.0
ENGINE_MODEL = "tensorrt_llm"
LOCK_ERROR = "boost::interprocess::lock_exception"  # a race in Triton's Python backend, at times twice in a row
SPARE_MODEL = "postprocessing"  # which no answer needs
_MODEL_PROCESS = "triton_python_backend_stub"


@dataclass(frozen=True, slots=True)
class TritonInstall:
    """A Triton server on this machine. `backends` and `stub` are None if the server finds its own."""

    binary: Path
    backends: Path | None = None
    stub: Path | None = None
    libraries: tuple[Path, ...] = ()


def find_triton() -> TritonInstall:
    """Finds nvidia-pytriton's server, else one on PATH. Raises ConfigError that says what to install."""
    spec = importlib.util.find_spec("pytriton")
    if spec is not None and spec.submodule_search_locations:
        package = Path(spec.submodule_search_locations[0])
        home = package / "tritonserver"
        stub = home / "python_backend_stubs" / PYTHON_VERSION / "triton_python_backend_stub"
        if not stub.is_file():
            raise ConfigError(f"{stub}: nvidia-pytriton has no stub for Python {PYTHON_VERSION}")
        libraries = (package.parent / "nvidia_pytriton.libs", *_python_library_folder())
        return TritonInstall(home / "bin" / "tritonserver", home / "backends", stub, libraries)
    for candidate in (shutil.which("tritonserver"), "/opt/tritonserver/bin/tritonserver"):
        if candidate and Path(candidate).is_file():
            return TritonInstall(Path(candidate))
    raise ConfigError("no Triton Inference Server: pip install nvidia-pytriton==0.7.0, or put tritonserver on PATH")


def check_stub() -> None:
    """Raises ConfigError if the stub could not load the interpreter's library, or would crash in its first request."""
    if int(np.__version__.split(".")[0]) != 1:
        raise ConfigError(f"numpy {np.__version__}: Triton's Python stub needs numpy 1: pip install 'numpy<2'")
    if _python_library_folder():
        return
    try:
        ctypes.CDLL(PYTHON_LIBRARY)
    except OSError:
        package = f"libpython{PYTHON_VERSION}"
        raise ConfigError(f"Triton's Python stub needs {PYTHON_LIBRARY}: apt-get install {package}") from None


def check_ports(host: str, ports: dict[str, int]) -> None:
    """Raises ConfigError for the first port that is out of range, given twice or already in use."""
    seen: dict[int, str] = {}
    for name, port in ports.items():
        if not 1 <= port <= 65535:
            raise ConfigError(f"{name} = {port}: must lie in [1, 65535]")
        if port in seen:
            raise ConfigError(f"{name} = {port}: is the same as {seen[port]}")
        seen[port] = name
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise ConfigError(f"{name}: port {port} in use on {host} ({error.strerror}); choose another") from None


def claim_ports(host: str, ports: dict[str, int]) -> contextlib.ExitStack:
    """Claims ports until the stack is closed. Raises ConfigError if another `faser serve` has claimed one.

    A server listens only when its models are loaded. If two start on the same ports, one fails in the end, but until
    then it would take the other's answers for its own and say that it is ready.
    """
    with contextlib.ExitStack() as claims:
        for name, port in ports.items():
            try:
                claims.enter_context(socket.socket(socket.AF_UNIX)).bind(f"\0faser-serve {host} {port}")
            except OSError:
                limit = f"another faser serve has started on {host}; choose another"
                raise ConfigError(f"{name} = {port}: {limit}") from None
        return claims.pop_all()


class TritonServer(contextlib.AbstractContextManager["TritonServer"]):
    """One server process and its launch folder. Use as a context manager, or call `stop`."""

    def __init__(self, options: ServeOptions, parameters: Mapping[str, str] = MappingProxyType({})) -> None:
        """Starts the process. Raises ConfigError if it cannot be started with these options.

        parameters: of the model configurations, by their names or by the keys that fill them.
        """
        self.options = options
        check_host(options.host, is_exposed=options.expose_triton)
        install = find_triton()
        check_stub()
        check_ports(options.host, options.ports)
        self._claims = claim_ports(options.host, options.ports)
        self._launch_folder = LaunchFolder()
        self._folder = self._launch_folder.path
        self.log_file = self._folder / "tritonserver.log"
        try:
            repository, copy = REPOSITORIES[options.contract], self._folder / "model_repo"
            write_launch_copy(repository, copy, parameters, is_decoupled=options.decoupled)
            self._command = server_command(install, self._folder, options, has_tracing="otlp_endpoint" in parameters)
            self._environment = server_environment(install)
            self._is_ready, self._drain_end_s = False, 0.0
            self.num_starts = 0
            self._start()
        except BaseException as error:
            self._launch_folder.remove()
            self._claims.close()
            if isinstance(error, OSError):
                raise ConfigError(f"the server cannot be started: {error.strerror}: {error.filename}") from None
            raise

    def _start(self) -> None:
        self.num_starts += 1
        self.process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment,
            start_new_session=True,  # Ctrl-C reaches this process, which then drains the server once
            preexec_fn=die_with_parent,  # noqa: PLW1509 - one system call, no lock and no allocation
        )
        self._reader = threading.Thread(target=self._read_log, name="server-log", daemon=True)
        self._reader.start()

    def wait_ready(self, *, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Waits until the server is ready, or until should_stop returns true.

        Raises ConfigError with the reason from the log if the server ends, or takes longer than --start-timeout.
        """
        timeout_s = self.options.start_timeout
        url = f"http://{self.options.host}:{self.options.http_port}/v2/health/ready"
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s and not should_stop():
            if self.process.poll() is not None:
                reason = self.failure_reason()
                if LOCK_ERROR not in self.log_file.read_text(errors="replace") or self.num_starts > 3:
                    raise ConfigError(f"the server did not start: {reason}")
                self._end_group()  # some model processes may still start
                clear_shared_memory(self._folder.name)
                self._start()
            try:
                fetch(url, 1.0)
                self._is_ready = True
                return
            except OSError:
                time.sleep(0.1)
        if not should_stop():
            raise ConfigError(f"not ready within --start-timeout {timeout_s:.0f} s: {self.failure_reason()}")

    def failure_reason(self) -> str:
        """Returns the engine's own error if the log has one, else the end of the log."""
        self._reader.join(0.5)  # reads the last lines of a server that has ended
        lines = self.log_file.read_text(errors="replace").splitlines() if self.log_file.is_file() else []
        for line in [] if self._is_ready else lines:  # later errors may be those of a failed reload
            if re.search("failed to load 'tensorrt_llm'", line) or "TritonModelException" in line:
                return line.split("TritonModelException: ")[-1].partition(r"\n\nAt:")[0].strip()
        return "\n".join(lines[-25:]) or "it wrote no log"

    def model_processes(self) -> dict[int, str]:
        """Returns the running models by process id. Each model is a process."""
        found = {pid: arguments(pid) for pid in children(self.process.pid)}
        return {
            pid: Path(command[1]).parts[-3]
            for pid, command in found.items()
            if command and command[0].endswith(_MODEL_PROCESS)
        }

    def refuse(self) -> None:
        """Refuses new requests, and fails probes of readiness, if the server is ready. A second call does nothing."""
        if not self._is_ready:
            return
        with contextlib.suppress(OSError, AdminError):  # the file exists, or a full disk: end without draining
            (self._folder / DRAIN_FILE).touch(exist_ok=False)
            self._drain_end_s = time.monotonic() + DRAIN_S
            if self.options.admin_key_file is not None:  # models can be unloaded, which `/v2/health/ready` shows
                address = f"{self.options.host}:{self.options.http_port}"
                Administration(address, self.options.admin_key).unload(SPARE_MODEL, UNLOAD_CALL_S)

    def stop(self, *, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Refuses new requests, answers those in flight, and ends the server.

        Kills it DRAIN_S after `refuse`, or once is_hurried returns true. The engine drains first, because Triton alone
        does not: it unloads a decoupled model before its last answers, and can wait for ever for a cancelled request.
        """
        if self.process.poll() is None:
            models = self.model_processes()
            self.refuse()
            left_s = self._drain_end_s - time.monotonic()
            wait_for_end(self.process, left_s, lambda: self._is_drained(models) or is_hurried())
            (self._folder / DRAIN_FILE).unlink(missing_ok=True)
            self.process.send_signal(signal.SIGTERM)
            wait_for_end(self.process, UNLOAD_S, is_hurried)
        self.kill()

    def _is_drained(self, models: dict[int, str]) -> bool:
        """Returns whether every engine has answered its requests, or a model that could answer has ended."""
        engines = [pid for pid, model in models.items() if model == ENGINE_MODEL]
        others = [pid for pid, model in models.items() if model not in (ENGINE_MODEL, SPARE_MODEL)]
        if not all(map(is_running, others)):
            return True
        return all(drained_file(self._folder, pid).exists() or not is_running(pid) for pid in engines)

    def kill(self) -> None:
        """Ends the server and every process of its group at once."""
        self._end_group()
        self._launch_folder.remove()
        self._claims.close()

    def _end_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(5.0)

    def _read_log(self) -> None:
        assert self.process.stdout is not None
        with self.log_file.open("wb", buffering=0) as log:
            for line in map(with_own_lines, self.process.stdout):
                # Keep reading after errors: a server blocks when the pipe of its log is full.
                with contextlib.suppress(OSError):
                    if log.tell() > MAX_LOG_BYTES:
                        log.seek(0)
                        log.truncate()
                    log.write(line)
                if self.options.verbose:
                    with contextlib.suppress(OSError):
                        sys.stderr.buffer.write(line)
                        sys.stderr.buffer.flush()

    def __exit__(self, *exception: object) -> None:
        self.stop()


def wait_for_end(process: subprocess.Popen[Any], seconds: float, should_stop: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline_s and not should_stop():
        time.sleep(DRAIN_POLL_S)


def with_own_lines(line: bytes) -> bytes:
    """Returns a line of the log with a model's JSON on its own line. Triton writes a line and its end separately."""
    return line.replace(JSON_START, b"\n" + JSON_START).removeprefix(b"\n")


def write_launch_copy(repository: Path, target: Path, parameters: Mapping[str, str], *, is_decoupled: bool) -> None:
    """Copies the models of a contract and writes the parameters and the transaction policy into their config.pbtxt."""
    if not repository.is_dir():
        raise ConfigError(f"{repository}: no model repository here; install faser-backend again")
    for name in parameters:
        if name not in known_keys():
            raise ConfigError(f"parameter {name}: no model of {repository.name} has such a parameter")
    for model in sorted(path for path in repository.iterdir() if (path / "config.pbtxt").is_file()):
        shutil.copytree(model, target / model.name, ignore=shutil.ignore_patterns("__pycache__"))
        config = target / model.name / "config.pbtxt"
        text = config.read_text()
        config.write_text(launch_text(text, is_decoupled=is_decoupled, parameters=parameters))


def server_command(
    install: TritonInstall, folder: Path, options: ServeOptions, *, has_tracing: bool = False
) -> list[str]:
    """Returns the command line of a server over folder/model_repo."""
    command = [str(install.binary), f"--model-repository={folder / 'model_repo'}"]
    if install.backends is not None and install.stub is not None:
        backend = folder / "backends" / "python"
        backend.mkdir(parents=True)
        for file in (*(install.backends / "python").glob("[!_]*"), install.stub):
            (backend / file.name).symlink_to(file)
        command.append(f"--backend-directory={folder / 'backends'}")
    for name in ("http", "grpc", "metrics"):
        command += [f"--{name}-port={getattr(options, f'{name}_port')}", f"--{name}-address={options.host}"]
    return [
        *command,
        *restriction_options(options.admin_key, options.restrict),
        *grpc_tls_options(options.grpc_tls_cert, options.grpc_tls_key, options.grpc_tls_root),
        *(forward_options() if has_tracing else []),
        # A client that may load models can run code as this user, so this needs a key that the operator chose.
        *(["--model-control-mode=explicit", "--load-model=*"] if options.admin_key_file is not None else []),
        "--exit-on-error=true",
        f"--exit-timeout-secs={DRAIN_S:.0f}",
        "--disable-auto-complete-config",  # the files are complete; completing would start every stub twice
        "--pinned-memory-pool-byte-size=0",
        f"--backend-config=python,shm-region-prefix-name={folder.name}",
        *([] if GPU_DEVICE.exists() else ["--allow-gpu-metrics=false"]),
    ]


def server_environment(install: TritonInstall) -> dict[str, str]:
    """Returns the server's environment. Its stub finds Python's home by PATH; each model.py reads PYTHONPATH."""
    environment = dict(os.environ)

    def prepend(name: str, entries: list[str]) -> None:
        environment[name] = os.pathsep.join([*entries, *filter(None, [environment.get(name)])])

    prepend("PATH", [str(Path(sys.executable).parent)])
    prepend("PYTHONPATH", [str(PACKAGES)])
    if install.libraries:
        prepend("LD_LIBRARY_PATH", [str(folder) for folder in install.libraries])
    return environment


def _python_library_folder() -> tuple[Path, ...]:
    folder = sysconfig.get_config_var("LIBDIR")
    return (Path(folder),) if folder and (Path(folder) / PYTHON_LIBRARY).is_file() else ()
