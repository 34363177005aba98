"""A GPU's memory is planned before anything is allocated: the rest is for KV blocks."""

import gc
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from faser_backend.cli.doctor import memory_report
from faser_backend.core.config import EngineConfig
from faser_backend.core.errors import ConfigError
from faser_backend.core.model import ModelSpec
from faser_backend.cpu.kv_pool import KvPool
from faser_backend.cpu.noise import noise_table
from faser_backend.cuda.call_shapes import FILTER_ROWS, MAX_GRAPH_ROWS
from faser_backend.cuda.draft_loop import TorchDraftLoop
from faser_backend.cuda.memory_plan import MemoryPlan, plan_memory
from faser_backend.cuda.runner import CudaRunner
from faser_backend.cuda.sampler import RowParameters, TorchNoise, TorchSampler, keep_top, perturbed
from faser_backend.cuda.torch_weights import load_weights
from faser_backend.device.runtime import ModelPair
from faser_backend.engines.build import build_engines
from faser_backend.lab.shapes import PAIRS, layer_weights
from faser_backend.manifest import EngineManifest, FileSpec, ModelEngine, SegmentSpec
from faser_backend.policy.early_exit import NUM_CANDIDATES
from faser_backend.serving.compose import build_engine
from tests.cuda.test_torch_eagle3 import Runners
from tests.engines.test_eagle3 import BLOCK_SIZE, Built
from tests.support.fake_cuda import FakeDriver
from tests.support.ort_engines import ACTIVATION_BYTES, OrtPrograms, graphs_are_engines
from tests.support.tiny_models import build_with_draft, write_checkpoint
from tests.support.torch_engines import CPU, open_torch_runner, write_torch_engine

INPUTS, TEMPORARIES = "inputs of captured calls", "temporaries of captured calls"
SCORES = "scores, and top-k and top-p of some rows at once"
GIB = 2**30
H100 = 79 * GIB  # free on a card of 80 GB


def engine_of(spec: ModelSpec, name: str) -> ModelEngine:
    num_weights = spec.num_layers * layer_weights(spec)
    num_weights += (1 if spec.tie_word_embeddings else 2) * spec.vocab_size * spec.hidden_size
    file = FileSpec(f"{name}.safetensors", "0" * 64, 2 * num_weights)
    return ModelEngine(spec, file, (SegmentSpec(file, 0, spec.num_layers, (), ()),))


def pair_of(name: str, *, max_context: int = 8192, halved: bool = False) -> list[ModelEngine]:
    """Returns the target, halved if two GPUs share it, and its draft."""
    pair = PAIRS[name]
    target = replace(pair.target, max_context=max_context)
    if halved:
        parts = {"num_heads": 32, "num_kv_heads": 4, "intermediate_size": 14336, "vocab_size": 64128}
        target = replace(target, **parts)
    return [engine_of(target, "target"), engine_of(replace(pair.draft, max_context=max_context), "draft")]


def planned(models: list[ModelEngine], *, max_prefill_tokens: int = 1024, **options) -> MemoryPlan:
    config = EngineConfig(max_num_seqs=32, max_prefill_tokens=max_prefill_tokens)
    known = {"dtype": "bf16", "kv_block_size": 16, "free_bytes": H100, "num_partitions": 2, **options}
    return plan_memory(models, config, unloaded_bytes=sum(model.num_weight_bytes for model in models), **known)


def live_bytes() -> int:
    """Returns the bytes of all tensors that are in use."""
    gc.collect()
    storages = [each.untyped_storage() for each in gc.get_objects() if type(each) is torch.Tensor]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def captured_bytes(runner: CudaRunner | TorchDraftLoop, *menu: int) -> int:
    """Captures the menu of a runner or a loop. Returns the bytes that it keeps."""
    before = live_bytes()
    runner.capture_menu(*menu)
    return live_bytes() - before


@pytest.mark.parametrize(
    ("name", "halved", "weights_gib", "most_gib", "fewest_tokens"),
    [
        ("qwen3-8b/0.6b", False, 16.4, 5.5, 200_000),
        ("qwen3-32b/0.6b", False, 62.1, 6.1, 20_000),
        ("llama3.3-70b/3.2-1b", True, 67.8, 5.5, 29_000),
    ],
)
def test_three_sizes_fit_an_80_gb_card_with_room_for_contexts(
    name: str, halved: bool, weights_gib: float, most_gib: float, fewest_tokens: int
) -> None:
    plan = planned(pair_of(name, halved=halved))
    lines = {what: num_bytes / GIB for what, num_bytes in plan.lines.items()}
    assert lines["weights"] == pytest.approx(weights_gib, rel=0.03)
    beside = plan.reserved_bytes / GIB - lines["weights"]
    assert 1.5 < beside < most_gib
    assert plan.num_blocks * 16 > fewest_tokens
    assert plan.reserved_bytes + plan.kv_bytes <= plan.free_bytes


