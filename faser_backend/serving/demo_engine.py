"""Builds the demo pair's engines on first use into a per-user cache.

The folder's name is a digest of the checkpoints, the builder's version and the runtime, so a changed checkpoint or an
upgrade rebuilds it. Of two processes at once, one builds and the other waits at the lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from faser_backend.core.errors import ConfigError, ManifestError
from faser_backend.files import FileError, check_room
from faser_backend.manifest import FORMAT_VERSION, EngineManifest
from faser_backend.places import DEMO_PAIR
from faser_backend.runtime_spec import DEFAULT_RUNTIME
from faser_backend.version import VERSION

MIN_FREE_BYTES = 1 << 20  # of the cache folder, even if nothing is built; a build checks for more
REMEDY = "set XDG_CACHE_HOME to a folder that can be written to, or give --engine-dir"
_FILES = ("config.json", "model.safetensors", "tokenizer.json")
_MORE_FILES = ("generation_config.json", "tokenizer_config.json", "chat_template.jinja")  # optional files of a pair


def demo_engine_dir(
    progress: Callable[[str, int, int], None] | None = None, *, pair: Path = DEMO_PAIR, cache: Path | None = None
) -> Path:
    """Returns the directory of the pair's engines. Raises ConfigError if there is no pair to build from."""
    cache = cache or cache_folder()
    directory = cache / f"demo-{_digest(pair)[:16]}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        check_room(cache, MIN_FREE_BYTES, "the demo pair's engines")
    except OSError as error:
        raise ConfigError(f"{cache}: {error.strerror}; {REMEDY}") from None
    except FileError as error:
        raise ConfigError(f"{error}; {REMEDY}") from None
    with (cache / f"{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released with the file, also when the process dies
        try:
            EngineManifest.load(directory).verify_weights(directory)
        except ManifestError:
            from faser_backend.engines.build import build_engines  # build-time code, imported only if needed

            for left in cache.glob(f".{directory.name}.*"):  # of killed builds: this process holds the lock
                shutil.rmtree(left, ignore_errors=True)
            build_engines(pair / "target", pair / "draft", directory, runtime=DEFAULT_RUNTIME, progress=progress)
    return directory


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "faser"


def _digest(pair: Path) -> str:
    digest = hashlib.sha256(f"{VERSION} {FORMAT_VERSION} {DEFAULT_RUNTIME}".encode())
    for model in ("target", "draft"):
        for name in (*_FILES, *_MORE_FILES):
            path = pair / model / name
            if path.is_file():
                with path.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            elif name in _MORE_FILES:
                digest.update(name.encode())
            else:
                raise ConfigError(f"{path}: the demo pair is missing; give an engine directory (--engine-dir)")
    return digest.hexdigest()
