"""Models by name: finds, downloads and builds what `faser serve MODEL` and its `--draft` name.

A name is an engine directory, a checkpoint directory, a GGUF file, or a model of the Hugging Face hub:
`org/name[@revision]`, with `:file.gguf` for one file. `huggingface_hub` downloads, with its cache, token and mirrors.

Engines are kept in a folder per user. Their names have a digest of the checkpoints, the builder's version and the
runtime, so a changed checkpoint or an upgrade builds another. Of two processes at once, one builds and the other waits.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, get_args

from faser_backend.core.config import DEFAULT_POLICY, DraftSource
from faser_backend.core.errors import ConfigError, ManifestError
from faser_backend.files import FileError, check_room, read_json, shown
from faser_backend.manifest import FORMAT_VERSION, MANIFEST_FILE, EngineManifest, file_sha256
from faser_backend.places import DEMO_PAIR, GPU_DEVICE, data_folder
from faser_backend.runtime_spec import DEFAULT_RUNTIME, RUNTIMES
from faser_backend.serving.loading import log, shown_phases, size_text
from faser_backend.serving.parameters import RunOptions
from faser_backend.serving.processes import die_with_parent
from faser_backend.serving.request_reports import line_logger
from faser_backend.version import VERSION

HUB_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([^:]+))?(?::(.+\.gguf))?")
# Other folders and files hold copies of the weights in other layouts.
HUB_FILES = {"allow_patterns": ["*.json", "*.jinja", "*.safetensors"], "ignore_patterns": ["*/*", "consolidated*"]}
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
HEADS = {"smollm2-135m-instruct": "smollm2-head"}  # in `models`, by a part of the target's name
SUFFIXES = {".json", ".jinja", ".safetensors", ".gguf"}  # of the files that a build may read
MIN_FREE_BYTES = 1 << 20  # of the cache folder, even if nothing is built; a build checks for more
REMEDY = "set FASER_CACHE to a folder that can be written to, or give --engine-dir"
RECORD_FILE = "built_from.json"  # in an engine's folder, written on each use: the names of its checkpoints
PROFILE_S = 30  # about


class Source(NamedTuple):
    """A checkpoint to build from."""

    name: str  # as the user calls it
    path: Path
    digest: str  # differs for other content
    blobs: tuple[Path, ...] = ()  # weights in the hub's cache, to be checked before a build


class _NoEngineYet(ConfigError):
    """A policy asked for its engine's profile."""


def find_engine(
    run: RunOptions, log_format: str = "text", *, policy: str = DEFAULT_POLICY, **build: Any
) -> dict[str, Any]:
    """Returns the options engine_dir (None: the demo pair's) and draft; downloads and builds. Raises FaserError.

    policy: checked before, without the engine's profile. build: options of `build_engines`, for a model that is built.
    """
    path, is_source = Path(os.path.expanduser(run.model or "")), run.draft not in get_args(DraftSource)
    if run.model is not None and run.engine_dir is not None:
        raise ConfigError(f"--engine-dir = {run.engine_dir}: MODEL = {run.model!r} is given too")
    if run.model is None or (path / MANIFEST_FILE).is_file():
        for name, value in (build | ({"draft": run.draft} if is_source else {})).items():
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} = {value!r}: an engine is built already; name a checkpoint as MODEL")
        return {"engine_dir": run.engine_dir if run.model is None else path, "draft": run.draft}
    from faser_backend.policy.registry import parse_policy  # loads numpy

    def load_knowledge() -> NoReturn:
        raise _NoEngineYet

    with suppress(_NoEngineYet):
        parse_policy(policy, load_knowledge)
    has_gpu = GPU_DEVICE.exists() and find_spec("torch") is not None
    build = {"runtime": "torch" if has_gpu else DEFAULT_RUNTIME} | build
    head = next((data_folder() / "models" / head for name, head in HEADS.items() if name in run.model.lower()), None)
    with shown_phases(None if log_format == "text" else partial(line_logger(log_format), "INFO")):
        target, drafting = _open_source("MODEL", run.model), None
        if is_source:
            drafting = _open_source("--draft", run.draft)
        elif head is None and run.draft in ("model", "model+ngram"):
            raise ConfigError(f"--draft = {run.draft!r}: {run.model} has no head here; name a draft model")
        elif run.draft != "ngram" and head is not None:
            if head.is_dir():
                drafting = local_source(head.name, head)
            else:
                log.warning(f"{head}: a checkout alone has this head of {run.model}; without it, n-grams draft")
        return {"engine_dir": cached_engine(target, drafting, **build), "draft": "auto" if is_source else run.draft}


