"""Reads whole files that users give: only regular files, up to a size limit.

A pipe or a device could block the reader for ever or never end, and deeply nested JSON would raise RecursionError. All
such cases become a FileError.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faser_backend.core.errors import FaserError

MAX_JSON_BYTES = 256 << 20  # the largest tokenizers of public models take some 40 MB
MAX_NAME_BYTES = 255  # the limit of common file systems


class FileError(FaserError):
    """An error for a file that cannot be read. The message is the path, then `reason`."""

    def __init__(self, path: Path, reason: str, *, is_missing: bool = False) -> None:
        super().__init__(f"{shown(path)}: {reason}")
        self.reason = reason
        self.is_missing = is_missing


def shown(path: Path | str) -> str:
    """Returns a path for messages, shortened to its end if it is very long."""
    text = str(path).encode(errors="replace").decode()
    return text if len(text) <= 300 else f"...{text[-100:]}"


Check = Callable[[os.stat_result], None]  # of the opened file, before it is read


def read_text(path: Path, max_bytes: int = MAX_JSON_BYTES, check: Check = lambda status: None) -> str:
    """Returns the UTF-8 text of a regular file, or of a link to one. Raises FileError, and what `check` raises."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            _check(path, status := os.fstat(descriptor), max_bytes)
            check(status)
            content = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise FileError(path, "missing", is_missing=True) from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        raise FileError(path, f"not readable ({getattr(error, 'strerror', None) or error})") from None
    if len(content) > max_bytes:  # the file grew, or its file system reports no size
        raise FileError(path, f"must be at most {max_bytes} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise FileError(path, f"not readable as UTF-8 text ({error.reason} at byte {error.start})") from None


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Returns the value in a JSON file. Raises FileError."""
    text = read_text(path, max_bytes)
    try:
        return json.loads(text)
    except RecursionError:
        raise FileError(path, "not readable as JSON (nested too deeply)") from None
    except ValueError as error:
        raise FileError(path, f"not readable as JSON ({error})") from None


def check_regular(path: Path) -> None:
    """Checks a file that a library will open. Raises FileError if it is missing or not a regular file."""
    try:
        _check(path, path.stat(), None)
    except FileNotFoundError:
        raise FileError(path, "missing", is_missing=True) from None
    except (OSError, ValueError) as error:
        raise FileError(path, f"not readable ({getattr(error, 'strerror', None) or error})") from None


def check_room(directory: Path, num_bytes: int, what: str) -> None:
    """Raises FileError if `directory`, which need not exist yet, has no room for `num_bytes` of `what`."""
    place = directory.absolute()
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise FileError(place, os.strerror(errno.EEXIST))
    is_writable = os.access(place, os.W_OK | os.X_OK) and not os.statvfs(place).f_flag & os.ST_RDONLY
    if not is_writable or os.statvfs(place).f_files == 0 == os.statvfs(place).f_blocks:  # the last: /proc etc.
        raise FileError(directory, f"{shown(place)} cannot be written to")
    free = shutil.disk_usage(place).free
    if free < num_bytes:
        raise FileError(directory, f"{num_bytes} bytes of disk are needed for {what}, {free} are free")


def _check(path: Path, found: os.stat_result, max_bytes: int | None) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise FileError(path, "not readable (Is a directory)")
    if not stat.S_ISREG(found.st_mode):
        raise FileError(path, "must be a regular file, or a link to one")
    if max_bytes is not None and found.st_size > max_bytes:
        raise FileError(path, f"{found.st_size} bytes: must be at most {max_bytes}")
