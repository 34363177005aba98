"""Identifies a GPU and its software without opening a context: for profiles and for `faser doctor`."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from faser_backend.core.errors import ConfigError
from faser_backend.cpu.runtime import cpu_identity
from faser_backend.cuda.green_contexts import DriverError, call_driver
from faser_backend.plugins.tensorrt_import import import_tensorrt
from faser_backend.runtime_spec import RUNTIMES

NAME_BYTES = 128


class GpuFacts(NamedTuple):
    """Facts about the first visible GPU."""

    name: str
    num_sms: int
    driver: int  # the CUDA version that the driver supports, 13000 for 13.0
    num_gpus: int


def load_driver() -> Any:
    """Imports cuda.bindings.driver. Raises ImportError if cuda-python is not installed."""
    return importlib.import_module("cuda.bindings.driver")


def gpu_facts(driver: Any) -> GpuFacts:
    """Reads the facts from the driver. Raises DriverError if there is no driver or no GPU."""
    call_driver(driver, "cuInit", 0)
    num_gpus = int(call_driver(driver, "cuDeviceGetCount"))
    if num_gpus == 0:
        raise DriverError("the driver shows no GPU")
    device = call_driver(driver, "cuDeviceGet", 0)
    name = call_driver(driver, "cuDeviceGetName", NAME_BYTES, device)
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    num_sms = int(call_driver(driver, "cuDeviceGetAttribute", attribute, device))
    driver_version = int(call_driver(driver, "cuDriverGetVersion"))
    return GpuFacts(name.split(b"\0")[0].decode(), num_sms, driver_version, num_gpus)


def memory_bytes(driver: Any) -> int:
    """Returns the total memory of the first GPU. Raises DriverError if there is no driver or no GPU."""
    gpu_facts(driver)
    return int(call_driver(driver, "cuDeviceTotalMem", call_driver(driver, "cuDeviceGet", 0)))


def gpu_identity(runtime: str, driver: Any = None) -> dict[str, str | int]:
    """Returns the facts that determine the time of a GPU runtime's calls; without a GPU, torch's are the processor's.

    driver: cuda.bindings.driver by default. Raises ConfigError if the runtime's library is missing, and FaserError if
    TensorRT finds no GPU.
    """
    flavour = RUNTIMES[runtime].tensorrt
    library = _torch_version() if flavour is None else import_tensorrt(flavour)
    versions: dict[str, str | int] = {runtime: library if isinstance(library, str) else library.version}
    try:
        facts = gpu_facts(driver or load_driver())
    except (DriverError, ImportError):
        if flavour is not None:
            raise
        processor = cpu_identity()
        return {"cpu": processor["cpu"], "num_cores": processor["num_cores"], **versions}
    return {"gpu": facts.name, "num_sms": facts.num_sms, "driver": facts.driver, **versions}


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        raise ConfigError("runtime = 'torch': torch is not installed; pip install 'faser-backend[torch]'") from None
