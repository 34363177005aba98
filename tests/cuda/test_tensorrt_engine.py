"""Engine files: the configuration of contexts, RTX's cached kernels, and, on a GPU, whole engines."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from faser_backend.core.errors import ConfigError
from faser_backend.cuda.tensorrt_programs import EngineFile, EngineStore, cache_path
from tests.support.ort_engines import OrtContext, OrtEngine


class RecordingCache:
    def __init__(self, accepts: bool) -> None:
        self.accepts = accepts
        self.loaded: list[bytes] = []

    def deserialize(self, content: bytes) -> bool:
        self.loaded.append(content)
        return self.accepts

    def serialize(self) -> bytes:
        return b"compiled kernels"


class RecordingConfig:
    """A recorder of settings of an IRuntimeConfig; unknown attributes are refused."""

    def __init__(self, accepts: bool) -> None:
        self.cuda_graph_strategy = self.dynamic_shapes_kernel_specialization_strategy = None
        self.allocation = self.cache = None
        self._accepts = accepts

    def set_execution_context_allocation_strategy(self, strategy) -> None:
        self.allocation = strategy

    def create_runtime_cache(self) -> RecordingCache:
        return RecordingCache(self._accepts)

    def set_runtime_cache(self, cache) -> bool:
        self.cache = cache
        return True


class RecordingEngine:
    def __init__(self, accepts: bool = True, makes_contexts: bool = True, num_bytes: int = 0) -> None:
        self.configs: list[RecordingConfig] = []
        self.device_memory_size_v2 = num_bytes
        self._accepts = accepts
        self._makes_contexts = makes_contexts

    def create_runtime_config(self) -> RecordingConfig:
        return RecordingConfig(self._accepts)

    def create_execution_context(self, config: RecordingConfig) -> object | None:
        self.configs.append(config)
        return SimpleNamespace() if self._makes_contexts else None


def engine_file(path: Path, engine: RecordingEngine) -> EngineFile:
    return EngineFile(path, engine, (), (), ())


@pytest.fixture
def store() -> EngineStore:
    return EngineStore("tensorrt_rtx")


def test_what_is_captured_waits_for_its_kernels(store: EngineStore, tmp_path: Path) -> None:
    module, engine = store.tensorrt.module, RecordingEngine()
    file = engine_file(tmp_path / "a.engine", engine)
    store.new_context(file, is_captured=True)
    store.new_context(file, is_captured=False)
    strategies = module.DynamicShapesKernelSpecializationStrategy
    found = [config.dynamic_shapes_kernel_specialization_strategy for config in engine.configs]
    assert found == [strategies.EAGER, strategies.NONE], "nothing is compiled between calls"
    assert {config.cuda_graph_strategy for config in engine.configs} == {module.CudaGraphStrategy.DISABLED}
    user_managed = module.ExecutionContextAllocationStrategy.USER_MANAGED
    assert {config.allocation for config in engine.configs} == {user_managed}
    assert engine.configs[0].cache is engine.configs[1].cache
    assert vars(RecordingConfig(True)).keys() == vars(engine.configs[0]).keys()  # nothing else was set


def test_the_stand_ins_have_what_tensorrt_has(store: EngineStore) -> None:
    module = store.tensorrt.module
    pairs = {
        module.IRuntimeConfig: {*dir(RecordingConfig), *vars(RecordingConfig(True))} - {"allocation", "cache"},
        module.IRuntimeCache: dir(RecordingCache),
        module.ICudaEngine: {*dir(RecordingEngine), *dir(OrtEngine)},
        module.IExecutionContext: dir(OrtContext),
    }
    for real, names in pairs.items():
        assert [name for name in names if name[0] != "_" and not hasattr(real, name)] == []


def test_compiled_kernels_are_kept_beside_the_engine(store: EngineStore, tmp_path: Path) -> None:
    path = tmp_path / "a.engine"
    store.new_context(engine_file(path, RecordingEngine()), is_captured=True)
    store.close()
    assert cache_path(path).read_bytes() == b"compiled kernels"
    assert [found.name for found in tmp_path.iterdir()] == [cache_path(path).name]
    engine = RecordingEngine()
    EngineStore("tensorrt_rtx").new_context(engine_file(path, engine), is_captured=True)
    assert engine.configs[0].cache.loaded == [b"compiled kernels"]


def test_kernels_of_another_gpu_are_compiled_again(store: EngineStore, tmp_path: Path, caplog) -> None:
    path = tmp_path / "a.engine"
    cache_path(path).write_bytes(b"of another")
    store.new_context(engine_file(path, RecordingEngine(accepts=False)), is_captured=True)
    assert "made for another GPU, driver or version" in caplog.text


@pytest.mark.parametrize("folder", ["gone", ""])
def test_a_directory_that_cannot_be_written_is_said(
    store: EngineStore, tmp_path: Path, caplog, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """It is missing, or its disk is full."""
    store.new_context(engine_file(tmp_path / folder / "a.engine", RecordingEngine()), is_captured=True)
    monkeypatch.setattr("os.replace", lambda *_: os.write(os.open("/dev/full", os.O_WRONLY), b"0"))
    store.close()
    assert "compiled kernels cannot be stored" in caplog.text and not list(tmp_path.iterdir())


def test_all_shares_of_a_model_work_in_one_memory(store: EngineStore, tmp_path: Path) -> None:
    files = [engine_file(tmp_path / name, RecordingEngine(num_bytes=num)) for name, num in (("a", 300), ("b", 700))]
    target, device = files[:2], torch.device("cpu")
    memory = store.activation_memory(target, device)
    assert memory.numel() == 700 and store.activation_memory(target, device) is memory
    draft = store.activation_memory([engine_file(tmp_path / "c", RecordingEngine(num_bytes=0))], device)
    assert draft.numel() == 256 and draft.data_ptr() != memory.data_ptr()


def test_a_context_that_is_not_made_is_an_error(store: EngineStore, tmp_path: Path) -> None:
    file = engine_file(tmp_path / "a.engine", RecordingEngine(makes_contexts=False))
    with pytest.raises(ConfigError, match=r"a\.engine: execution context: TensorRT made none"):
        store.new_context(file, is_captured=True)
