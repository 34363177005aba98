"""The GPU runtimes as the composition root opens them: on torch's CPU device, and on shares of a faked GPU."""

import gc
import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from faser_backend.core.config import EngineConfig
from faser_backend.core.decision import WHOLE
from faser_backend.core.errors import ConfigError
from faser_backend.core.request import Request
from faser_backend.cuda.pool import CudaKvPool
from faser_backend.cuda.runtime import CudaRuntime, open_cuda_runtime
from faser_backend.cuda.sampler import TorchSampler
from faser_backend.cuda.streams import open_menu
from faser_backend.cuda.torch_programs import TorchPrograms, TorchSegment
from faser_backend.device.partition import split_name
from faser_backend.device.runtime import ModelPair
from faser_backend.engines.build import build_engines
from faser_backend.manifest import BucketSpec, EngineManifest, FileSpec, ModelEngine
from faser_backend.policy.registry import parse_policy
from faser_backend.serving.compose import assemble_on, build_engine, engine_on, prepared
from faser_backend.serving.runtimes import open_runtime
from tests.support.fake_cuda import FakeCuda, FakeDriver
from tests.support.forcing import Forced, random_everything
from tests.support.harness import drive, guessed, request
from tests.support.tiny_models import write_checkpoint, write_draft
from tests.support.torch_engines import CPU

BLOCK_SIZE = 4
CONFIG = {"max_num_seqs": 4, "num_kv_blocks": 128, "max_prefill_tokens": 16}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("runtimes")
    source = write_checkpoint(root / "source")
    return source, write_draft(source, root / "draft")


def build(checkpoints: tuple[Path, Path], runtime: str) -> Path:
    directory = checkpoints[0].parent / runtime
    build_engines(*checkpoints, directory, runtime=runtime, exit_layers=(1,), kv_block_size=BLOCK_SIZE)
    return directory


@pytest.fixture(scope="module")
def torch_engine(checkpoints: tuple[Path, Path]) -> Path:
    return build(checkpoints, "torch")


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    rng = np.random.default_rng(5)
    return [request(f"r{i}", rng.integers(0, 97, 3 + 7 * i).tolist(), 12) for i in range(4)]


@pytest.fixture(scope="module")
def expected(checkpoints: tuple[Path, Path], requests: list[Request]) -> dict[str, list[int]]:
    """Returns the tokens of plain decoding on a CPU."""
    engine = build_engine(build(checkpoints, "llvm"), EngineConfig.from_options(policy="none", **CONFIG))
    tokens = drive(engine, requests).tokens
    engine.close()
    return tokens


def no_weights(model: ModelEngine) -> Any:
    raise AssertionError("nothing here needs weights")


def pair_of(directory: Path) -> tuple[EngineManifest, ModelPair]:
    manifest = EngineManifest.load(directory)
    return manifest, ModelPair(manifest.target, manifest.draft)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
