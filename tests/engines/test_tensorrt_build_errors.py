"""`faser build`: options of each runtime. Failures of TensorRT and damaged engines: one clear error each."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from faser_backend.cli.build import chosen_splits, summary
from faser_backend.cli.main import app
from faser_backend.core.errors import ConfigError, FaserError
from faser_backend.cuda.runtime import best_first
from faser_backend.cuda.streams import open_menu
from faser_backend.device.partition import split_name
from faser_backend.engines.build import build_engines
from faser_backend.engines.checkpoint import CheckpointError
from faser_backend.engines.tensorrt_buckets import CallLimits, SplitStreams, TensorRtOptions
from faser_backend.engines.tensorrt_build import parse_network, require_gpu
from faser_backend.manifest import EngineManifest
from faser_backend.plugins.tensorrt_import import ErrorLog, TensorRt, TensorRtError, import_tensorrt
from tests.support.fake_cuda import FakeCuda, FakeDriver
from tests.support.gathered_runner import GatheredRunner
from tests.support.tiny_models import write_checkpoint

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "models" / "demo"


@pytest.fixture(scope="module")
def rtx() -> TensorRt:
    return import_tensorrt("rtx")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def engine(source: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = tmp_path_factory.mktemp("engines") / "engine"
    limits = CallLimits(max_num_seqs=1, max_context=64, max_prefill_tokens=16)
    build_engines(
        source, source, directory, runtime="tensorrt_rtx", dtype="fp16", tensorrt=TensorRtOptions(limits, ("12.0",))
    )
    return (directory / "draft.0.engine").read_bytes()


def load_error(rtx: TensorRt, content: bytes) -> str:
    log = ErrorLog(rtx)
    assert rtx.module.Runtime(log.logger).deserialize_cuda_engine(content) is None
    with pytest.raises(TensorRtError) as caught:
        log.check("x.engine: load")
    log.check("nothing is left to report")
    return str(caught.value)


def has_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


@pytest.mark.skipif(has_driver(), reason="needs a machine without an NVIDIA driver")
def test_a_sound_engine_needs_a_driver(rtx: TensorRt, engine: bytes) -> None:
    error = load_error(rtx, engine)
    assert error.startswith("x.engine: load: ") and "cudaError 35" in error


def test_engines_of_another_version_are_refused_by_name(rtx: TensorRt) -> None:
    rtx.check_built_by(rtx.title)
    for other in ("TensorRT-RTX 1.6.0.1", "TensorRT 11.4.0", ""):
        with pytest.raises(TensorRtError) as caught:
            rtx.check_built_by(other)
        assert other in str(caught.value) and f"installed is {rtx.title}: build again" in str(caught.value)


@pytest.mark.parametrize(
    ("runtime", "blocked", "extra"),
    [
        ("tensorrt_rtx", ["tensorrt_rtx", "tensorrt_rtx_bindings"], "faser-backend[tensorrt-rtx]"),
        ("tensorrt", ["tensorrt"], "faser-backend[tensorrt]"),
        ("tensorrt_rtx", ["onnx"], "faser-backend[tensorrt-rtx]"),
    ],
)
def test_a_missing_tensorrt_names_the_extra_to_install(
    runtime: str, blocked: list[str], extra: str, tmp_path: Path
) -> None:
    """Runs the command in a process whose import system does not find the library."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked}))\n"
        "from faser_backend.cli.main import main\n"
        f"sys.argv[1:] = ['build', '--runtime', '{runtime}', '--dtype', 'fp16', '--output', {str(tmp_path / 'out')!r},"
        f" '--target', {str(DEMO / 'target')!r}, '--draft', {str(DEMO / 'draft')!r}]\nmain()"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: ") and f"pip install '{extra}'" in done.stderr
    assert all(name in done.stderr for name in blocked)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "fp8"}, "dtype = 'fp8': must be one of fp32, fp16, bf16"),
        ({"runtime": "tensorrt_xyz"}, "runtime = 'tensorrt_xyz': must be one of llvm, "),
        ({"tensorrt": TensorRtOptions(compute_capabilities=("8.9", "8.9"))}, "8.9, 8.9: lists one twice"),
        (
            {"tensorrt": TensorRtOptions(split_streams={"16/116": SplitStreams(1, 2)})},
            "split_streams: TensorRT-RTX .* does not support SM splits",
        ),
        (
            {"runtime": "torch", "tensorrt": TensorRtOptions()},
            "runtime = 'torch': limits and targets of TensorRT need one of tensorrt_rtx, tensorrt",
        ),
    ],
)
def test_options_that_cannot_be_built_are_refused(options: dict, message: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        build_engines(source, source, tmp_path / "out", **{"runtime": "tensorrt_rtx", "dtype": "fp16", **options})
    assert list(tmp_path.iterdir()) == []


def test_what_the_compiler_refuses_names_engine_and_stage(source: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("faser_backend.plugins.tensorrt_import.OLDEST_GPU", 75)
    options = TensorRtOptions(compute_capabilities=("7.5",))
    with pytest.raises(TensorRtError, match=r"target\.0\.onnx: build: .*Turing.*FP32 GEMM is not supported"):
        build_engines(source, source, tmp_path / "out", runtime="tensorrt_rtx", dtype="fp16", tensorrt=options)
    assert list(tmp_path.iterdir()) == []


def test_a_graph_without_its_weights_names_file_and_stage(rtx: TensorRt, source: Path, tmp_path: Path) -> None:
    GatheredRunner(source, tmp_path)
    (tmp_path / "weights").unlink()
    log = ErrorLog(rtx)
    builder = rtx.module.Builder(log.logger)
    with pytest.raises(TensorRtError, match=r"^0\.onnx: parse: "):
        parse_network(rtx, builder, log, tmp_path / "0.onnx")


@pytest.mark.skipif(has_driver(), reason="needs a machine without an NVIDIA driver")
def test_full_tensorrt_says_that_it_needs_a_gpu() -> None:
    with pytest.raises(TensorRtError, match=r"TensorRT 11\.4\.0 builds on the GPU .* torch finds no GPU"):
        require_gpu("TensorRT 11.4.0")


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
        ("--runtime tensorrt_rtx --compute-capability 8.7", "compute_capabilities = 8.7: must be one of 8.0, "),
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
