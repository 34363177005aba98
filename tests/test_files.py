"""Unreadable files and directories: each gives one error at once, without a traceback."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faser_backend.cli import doctor
from faser_backend.core.errors import ConfigError, RequestError
from faser_backend.engines import build
from faser_backend.files import FileError, read_json, read_text
from faser_backend.manifest import EngineManifest
from faser_backend.text.tokenizer import TextTokenizer
from faser_backend.triton import server

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def engine(engine_dir: Path, tmp_path: Path) -> Path:
    return shutil.copytree(engine_dir, tmp_path / "engine")


ODD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "must be a regular file"),
    "endless": (lambda path: path.symlink_to("/dev/zero"), "must be a regular file"),
    "to_itself": (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
    "folder": (os.mkdir, "Is a directory"),
    "nested": (lambda path: path.write_text(DEEP), "nested too deeply"),
    "sparse": (lambda path: path.touch() or os.truncate(path, 1 << 40), "1099511627776 bytes: must be at most"),
}


def put(kind: str, path: Path) -> None:
    path.unlink(missing_ok=True)
    ODD_FILES[kind][0](path)


@pytest.mark.parametrize("kind", ODD_FILES)
@pytest.mark.parametrize("name", ["manifest.json", "profile.json"])
def test_what_is_no_plain_file_is_told_at_once(run, engine: Path, name: str, kind: str):
    put(kind, engine / name)
    status, _, err = run("generate", "--engine-dir", engine, "--prompt", "x", "--max-tokens", 1)
    assert status == 1 and err.startswith("error: ") and err.count("\n") == 1
    assert name in err and ODD_FILES[kind][1] in err


@pytest.mark.parametrize("kind", ["pipe", "endless", "nested", "sparse"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_checkpoint_is_read_with_the_same_care(run, engine_dir: Path, tmp_path: Path, name: str, kind: str):
    pair = shutil.copytree(engine_dir.parent / "pair", tmp_path / "pair")
    put(kind, pair / "target" / name)
    status, _, err = run("build", "--target", pair / "target", "--output", tmp_path / "out")
    if name == "tokenizer_config.json" and kind in ("pipe", "endless"):
        assert status == 0  # optional and absent
        return
    assert status == 1 and name in err and err.count("\n") == 1


def test_links_to_files_are_followed(engine_dir: Path, engine: Path):
    for path in engine.iterdir():
        path.unlink()
        path.symlink_to(engine_dir / path.name)
    assert EngineManifest.load(engine) == EngineManifest.load(engine_dir)


def test_text_and_names(tmp_path: Path):
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    assert read_text(file, 3) == "abc"
    with pytest.raises(FileError, match="must be at most 2"):
        read_text(file, 2)
    file.write_bytes(b"\xffab")
    with pytest.raises(FileError, match="UTF-8"):
        read_text(file)
    for name in ("x" * 5000, "null\0", "\udcff" * 2000):
        with pytest.raises(FileError) as caught:
            read_json(tmp_path / name)
        assert len(str(caught.value)) < 400
        str(caught.value).encode()
    with pytest.raises(FileError) as caught:
        read_json(tmp_path / "none")
    assert caught.value.is_missing


def tokenizer_file(path: Path, **parts: Any) -> Path:
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model, **parts}))
    return path


def test_a_tokenizer_that_panics_is_told_without_paths(tmp_path: Path):
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    with pytest.raises(ConfigError, match=r"tokenizer t\.json: the library cannot read it \(it panicked\)") as caught:
        TextTokenizer.from_file(tokenizer_file(tmp_path / "t.json", normalizer=normalizer))
    assert str(tmp_path) not in str(caught.value)
    piece = [{"SpecialToken": {"id": "x", "type_id": 0}}]
    template = {"type": "TemplateProcessing", "single": piece, "pair": [], "special_tokens": {}}
    tokenizer = TextTokenizer.from_file(tokenizer_file(tmp_path / "t.json", post_processor=template))
    with pytest.raises(RequestError, match=r"text = 'aa': the tokenizer cannot encode it \(it panicked\)"):
        tokenizer.encode("aa", add_special_tokens=True)
    assert TextTokenizer.from_file(tokenizer_file(tmp_path / "t.json")).encode("aa") == [0, 0]  # control


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(
    run, engine_dir: Path, tmp_path: Path, monkeypatch
):
    pair, output = engine_dir.parent / "pair", tmp_path / "out" / "engine"
    command = ("build", "--target", pair / "target", "--draft", pair / "draft", "--output", output)
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as small:
        small.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        status, _, err = run(*command)
    assert status == 1 and err.count("\n") == 1
    assert "bytes of disk are needed for the engine directory, 1000 are free" in err
    assert not output.parent.exists()
    needed = int(err.split(" bytes of disk")[0].split()[-1])
    assert run(*command)[0] == 0
    assert needed * 0.5 < sum(path.stat().st_size for path in output.iterdir()) < needed * 2 + 100_000


def test_a_disk_that_fills_up_on_the_way_leaves_nothing(run, engine_dir: Path, tmp_path: Path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(build, "_publish", full)
    pair, output = engine_dir.parent / "pair", tmp_path / "engine"
    status, _, err = run("build", "--target", pair / "target", "--output", output)
    last = err.splitlines()[-1]
    assert status == 1 and last.startswith(f"error: output_dir = {output}: No space left on device; ")
    assert "bytes of disk are free" in last and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [("generate", "--prompt", "x"), ("serve",)])
def test_a_home_that_nobody_can_write_to_is_one_line(run, monkeypatch, command: tuple[str, ...]):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    status, _, err = run(*command)
    assert status == 1 and err.count("\n") == 1
    assert "/proc/none" in err and "set FASER_CACHE" in err


def test_a_full_temporary_folder_is_one_line(run, engine_dir: Path, monkeypatch):
    usage = shutil.disk_usage(engine_dir)
    monkeypatch.setattr(server, "check_ports", lambda *_: None)  # the usual ports may be taken
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    status, _, err = run("serve", "--engine-dir", engine_dir)
    assert status == 1 and err.count("\n") == 1
    assert "a server's launch folder, 1000 are free; set TMPDIR to a folder with room" in err


def test_any_failure_of_the_system_is_one_line(run, monkeypatch):
    def fail(error: BaseException) -> Callable[..., object]:
        def examine() -> None:
            raise error

        return examine

    for error, line in (
        (OSError(errno.EROFS, "Read-only file system", "some/file"), "error: some/file: Read-only file system\n"),
        (MemoryError("Unable to allocate 9 TiB"), "error: out of memory: Unable to allocate 9 TiB\n"),
    ):
        monkeypatch.setattr(doctor, "examine", fail(error))
        assert run("doctor") == (1, "", line)
    monkeypatch.setattr(doctor, "examine", fail(RuntimeError("a mistake of ours")))
    with pytest.raises(RuntimeError):  # control: an unexpected error keeps its traceback
        run("doctor")
