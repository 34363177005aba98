"""Limits who can reach Triton's ports and its administration.

The APIs of shared memory, model repository, trace and logging could be abused (docs/security.md), so they need a key in
a header. Inference, health, metadata, configurations and statistics need none.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import socket
import stat
from pathlib import Path

from faser_backend.core.errors import ConfigError
from faser_backend.files import FileError, read_text

RESTRICTED = ("shared-memory", "model-repository", "trace", "logging")
ALSO_RESTRICTABLE = ("metadata", "inference", "model-config", "statistics")  # health stays open, for probes
KEY_HEADER = "faser-admin-key"  # of HTTP; gRPC clients send it as metadata, with the prefix below
GRPC_PREFIX = "triton-grpc-protocol-"
MIN_KEY, MAX_KEY = 16, 256  # characters
_KEY = re.compile(rf"[A-Za-z0-9_-]{{{MIN_KEY},{MAX_KEY}}}")


def check_host(host: str, *, is_exposed: bool) -> None:
    """Raises ConfigError for a non-loopback address that was not explicitly allowed."""
    if not is_exposed and not is_loopback(host):
        raise ConfigError(
            f"--host = {host!r}: is reached from other machines, and bodies crash the HTTP port of Triton 2.51: put a "
            "proxy that limits them before 127.0.0.1, or give --expose-triton too (docs/security.md)"
        )


def is_loopback(host: str) -> bool:
    """Returns whether the address, or every address of the name, is a loopback address."""
    try:
        return all(ipaddress.ip_address(found[4][0]).is_loopback for found in socket.getaddrinfo(host, None))
    except (OSError, ValueError):
        return False


def check_address(name: str, address: str | None) -> None:
    """Raises ConfigError for an address that is not HOST:PORT. None is allowed."""
    host, _, port = (address or "x:1").rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"{name} = {address!r:.200}: must be HOST:PORT, with a port in [1, 65535]")


def read_admin_key(file: Path) -> str:
    """Reads a key from a regular file that only its owner can read. Raises ConfigError naming the file."""
    named = f"--admin-key-file = {file}"

    def check(status: os.stat_result) -> None:  # of the file that is read, not of one that has replaced it
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            found = f"mode {stat.S_IMODE(status.st_mode):04o}, owner {status.st_uid}"
            raise ConfigError(f"{named}: {found}: must belong to user {os.geteuid()} and to nobody else (chmod 600)")

    try:
        key = read_text(file, check=check).removesuffix("\n")
    except FileError as error:
        raise ConfigError(f"{named}: {error.reason}") from None
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{named}: must hold {MIN_KEY} to {MAX_KEY} letters, digits, - and _, and no more")
    return key


def random_key() -> str:
    """Returns a random key, which keeps the administration closed."""
    return secrets.token_urlsafe(32)


def restriction_options(key: str, also: tuple[str, ...] = ()) -> list[str]:
    """Returns options of tritonserver. also: entries of ALSO_RESTRICTABLE; raises ConfigError for any other."""
    for name in also:
        if name not in ALSO_RESTRICTABLE:
            raise ConfigError(f"--restrict = {name!r:.80}: must be among {', '.join(ALSO_RESTRICTABLE)}")
    rule = f"{','.join((*RESTRICTED, *also))}:{KEY_HEADER}={key}"
    return [f"--http-restricted-api={rule}", f"--grpc-restricted-protocol={rule}"]


def grpc_tls_options(cert: Path | None, key: Path | None, root: Path | None) -> list[str]:
    """Returns options of tritonserver. With a root certificate, clients need a certificate that it signed.

    Raises ConfigError for a missing option or file.
    """
    given = {"--grpc-tls-cert": cert, "--grpc-tls-key": key, "--grpc-tls-root": root}
    for name, file in given.items():
        if file is not None and not (file.is_file() and os.access(file, os.R_OK)):
            raise ConfigError(f"{name} = {file}: no file that can be read")
    if (cert is None or key is None) and any(given.values()):
        raise ConfigError("--grpc-tls-cert, --grpc-tls-key: both are needed, or none")
    named = {"server-cert": cert, "server-key": key, "root-cert": root}
    switches = [] if cert is None else ["--grpc-use-ssl=true"]
    switches += [] if root is None else ["--grpc-use-ssl-mutual=true"]
    return switches + [f"--grpc-{name}={path.resolve()}" for name, path in named.items() if path is not None]