class TestOnTheCpu:
    @pytest.mark.parametrize(
        "options",
        [
            {"policy": "none"},
            {"policy": "fixed:4"},
            {"policy": "fixed:3", "pipeline": "run_ahead"},
            {"policy": "fixed:3", "pipeline": "ping_pong"},
        ],
        ids=lambda options: " ".join(options.values()),
    )
    def test_an_engine_directory_is_served_and_says_on_what(
        self, torch_engine: Path, requests, expected, options: dict[str, str], caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = build_engine(torch_engine, EngineConfig.from_options(**options, **CONFIG))
        assert "no CUDA device; computing on the CPU" in caplog.text
        assert drive(engine, requests).tokens == expected
        draft = engine.step_runner.partitions[WHOLE].draft_loop
        assert (draft is None) == (options["policy"] == "none")
        engine.close()
        engine.close()

    def test_weights_are_read_once_for_all_partitions(self, torch_engine: Path, monkeypatch) -> None:
        manifest, models = pair_of(torch_engine)
        runtime = open_runtime(torch_engine, manifest, EngineConfig())
        num_bytes = sum(model.num_weight_bytes for model in models)
        programs: Any = runtime.programs  # type: ignore[attr-defined]
        assert programs.num_unloaded_bytes(models) == num_bytes
        reads: list[str] = []
        load = programs._load
        programs._load = lambda model: (reads.append(model.segments[0].file.name), load(model))[1]
        pools = [runtime.open_pool(model, 8) for model in models]
        for share in (runtime.menu.whole, *(share for split in runtime.splits for share in split)):
            for model, pool in zip(models, pools, strict=True):
                runtime.open_runner(model, share, pool).close()
        assert reads == ["target.safetensors", "draft.safetensors"] and programs.num_unloaded_bytes(models) == 0
        runtime.close()
        assert programs.num_unloaded_bytes(models) == num_bytes, "nothing is held once the runtime is closed"

    def test_pools_are_of_the_engine_s_dtype_and_can_be_filled(self, torch_engine: Path) -> None:
        _, models = pair_of(torch_engine)
        runtime = CudaRuntime(CPU, TorchPrograms(no_weights), models, BLOCK_SIZE, dtype="bf16", shares=None)
        pool = runtime.open_pool(models.target, 3)
        assert pool.storage.dtype == torch.bfloat16
        assert pool.storage.nbytes == 4 * runtime.bytes_per_block(models.target.spec)
        runtime.fill_pool(pool, np.arange(models.target.spec.head_dim, dtype=np.float32))
        assert pool.storage[0, 1, 0, 2, 1].tolist() == list(range(models.target.spec.head_dim))


class TestOnSharesOfAFakedGpu:
    @pytest.fixture
    def opened(self, torch_engine: Path) -> tuple[CudaRuntime, FakeCuda, FakeDriver, ModelPair]:
        _, models = pair_of(torch_engine)
        cuda, driver = FakeCuda(), FakeDriver()
        programs = TorchPrograms.of_directory(torch_engine, "fp32", CPU, models.target)
        shares = open_menu(cuda, 0, lambda: driver)
        return CudaRuntime(CPU, programs, models, BLOCK_SIZE, dtype="fp32", shares=shares), cuda, driver, models

    @pytest.mark.parametrize("seed", range(3))
    def test_every_use_of_a_pool_is_ordered_whichever_thread_steps(
        self, opened, seed: int, requests, expected, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runtime, cuda, driver, models = opened
        prepare = TorchSegment.prepare

        def recorded(self: TorchSegment, *arguments: Any, **options: Any) -> Any:
            launch, tensors = prepare(self, *arguments, **options), arguments[0]
            pool = tensors[f"k_pool.{self.spec.first_layer}"].untyped_storage().data_ptr()
            return lambda: (cuda.touch(f"pool at {pool}"), launch())

        sample = TorchSampler.sample

        def sampled(self: TorchSampler, *arguments: Any) -> np.ndarray:
            cuda.touch("samples")
            return sample(self, *arguments)

        monkeypatch.setattr(TorchSegment, "prepare", recorded)
        monkeypatch.setattr(TorchSampler, "sample", sampled)
        split = "16/116"
        random = random_everything(seed)

        def change(decision: Any) -> Any:
            changed = random(decision)
            return changed if changed.partition == WHOLE else replace(changed, partition=split)

        policy = Forced(parse_policy("fixed:4", guessed), change)
        policy.partitions = (WHOLE, split)
        engine = assemble_on(runtime, models, policy, EngineConfig.from_options(**CONFIG), on_close=runtime.close)
        assert set(engine.step_runner.partitions) == {WHOLE, split}, "only what the policy may use is opened"
        tokens = {}
        for part in (requests[:2], requests[2:]):
            with ThreadPoolExecutor(1) as other_thread:
                tokens |= other_thread.submit(drive, engine, part).result().tokens
        assert tokens == expected
        cuda.check_order()
        streams = {use.stream for uses in cuda.uses.values() for use in uses}
        whole, target = runtime.menu.whole.stream.cuda_stream, runtime.menu.splits[1][1].stream.cuda_stream
        assert {use.stream for use in cuda.uses["samples"]} == {whole, target}, "where the logits were made"
        assert len(streams) == 3 and 0 not in streams, "the whole device and two shares, never the default stream"
        engine.close()
        assert not driver.contexts and not driver.streams

    def test_memory_that_pools_may_take(self, opened) -> None:
        runtime, _, _, models = opened
        weights = sum(model.num_weight_bytes for model in models)
        assert runtime.free_bytes() == (3 << 30) + (500 << 20) - weights
        kv_bytes = [runtime.kv_bytes(count, EngineConfig(max_num_seqs=4)) for count in (1, 2)]
        assert 0 < kv_bytes[1] < kv_bytes[0] < runtime.free_bytes(), "captured calls of a split take memory, too"
        runtime.open_runner(models.draft, runtime.menu.whole, runtime.open_pool(models.draft, 4)).close()
        assert runtime.free_bytes() == (3 << 30) + (500 << 20) - models.target.num_weight_bytes
        runtime.synchronize()
        runtime.close()

    def test_the_pools_of_a_closed_engine_are_free_for_the_next(self, torch_engine: Path) -> None:
        def num_pools() -> int:
            return sum(type(each) is CudaKvPool for each in gc.get_objects())

        manifest = EngineManifest.load(torch_engine)
        with closing(open_runtime(torch_engine, manifest, EngineConfig())) as runtime:
            gc.collect()
            gc.disable()
            try:
                before = num_pools()
                engine_on(runtime, torch_engine, manifest, EngineConfig.from_options(policy="none", **CONFIG)).close()
                assert num_pools() > before, "cycles keep them"
                runtime.free_bytes()
                assert num_pools() == before
            finally:
                gc.enable()

    @pytest.mark.parametrize(
        ("target_mib", "draft_mib", "expected"),
        [(16_000, 1_200, "32/100"), (64_000, 1_200, "16/116"), (16_000, 8_000, "64/68"), (16_000, 500, "16/116")],
    )
    def test_the_split_to_guess_follows_what_the_models_read(self, opened, target_mib, draft_mib, expected) -> None:
        runtime, _, _, models = opened
        sized = ModelPair(
            *(
                replace(model, weights=FileSpec(name, "0" * 64, mib << 20))
                for model, name, mib in zip(models, ("t", "d"), (target_mib, draft_mib), strict=True)
            )
        )
        guessing = CudaRuntime(CPU, TorchPrograms(no_weights), sized, BLOCK_SIZE, dtype="fp32", shares=runtime.shares)
        assert split_name(*guessing.splits[0]) == expected and set(guessing.splits) == set(guessing.menu.splits)
        runtime.close()

    @pytest.mark.parametrize("names", [(), ("16/116",), ("8/124", "16/116", "32/100", "64/68")])
    def test_green_contexts_without_profiles_are_refused(
        self, torch_engine: Path, names: tuple[str, ...], caplog
    ) -> None:
        _, models = pair_of(torch_engine)
        buckets = tuple(BucketSpec("decode", {}, name) for name in ("", *names))
        compiled = [replace(m, segments=tuple(replace(s, buckets=buckets) for s in m.segments)) for m in models]
        shares = open_menu(FakeCuda(), 0, FakeDriver)
        programs, pair = TorchPrograms(no_weights), ModelPair(*compiled)
        found = CudaRuntime(CPU, programs, pair, BLOCK_SIZE, dtype="fp32", shares=shares).splits
        assert {split_name(*split) for split in found} == {*names}
        assert ("so every step is serial (the engines have no profiles" in caplog.text) == (names == ())
        assert ("faser build --splits" in caplog.text) == (len(names) < 4)

    def test_a_runner_knows_the_sms_of_its_share(self, opened) -> None:
        runtime, _, _, models = opened
        pool = runtime.open_pool(models.target, 4)
        sizes = {}
        for share in (runtime.menu.whole, *runtime.menu.splits[1]):
            runner: Any = runtime.open_runner(models.target, share, pool)
            sizes[share.name] = {program.num_sms for program in runner._programs}
        assert sizes == {"whole": {132}, "draft": {16}, "target": {116}}
        runtime.close()


class TestWhatCannotRun:
    def test_tensorrt_without_a_gpu(self, torch_engine: Path) -> None:
        manifest = EngineManifest.load(torch_engine)
        for runtime in ("tensorrt", "tensorrt_rtx"):
            with pytest.raises(ConfigError, match=f"runtime = '{runtime}': torch .* sees no CUDA device"):
                open_cuda_runtime(torch_engine, replace(manifest, runtime=runtime))

    def test_a_runtime_whose_library_is_missing_names_the_extra(self, torch_engine: Path) -> None:
        code = (
            "import sys\nsys.modules['torch'] = None\n"
            "from pathlib import Path\nfrom faser_backend.core.config import EngineConfig\n"
            "from faser_backend.serving.compose import build_engine\n"
            "build_engine(Path(sys.argv[1]), EngineConfig())"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(torch_engine)], capture_output=True, text=True, check=False
        )
        assert "ConfigError: runtime = 'torch': needs torch" in done.stderr and "faser-backend[torch]" in done.stderr

    def test_a_cpu_engine_loads_none_of_it(self, checkpoints: tuple[Path, Path]) -> None:
        code = (
            "import sys\nfrom pathlib import Path\nfrom faser_backend.core.config import EngineConfig\n"
            "from faser_backend.serving.compose import build_engine\n"
            "build_engine(Path(sys.argv[1]), EngineConfig()).close()\n"
            "print(sorted({'torch', 'triton', 'cuda', 'tensorrt', 'tensorrt_rtx'} & set(sys.modules)))"
        )
        directory = build(checkpoints, "llvm")
        done = subprocess.run([sys.executable, "-c", code, str(directory)], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"


def test_an_open_runtime_carries_several_engines(torch_engine: Path, requests, expected, caplog) -> None:
    """Profiles and benchmarks do this: engines one after the other on weights that are loaded once."""
    caplog.set_level(logging.INFO)
    manifest, _ = pair_of(torch_engine)
    runtime = open_runtime(torch_engine, manifest, EngineConfig())
    for policy in ("none", "fixed:2"):
        config = EngineConfig.from_options(policy=policy, **CONFIG)
        engine = prepared(engine_on(runtime, torch_engine, manifest, config))
        assert drive(engine, requests).tokens == expected
        engine.close()
    runtime.close()