def test_what_lines_depend_on() -> None:
    models = pair_of("qwen3-8b/0.6b")
    plan, whole = planned(models), planned(models, num_partitions=1)
    assert plan.reserved_bytes > whole.reserved_bytes
    long = planned(pair_of("qwen3-8b/0.6b", max_context=40_960))
    assert long.lines[INPUTS] == pytest.approx(5 * plan.lines[INPUTS], rel=0.1), "tables are full-width"
    assert planned(models, max_prefill_tokens=8192).reserved_bytes > plan.reserved_bytes
    assert planned(models, free_bytes=10 * GIB).kv_bytes == 0
    assert plan.lines["adapters"] == EngineConfig().lora_cache_bytes
    assert plan.lines["logits"] == 2 * MAX_GRAPH_ROWS * 151_936 * 4


def test_compiled_engines_say_what_they_compute_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All shares use the same memory, and weights of opened engines are not counted again."""
    graphs_are_engines(monkeypatch)
    directory = build_with_draft(tmp_path, runtime="tensorrt_rtx", exit_layers=(1,))
    manifest = EngineManifest.load(directory)
    models = ModelPair(manifest.target, manifest.draft)
    programs = OrtPrograms(directory, models)
    assert programs.num_unloaded_bytes(models.present) == sum(model.num_weight_bytes for model in models.present)
    num_bytes = programs.activation_bytes(models.present)
    assert num_bytes == 2 * ACTIVATION_BYTES and programs.num_unloaded_bytes(models.present) == 0
    for num_partitions in (1, 3):
        plan = planned(models.present, compiled_bytes=num_bytes, num_partitions=num_partitions, dtype="fp32")
        assert [plan.lines[what] for what in plan.lines if "temporaries" in what] == [num_bytes, 0]
    engine = build_engine(directory, EngineConfig(policy="none"))
    with pytest.raises(ConfigError, match="computes no adapters; use runtime llvm or torch"):
        engine.adapters.load("red", {})
    engine.close()


def test_inputs_logits_and_tables_are_what_the_plan_says(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", max_position_embeddings=4096)
    models, bare = [write_torch_engine(source, tmp_path, exit_layers=(1,))], tmp_path / "draft"
    models.append(write_torch_engine(source, bare, name="draft"))
    target, draft = open_torch_runner(models[0], tmp_path, 8, 4), open_torch_runner(models[1], bare, 8, 4)
    options = {"dtype": "fp32", "kv_block_size": 4, "num_partitions": 1}
    plan = planned([replace(models[0], segments=models[1].segments * 2)], **options)
    found = captured_bytes(target, 0) - plan.lines["logits"]
    assert 0.9 * plan.lines[INPUTS] < found <= 1.02 * plan.lines[INPUTS]
    plan, twice = planned(models, **options), planned(models, **{**options, "num_partitions": 2})
    found += captured_bytes(target, NUM_CANDIDATES) + captured_bytes(draft, 0) - plan.lines["logits"] // 2
    found += captured_bytes(TorchDraftLoop(draft, TorchSampler(97, 32, CPU)), 32, NUM_CANDIDATES)
    assert 0.9 * plan.lines[INPUTS] < found <= plan.lines[INPUTS]
    assert twice.lines[SCORES] > plan.lines[SCORES] > planned(models[:1], **options).lines[SCORES], "a graph pool each"
    weights = load_weights(bare / "draft.safetensors", models[1].spec, "fp32", CPU)
    found = 2 * (weights.rope_cos.nbytes + weights.rope_sin.nbytes) + noise_table(97)[0].nbytes
    assert found <= plan.lines["tables of rotations and noise"] <= 1.1 * found
    pools = target.pool, draft.pool
    assert sum(pool.logits.nbytes for pool in pools if pool.logits is not None) == plan.lines["logits"]
    one, most, more = (pools[0].logits_of(count, 97) for count in (1, 512, 513))
    assert (one.shape, most.shape) == ((1, 97), (512, 97)) and one.data_ptr() == most.data_ptr() != more.data_ptr()


def test_a_draft_head_and_what_it_reads_are_planned_for(tmp_path: Path) -> None:
    """Blocks hold the features, which the head's pool lacks; inputs and hidden states count as for any model."""
    built = Built(tmp_path, runtime="torch", exit_layers=(4,))
    assert built.manifest.draft is not None
    models = [built.manifest.target, built.manifest.draft]
    runners = Runners(built.directory)
    captured = captured_bytes(runners.target, NUM_CANDIDATES) + captured_bytes(runners.head, 0)
    options = {"dtype": "fp32", "kv_block_size": BLOCK_SIZE, "num_partitions": 1}
    plan = planned(models, **options)
    target = runners.target.pool
    pools = target.storage.nbytes + target.features.nbytes + runners.head.pool.storage.nbytes
    assert plan.block_bytes * (runners.target.pool.num_blocks + 1) == pools
    assert runners.head.pool.features is runners.features and runners.features.nbytes > 0
    captured -= plan.lines["logits"]
    assert 0.6 * plan.lines[INPUTS] < captured <= plan.lines[INPUTS], "beside a draft loop"
    decoders = planned([models[0], replace(models[1], spec=replace(models[1].spec, family="llama"))], **options)
    assert plan.lines[TEMPORARIES] > decoders.lines[TEMPORARIES], "features side by side"
    assert "KV blocks" in memory_report(built.directory, gpu_gib=80)[-1]