def shown_name(model: str) -> str:
    """Returns the name of a model for people: a file's or folder's own, or the hub's."""
    return Path(model).name.removesuffix(".gguf") if Path(os.path.expanduser(model)).exists() else model


def demo_engine_dir(*, pair: Path = DEMO_PAIR) -> Path:
    """Returns the directory of the demo pair's engine, built on first use. Raises ConfigError if there is no pair."""
    for path in (pair / "target" / "config.json", pair / "draft" / "config.json"):
        if not path.is_file():
            raise ConfigError(f"{path}: the demo pair is missing; give an engine directory (--engine-dir)")
    target, draft = (local_source("demo", pair / side) for side in ("target", "draft"))
    return cached_engine(target, draft, is_profiled=False)


def _open_source(option: str, name: str) -> Source:
    """Returns the checkpoint of this name, downloaded if it is a hub's. Raises ConfigError that names the option."""
    path = Path(os.path.expanduser(name))  # Path.expanduser raises an error for an unknown ~user
    if path.exists():
        return local_source(name, path)
    match = HUB_NAME.fullmatch(name)
    try:
        if match is None:
            raise ConfigError("no such file or directory, and no model of a hub, as org/name[@revision][:file.gguf]")
        repository, revision, file = match.groups()
        folder = _download(name, repository, revision, file)
        weights = [folder / file] if file else [*folder.glob("*.safetensors")]
        if not weights or not weights[0].is_file():
            raise ConfigError(f"the repository has no {file or 'safetensors; for a GGUF file, add :file.gguf'}")
    except ConfigError as error:
        raise ConfigError(f"{option} = {shown(name)!r}: {error}") from None
    return Source(name, weights[0] if file else folder, f"{repository} {folder.name} {file}", tuple(weights))


def _download(name: str, repository: str, revision: str | None, file: str | None) -> Path:
    """Returns the folder of a commit in the hub's cache, which is named by it. Raises ConfigError with the reason."""
    from huggingface_hub import constants, errors, snapshot_download
    from huggingface_hub.utils import logging
    from tqdm.auto import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"file": io.StringIO(), "leave": False})

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if msg is None and self.unit == "B" and self.total:  # closing a bar shows an empty text
                log.info(f"downloading {name}: {size_text(self.n)} of {size_text(self.total)}")

    logging.set_verbosity_error()  # errors are reported below
    files: dict[str, Any] = {"allow_patterns": file} if file else HUB_FILES
    try:
        return Path(snapshot_download(repository, revision=revision, tqdm_class=Bar, **files))
    except errors.GatedRepoError:
        reason = f"access is restricted: ask for it at {constants.ENDPOINT}/{repository}, then {LOG_IN}"
    except errors.RepositoryNotFoundError:
        reason = f"no such file, and {constants.ENDPOINT} has no such repository, or a private one: {LOG_IN}"
    except errors.RevisionNotFoundError:
        reason = f"the repository has no revision {revision}"
    except (OSError, ValueError, errors.HTTPError) as error:  # pyright: ignore[reportPrivateImportUsage]
        remedy = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "start again to go on with the download"
        reason = f"not downloaded ({(str(error) or type(error).__name__).splitlines()[0]}); {remedy}"
    raise ConfigError(reason)


def local_source(name: str, path: Path) -> Source:
    """Returns a checkpoint on this disk. Its hash is stored, and is valid while no file's size or times change."""
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
    states = [(file.name, file.stat().st_size, file.stat().st_ino, file.stat().st_ctime_ns) for file in files]
    stored = cache_folder() / "hashes" / hashlib.sha256(repr((path.resolve(), states)).encode()).hexdigest()
    if not stored.exists():
        log.info(f"hashing {path}")
        hashes = "".join(f"{file.name} {file_sha256(file)}\n" for file in files)
        stored.parent.mkdir(exist_ok=True)
        temporary = stored.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        temporary.write_text(hashlib.sha256(hashes.encode()).hexdigest())
        temporary.rename(stored)
    return Source(name, path, stored.read_text())


