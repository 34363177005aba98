"""`faser doctor` on a GPU, from a faked driver, and on kernels; the rest of the report is in test_cli.py."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from numba.core import caching

from faser_backend.cli.doctor import Finding, examine
from faser_backend.core.errors import ConfigError
from faser_backend.cpu.kernels import attention
from faser_backend.cuda.green_contexts import DriverError, GpuFacts, gpu_facts, gpu_identity
from faser_backend.lab import environment
from faser_backend.serving import runtimes
from faser_backend.serving.runtimes import check_kernel_compiler
from tests.support.fake_cuda import FakeDriver, Status

REFUSED = Status.CUDA_ERROR_NOT_SUPPORTED


def found_with(driver: FakeDriver) -> dict[str, Finding]:
    findings = {finding.name: finding for finding in examine(lambda: driver)}
    assert not driver.contexts and not driver.streams, "looking leaves nothing behind"
    return findings


@pytest.fixture(autouse=True)
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A faked GPU is none that torch could be asked for."""
    monkeypatch.setattr("faser_backend.cli.doctor._torch", lambda has_gpu: f"asked with a GPU: {has_gpu}")


def test_a_gpu_and_its_shares() -> None:
    found = found_with(FakeDriver(132, 8))
    assert found["NVIDIA GPU"].detail == "Faked GPU, 132 SMs, driver for CUDA 13.0"
    assert found["green contexts"] == Finding(
        "green contexts", True, "132 SMs in groups of 8, draft/target 8/124, 16/116, 32/100, 64/68"
    )
    assert found["torch"].detail == "asked with a GPU: True"
    found = found_with(FakeDriver(14, 8, joins_rest=False, num_gpus=2))
    assert found["NVIDIA GPU"].detail.startswith("Faked GPU x 2, 14 SMs")
    assert found["green contexts"].detail == "14 SMs in groups of 8, draft/target 6/8"


def test_why_there_are_no_green_contexts_and_what_comes_instead() -> None:
    finding = found_with(FakeDriver(7, 8))["green contexts"]  # tests/cuda/test_green_contexts.py has every reason
    assert not finding.is_ok and not finding.is_needed
    assert finding.detail == "7 SMs: two shares need more than 8, the smallest one; draft and target take turns"


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (FakeDriver(num_gpus=0), "the driver shows no GPU"),
        (FakeDriver(fails_at=("cuInit", 1), status=REFUSED), f"cuInit: {REFUSED.name}"),
    ],
)
def test_why_there_is_no_gpu(driver: FakeDriver, reason: str) -> None:
    found = found_with(driver)
    assert found["NVIDIA GPU"] == Finding("NVIDIA GPU", False, reason)
    assert found["green contexts"].detail == "need an NVIDIA GPU" and found["torch"].detail == "asked with a GPU: False"


def test_a_gpu_has_a_size(run) -> None:
    assert "gpu_gib = inf: " in run("doctor", "--gpu-gib", "inf")[2]


def test_cuda_python_is_named_where_it_is_missing() -> None:
    def missing() -> Any:
        raise ImportError("No module named 'cuda'")

    found = {finding.name: finding for finding in examine(missing)}
    assert re.search(r"no NVIDIA driver|cuda-python is missing", found["NVIDIA GPU"].detail)


def test_where_kernels_are_kept_and_that_numba_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = found_with(FakeDriver(132))["CPU kernels"]
    assert finding.is_ok and finding.is_needed and "kernels are kept in /" in finding.detail
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    monkeypatch.setattr(attention, "has_halves", lambda: False)
    finding = found_with(FakeDriver(132))["CPU kernels"]
    assert finding.is_ok and "set NUMBA_CACHE_DIR" in finding.detail and "--kv-cache-dtype fp32" in finding.detail
    monkeypatch.setitem(sys.modules, "numba", None)
    finding = found_with(FakeDriver(132))["CPU kernels"]
    assert not finding.is_ok and finding.is_needed and "numba" in finding.detail


def test_what_kernels_of_gpus_are_compiled_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda *_, **__: {"include": str(tmp_path)})
    monkeypatch.setenv("CC", "my-cc")
    (tmp_path / "Python.h").touch()
    assert check_kernel_compiler() == f"my-cc, {tmp_path / 'Python.h'}"
    monkeypatch.setattr(runtimes, "has_driver", lambda: True)
    runtimes.check_device("torch")
    (tmp_path / "Python.h").unlink()
    with pytest.raises(ConfigError, match=r"apt-get install python3\.\d+-dev$"):
        runtimes.check_device("torch")
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = found_with(FakeDriver(132))["kernel compiler"]
    assert not found.is_ok and not found.is_needed and "apt-get install gcc python3." in found.detail
    runtimes.check_device("llvm")
    monkeypatch.setattr(runtimes, "has_driver", lambda: False)
    runtimes.check_device("torch")


def test_figures_carry_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "query_gpu", lambda: environment.parse_gpu("Faked GPU, 580.1, 81559 MiB"))
    meta = environment.describe(0)
    assert "torch" in meta["versions"] and ", Faked GPU, 580.1 (load" in environment.as_lines(meta)[0]


def test_the_identity_of_a_gpu_and_of_a_processor_without_one() -> None:
    assert gpu_facts(FakeDriver(132)) == GpuFacts("Faked GPU", 132, 13000, 1)
    found = gpu_identity("torch", FakeDriver(14))
    assert found.pop("torch") and found == {"gpu": "Faked GPU", "num_sms": 14, "driver": 13000}
    assert set(gpu_identity("torch", FakeDriver(num_gpus=0))) == {"cpu", "num_cores", "torch"}
    assert gpu_identity("tensorrt_rtx", FakeDriver())["num_sms"] == 132
    with pytest.raises(DriverError, match="no GPU"):
        gpu_identity("tensorrt_rtx", FakeDriver(num_gpus=0))