def test_rows_are_filtered_some_at_a_time_with_the_same_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    count = FILTER_ROWS + 9
    keys, weights = torch.arange(count), torch.ones(count)
    filters = torch.full((count,), 20), torch.full((count,), 0.9, dtype=torch.float64), torch.full((count,), -3.0)
    rows = RowParameters(keys, keys, weights * 0.7, weights, *filters)
    logits, noise = torch.randn(count, 97), TorchNoise(97, torch.device("cpu"))
    sizes = []
    monkeypatch.setattr(
        "faser_backend.cuda.sampler.keep_top", lambda *given: sizes.append(len(given[0])) or keep_top(*given)
    )
    every = torch.arange(len(logits))
    together = perturbed(logits, rows, noise, every)
    assert sizes == [FILTER_ROWS, 9]
    for index in (0, FILTER_ROWS - 1, FILTER_ROWS, FILTER_ROWS + 8):
        one = torch.tensor([index])
        alone = perturbed(logits[one], rows.take(one), noise, torch.tensor([0]))
        torch.testing.assert_close(alone[0], together[index], rtol=0, atol=0)


def test_doctor_prints_the_plan_of_an_engine_directory(tmp_path: Path) -> None:
    engine = build_with_draft(tmp_path, runtime="torch")
    lines = memory_report(engine, gpu_gib=80)
    assert lines[0].split()[:3] == ["81920", "MiB", "of"] and "KV blocks: at most" in lines[-1]
    assert memory_report(engine, load_driver=FakeDriver)[0].split()[0] == "81559"
    build_engines(tmp_path / "source", tmp_path / "draft", engine, kv_block_size=4)
    with pytest.raises(ConfigError, match=r"--gpu-gib = 80: engines of runtime 'llvm' run on a CPU"):
        memory_report(engine, gpu_gib=80)


@pytest.mark.parametrize("cache", ["fp16", "fp32"])
def test_doctor_prints_what_an_engine_of_a_cpu_takes(tmp_path: Path, run, cache: str) -> None:
    engine = build_with_draft(tmp_path, kv_cache_dtype=cache, max_context=64)
    built = EngineManifest.load(engine)
    assert built.draft is not None
    status, out, _ = run("doctor", "--engine-dir", engine, "--num-kv-blocks", 40)
    assert status == 0 and f"40 KV blocks of 4 tokens, 160 in all: 2.5 requests of {64} tokens" in out
    pools = [KvPool(model.spec, 40, 4, dtype=cache) for model in (built.target, built.draft)]
    for name, pool in zip(("target", "draft"), pools, strict=True):
        assert f"weights of the {name}, mapped" in out
        assert f" {pool.storage.nbytes // 160} bytes of a token in the {name}'s cache ({cache})" in out
    assert re.search(rf"{sum(pool.storage.nbytes for pool in pools) / 2**20:.1f} MiB  40 KV blocks", out)
    with pytest.raises(ConfigError, match="num_kv_blocks = 3: one context of 64 tokens needs at least 16 blocks of 4"):
        memory_report(engine, config=EngineConfig(num_kv_blocks=3))