def cached_engine(
    target: Source, draft: Source | None, runtime: str = DEFAULT_RUNTIME, *, is_profiled: bool = True, **build: Any
) -> Path:
    """Returns the directory of the checkpoints' engine; builds it, and measures a quick profile, unless it is there.

    build: options of `build_engines`, which refuses an unknown runtime.
    """
    cache, sources = cache_folder(), [target] if draft is None else [target, draft]
    build = {"dtype": "fp32" if RUNTIMES.get(runtime, RUNTIMES[DEFAULT_RUNTIME]).is_cpu else "bf16"} | build
    inputs = repr((VERSION, FORMAT_VERSION, runtime, [source.digest for source in sources], *sorted(build.items())))
    digest = hashlib.sha256(inputs.encode()).hexdigest()[:16]
    title = re.sub(r"[^\w.]+", "-", shown_name(target.name).rpartition("/")[2]).strip(".-")[:80] or "model"
    directory = next(cache.glob(f"*-{digest}"), cache / f"{title}-{digest}")
    with (cache / f"{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released with the file, also when the process dies
        try:
            manifest = EngineManifest.load(directory)
            manifest.verify_weights(directory)
        except ManifestError:
            from faser_backend.engines.build import build_engines  # build-time code, imported only if needed

            for file in (*target.blobs, *(draft.blobs if draft else ())):
                _check_blob(file)
            for left in cache.glob(f".{directory.name}.*"):  # of killed builds: this process holds the lock
                shutil.rmtree(left, ignore_errors=True)
            step = f"building the engine for {runtime}, {build['dtype']}"
            manifest = build_engines(
                target.path,
                draft and draft.path,
                directory,
                runtime=runtime,
                progress=lambda what, done, total: log.info(f"{step}: {done}/{total} {what}"),
                **build,
            )
        (directory / RECORD_FILE).write_text(json.dumps([source.name for source in sources]))
        if is_profiled:
            _ensure_profile(directory, manifest)
    return directory


def cache_folder(num_bytes: int = MIN_FREE_BYTES) -> Path:
    """Returns the folder of engines, made if needed. Raises ConfigError if num_bytes cannot be written to it."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache = Path(os.environ.get("FASER_CACHE") or Path(base, "faser", "engines"))
    try:
        if cache.parts[0] == "~":
            raise FileError(cache, "this user has no home directory")
        cache.mkdir(parents=True, exist_ok=True)
        check_room(cache, num_bytes, "engines")
    except (OSError, FileError) as error:
        raise ConfigError(f"{cache}: {getattr(error, 'strerror', None) or error}; {REMEDY}") from None
    return cache


def _check_blob(file: Path) -> None:
    """Checks weights in the hub's cache by their hash, which names them. Removes damaged ones; raises ConfigError."""
    blob = file.resolve()
    if len(blob.name) == 64 and file_sha256(blob) != blob.name:  # small files have git's hashes
        blob.unlink()
        file.unlink()
        raise ConfigError(f"{file}: damaged, and removed; start again to download it again")


def _ensure_profile(directory: Path, manifest: EngineManifest) -> None:
    """Measures a profile in a process of its own, which pins threads, unless this machine has one."""
    from faser_backend.serving.profile_store import load_profile  # loads numpy and policies

    with suppress(ConfigError):
        load_profile(directory, manifest)
        return
    log.info("profiling")
    command = [sys.executable, "-m", "faser_backend.cli", "profile", directory, "--quick", f"--budget-s={PROFILE_S}"]
    line = ""
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, preexec_fn=die_with_parent) as process:  # noqa: PLW1509 - as in triton
        for line in process.stderr or ():
            log.info(f"profiling: {line.partition(' s  ')[2].strip() or '...'}")
    if not process.returncode:
        for warning in load_profile(directory, manifest).warnings:
            log.warning(warning)
    else:
        log.warning(f"no profile was measured ({line.strip()}): costs are guesses; run `faser profile {directory}`")


def list_engines() -> dict[str, str]:
    """Returns size and checkpoints of the cached engines in words, by name, the last used first."""
    found = {}
    for record in sorted(cache_folder(0).glob(f"*/{RECORD_FILE}"), key=lambda path: -path.stat().st_mtime):
        size = sum(file.stat().st_size for file in record.parent.iterdir())
        names = "checkpoints unknown"
        with suppress(FileError):  # a full disk has cut it
            names = " with draft ".join(read_json(record))
        found[record.parent.name] = f"{size / 1e6:.0f} MB, {names}"
    return found


def remove_engines(names: list[str]) -> None:
    """Removes cached engines by name, or ["all"] and what killed builds left.

    Raises ConfigError for an unknown one, and in the end for those that other processes are building or checking.
    """
    cache, known, busy = cache_folder(0), list_engines(), list[str]()
    if names == ["all"]:
        names = [*known, *(left.name for end in ("partial", "retired") for left in cache.glob(f".*.{end}"))]
    elif unknown := [name for name in names if name not in known]:
        raise ConfigError(f"{unknown[0]}: no such engine in {cache}; `faser cache list` lists them")
    for name in names:
        engine = name if name in known else name[1:].rsplit(".", 2)[0]  # a build's folder is .ENGINE.random.partial
        with (cache / f"{engine}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(cache / name, ignore_errors=name not in known)
            except BlockingIOError:
                busy.append(engine)
    if busy:
        raise ConfigError(f"{', '.join(dict.fromkeys(busy))}: not removed: another process is building or checking it")
