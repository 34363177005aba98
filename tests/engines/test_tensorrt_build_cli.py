"""`faser build`: options of each runtime, and its output."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from faser_backend.cli.build import chosen_splits, summary
from faser_backend.cli.main import app
from faser_backend.core.errors import ConfigError, FaserError
from faser_backend.cuda.runtime import best_first
from faser_backend.cuda.streams import open_menu
from faser_backend.device.partition import split_name
from faser_backend.manifest import EngineManifest
from tests.support.fake_cuda import FakeCuda, FakeDriver
from tests.support.tiny_models import write_checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source"), num_hidden_layers=1)


def build(source: Path, output: Path, options: str) -> Result:
    paths = ["--target", str(source), "--draft", str(source), "--output", str(output)]
    return CliRunner().invoke(app, ["build", *paths, *options.split()])


def test_options_of_tensorrt_reach_the_manifest(source: Path, tmp_path: Path) -> None:
    options = "--max-num-seqs 2 --max-prefill-tokens 32 --max-context 48 --compute-capability 8.9"
    done = build(source, tmp_path / "engine", f"--runtime tensorrt_rtx --dtype bf16 {options}")
    assert done.exit_code == 0, done.output
    manifest = EngineManifest.load(tmp_path / "engine")
    assert (manifest.dtype, manifest.compute_capabilities) == ("bf16", ("8.9",))
    prefill = manifest.draft.segments[0].buckets[-1].ranges
    assert [prefill[dimension][2] for dimension in ("B", "T", "MB")] == [2, 32, 3]
    assert done.stdout.splitlines()[-1] == summary(tmp_path / "engine", manifest)
    assert f"for tensorrt_rtx, bf16, {manifest.compiler}, context 48, " in done.stdout
    steps = re.findall(r"s  step (\d+) of (\d+): .", done.stderr)
    assert steps == [(str(number), str(len(steps))) for number in range(1, len(steps) + 1)]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_engines_of_torch_are_built(dtype: str, source: Path, tmp_path: Path) -> None:
    assert build(source, tmp_path / "engine", f"--runtime torch --dtype {dtype}").exit_code == 0
    manifest = EngineManifest.load(tmp_path / "engine")
    assert (manifest.runtime, manifest.dtype, manifest.compiler) == ("torch", dtype, "")
    assert sorted(file.name for file in manifest.files) == [
        "draft.safetensors", "prompts.json", "target.safetensors", "tokenizer.json", "tokenizer_config.json",
    ], "a weight file per model beside tokenizer files and prompts, each once"  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--max-num-seqs 2", "--max-num-seqs = 2: applies to --runtime tensorrt_rtx and tensorrt only"),
        (
            "--runtime torch --compute-capability 8.9",
            "--compute-capability = 8.9: applies to --runtime tensorrt_rtx and ",
        ),
        ("--runtime tensorrt_rtx --compute-capability 8.7", "compute_capabilities = 8.7: must be one of 7.5, "),
        ("--runtime tensorrt_rtx --max-num-seqs 0", "max_num_seqs = 0: Input should be greater than or equal to 1"),
        ("--runtime tensorrt_rtx --max-context 0", "max_context = 0: Input should be greater than or equal to 32"),
        ("--runtime tensorrt_rtx --splits all", "--splits = all: applies to --runtime tensorrt with a draft model"),
        ("--dtype bf16", "dtype = 'bf16': runtime 'llvm' supports only 'fp32'"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: str, message: str, source: Path, tmp_path: Path) -> None:
    done = build(source, tmp_path / "engine", options)
    assert isinstance(done.exception, FaserError)
    assert message in str(done.exception)
    assert not (tmp_path / "engine").exists()


def test_two_sets_of_profiles_are_built_unless_splits_are_named() -> None:
    menu = open_menu(FakeCuda(), 0, FakeDriver).menu
    offered = {split_name(*split): split for split in best_first(menu.splits, 1, 8)}
    assert list(chosen_splits(None, offered)) == ["32/100"] and list(chosen_splits("none", offered)) == []
    assert chosen_splits("all", offered) == offered and list(chosen_splits("64/68, 8/124", offered)) == [
        "64/68",
        "8/124",
    ]
    with pytest.raises(ConfigError, match=r"--splits = 9/123: this GPU offers 32/100, "):
        chosen_splits("16/116,9/123", offered)
    with pytest.raises(ConfigError, match=r"--splits = 16/116: this GPU offers none"):
        chosen_splits("16/116", {})
    assert chosen_splits(None, {}) == chosen_splits("all", {}) == {}
