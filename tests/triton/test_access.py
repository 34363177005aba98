"""Access to Triton's ports and its administration, mostly without a server; test_server.py asks one with models."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from faser_backend.core.errors import ConfigError
from faser_backend.serving.parameters import (
    GRPC_PREFIX,
    KEY_HEADER,
    ServeOptions,
    check_host,
    grpc_tls_options,
    read_admin_key,
    restriction_options,
)
from faser_backend.triton import server
from faser_backend.triton.server import TritonServer
from tests.support.served import on_free_ports

KEY = "a-key_of-20-letters0"


def test_addresses_that_others_reach_need_to_be_asked_for():
    for host in ("127.0.0.1", "127.8.8.8"):
        check_host(host, is_exposed=False)
    for host in ("0.0.0.0", "10.1.2.3"):
        with pytest.raises(ConfigError, match=r"--host = .*--expose-triton"):
            check_host(host, is_exposed=False)
        check_host(host, is_exposed=True)
    for host in ("::1", "localhost", "::", "no-such-host.invalid", ""):
        with pytest.raises(ConfigError, match=r"--host = .*must be an IPv4 address"):
            check_host(host, is_exposed=True)
    with pytest.raises(ConfigError, match="--expose-triton"):
        TritonServer(ServeOptions(host="0.0.0.0"))


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
        tmp_path / "missing": "missing",
        tmp_path / ("x" * 5000): "not readable",
        tmp_path / "pipe": "must be a regular file",
        link: "must be a regular file",
        tmp_path: "Is a directory",
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


def test_a_key_is_never_shown_and_differs_each_time(tmp_path: Path):
    chosen, other = ServeOptions(admin_key_file=write_key(tmp_path / "key")), ServeOptions()
    assert ServeOptions().admin_key != other.admin_key and chosen.admin_key == KEY and KEY not in repr(chosen)
    assert all(option.endswith(f":faser-admin-key={KEY}") for option in restriction_options(KEY))


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for the loopback address, and its key."""
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True, timeout=60)
    return cert, key


@pytest.fixture
def small_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers start with one model, which needs no engine before its first request."""
    shutil.copytree(server.MODEL_REPO / "postprocessing", tmp_path / "repository" / "postprocessing")
    monkeypatch.setattr(server, "REPOSITORIES", {"inflight_batcher": tmp_path / "repository"})


def test_grpc_speaks_tls_to_those_who_have_a_certificate_and_restricted_calls_need_the_key(
    small_repository: None, tmp_path: Path
):
    (cert, key), (client_cert, client_key) = (make_certificate(tmp_path, name) for name in ("server", "client"))
    options = on_free_ports(
        admin_key_file=write_key(tmp_path / "admin"),
        restrict="metadata, statistics",
        **{"grpc_tls_cert": cert, "grpc_tls_key": key, "grpc_tls_root": client_cert},
    )
    with TritonServer(options) as running:
        running.wait_ready()
        address = f"127.0.0.1:{options.grpc_port}"
        files = {"root_certificates": cert, "private_key": client_key, "certificate_chain": client_cert}
        files = {name: str(path) for name, path in files.items()}
        with triton.InferenceServerClient(address, ssl=True, **files) as client:
            assert client.is_server_ready(client_timeout=10)
            for call in (client.get_server_metadata, client.get_inference_statistics):
                with pytest.raises(InferenceServerException, match="restricted"):
                    call()
            assert client.get_server_metadata({GRPC_PREFIX + KEY_HEADER: KEY}).name == "triton"
        without = {**files, "private_key": None, "certificate_chain": None}
        for given in ({"ssl": False}, {"ssl": True, **without}):
            with (
                triton.InferenceServerClient(address, **given) as client,
                pytest.raises(InferenceServerException, match=r"UNAVAILABLE|DEADLINE"),
            ):
                client.is_server_ready(client_timeout=5)
        running.kill()


def test_half_a_pair_of_certificates_and_unknown_groups_of_calls_are_refused(tmp_path: Path):
    cert = tmp_path / "cert"
    with pytest.raises(ConfigError, match=r"^--grpc-tls-cert = .*: no file that can be read"):
        grpc_tls_options(cert, None, None)
    cert.touch()
    for given in ((cert, None, None), (None, cert, None), (None, None, cert)):
        with pytest.raises(ConfigError, match="--grpc-tls-cert, --grpc-tls-key: both are needed, or none"):
            grpc_tls_options(*given)
    assert grpc_tls_options(None, None, None) == []
    with pytest.raises(ConfigError, match=r"^--restrict = 'health': must be among metadata, inference"):
        restriction_options(KEY, "health")
