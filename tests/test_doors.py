"""Who may reach Triton's ports and its administration, without a server; test_server.py asks a real one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from faser_backend.core.errors import ConfigError
from faser_backend.serving.doors import check_host, random_key, read_admin_key, restriction_options
from faser_backend.serving.server import LaunchOptions, TritonServer
from tests.served import FASER

KEY = "a-key_of-20-letters0"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_leave(host: str):
    check_host(host, is_exposed=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "no-such-host.invalid", ""])
def test_other_addresses_need_to_be_asked_for(host: str):
    with pytest.raises(ConfigError, match=r"--host = .*--expose-triton"):
        check_host(host, is_exposed=False)
    check_host(host, is_exposed=True)


def test_no_server_starts_where_others_could_reach_it():
    with pytest.raises(ConfigError, match="--expose-triton"):
        TritonServer(LaunchOptions(host="0.0.0.0"))
    command = [FASER, "serve", "--host", "0.0.0.0"]
    told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert told.returncode == 1 and told.stderr.startswith("error: --host = '0.0.0.0'"), told.stderr


def write_key(path: Path, text: str = KEY, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_key_is_read_from_a_file_of_ones_own(tmp_path: Path):
    assert read_admin_key(write_key(tmp_path / "key")) == KEY
    assert read_admin_key(write_key(tmp_path / "line", f"{KEY}\n", 0o400)) == KEY
    link = tmp_path / "link"  # as orchestrators mount secrets
    link.symlink_to(tmp_path / "key")
    assert read_admin_key(link) == KEY


def test_other_key_files_are_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    link = tmp_path / "endless"
    link.symlink_to("/dev/zero")
    cases = {
        tmp_path / "missing": "not readable",
        tmp_path / ("x" * 5000): "not readable",
        tmp_path / "pipe": "must be a regular file",
        link: "must be a regular file",
        tmp_path: "must be a regular file",
        write_key(tmp_path / "group", mode=0o640): "mode 0640, .*chmod 600",
        write_key(tmp_path / "short", KEY[:15]): "must hold 16 to 256 letters",
        write_key(tmp_path / "long", "x" * 257): "must hold 16 to 256 letters",
        write_key(tmp_path / "rule", f"{KEY},health:x=y"): "must hold 16 to 256 letters",
        write_key(tmp_path / "lines", f"{KEY}\n\n"): "must hold 16 to 256 letters",
        write_key(tmp_path / "empty", ""): "must hold 16 to 256 letters",
    }
    for path, reason in cases.items():
        with pytest.raises(ConfigError, match=rf"^--admin-key-file = .*{reason}"):
            read_admin_key(path)


def test_a_key_is_never_shown_and_differs_each_time():
    assert LaunchOptions().admin_key != LaunchOptions().admin_key and random_key() not in repr(LaunchOptions())
    assert KEY not in repr(LaunchOptions(admin_key=KEY))
    assert all(option.endswith(f":faser-admin-key={KEY}") for option in restriction_options(KEY))
