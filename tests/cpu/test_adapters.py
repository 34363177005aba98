"""Rows with LoRA adapters, on both runtimes: equal to a merged model, and to decoding alone in any company."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from faser_backend.core.adapter import module_shapes, read_tensors
from faser_backend.core.config import EngineConfig
from faser_backend.core.errors import RequestError
from faser_backend.core.model import ModelSpec
from faser_backend.core.request import Request, Sampling
from faser_backend.engines.build import build_engines
from faser_backend.engines.lora import read_adapter
from faser_backend.manifest import EngineManifest
from faser_backend.pipeline import verify
from faser_backend.pipeline.adapters import Adapters
from faser_backend.pipeline.engine import Engine
from faser_backend.policy.block_manager import BlockManager
from faser_backend.serving.compose import build_engine
from tests.cpu.test_runner import NUM_BLOCKS, build, open_runner
from tests.support.adapters import ATTENTION, as_tensors, merged, write_adapter
from tests.support.harness import drive, request
from tests.support.tiny_models import VOCAB_SIZE, make_rows, reference_logits, run_all, write_checkpoint, write_draft
from tests.support.torch_engines import open_torch_runner

pytestmark = pytest.mark.usefixtures("every_model_is_worth_two_threads")
Alone = tuple[str, dict[int, dict[str, list[int]]]]
WIDTHS = {"hidden_size": 72, "intermediate_size": 104}
ADAPTERS = {
    "every": {"rank": 5, "lora_alpha": 10.0},
    "wide": {"rank": 40, "lora_alpha": 20.0, "scale": 0.12},
    "attention": {"rank": 16, "lora_alpha": 16.0, "modules": ATTENTION, "layers": (0, 2)},
    "down": {"rank": 1, "lora_alpha": 4.0, "modules": ("down_proj",), "layers": (1,)},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    source = write_checkpoint(root / "source", **WIDTHS)
    build(source, root / "engine", exit_layers=(1,))
    build(source, root / "int8", weights="int8")
    draft = write_draft(source, root / "draft", noise=0.02)
    for runtime in ("llvm", "torch"):
        build_engines(source, draft, root / runtime, weights="fp32", exit_layers=(1,), kv_block_size=4, runtime=runtime)
    for seed, (name, options) in enumerate(ADAPTERS.items()):
        write_adapter(source, root / name, seed=seed, **options)
    return root


def logits_of(folder: Path, engine: str, names: list[str], chunk: int, num_threads: int = 2) -> np.ndarray:
    """Returns [N, 40, vocab_size] of one text under these adapters ("": none), read in chunks of one batch."""
    if engine == "torch":
        runner = open_torch_runner(EngineManifest.load(folder / engine).target, folder / engine, NUM_BLOCKS, 4)
    else:
        runner = open_runner(folder / engine, num_threads)
    stored = {name: runner.store_adapter(read_adapter(folder / name, runner.spec, 64)) for name in set(names) - {""}}
    assert all(100 < adapter.num_bytes < 1 << 20 for adapter in stored.values())
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 40)
    tables = np.random.default_rng(9).permutation(NUM_BLOCKS)[: 10 * len(names)].reshape(len(names), 10)
    parts = []
    for first in range(0, 40, chunk):
        count = min(chunk, 40 - first)
        batch = make_rows([tokens] * len(names), [first] * len(names), [count] * len(names), tables)
        batch.adapters = [stored.get(name) for name in names]
        parts.append(run_all(runner, batch).reshape(len(names), count, -1))
    runner.close()
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("engine", ["engine", "torch"])
def test_logits_are_those_of_a_merged_model(folder: Path, engine: str) -> None:
    found = logits_of(folder, engine, list(ADAPTERS), 40)
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 40)
    for logits, name in zip(found, ADAPTERS, strict=True):
        wanted = reference_logits(merged(folder / "source", folder / name), tokens)
        assert np.abs(logits - wanted).max() < 1e-3 < np.abs(found[0] - logits).max() + (name == "every")


@pytest.mark.parametrize("engine", ["engine", "int8"])
def test_a_row_has_the_same_bits_in_any_company_on_any_threads(folder: Path, engine: str) -> None:
    names = ["every", "", "wide", "every", "down", "attention"]
    alone = {name: logits_of(folder, engine, [name], 1, 1)[0] for name in set(names)}
    for num_threads, chunk in ((1, 40), (2, 40), (2, 7), (3, 1)):
        for order in (names, names[::-1]):
            found = logits_of(folder, engine, order, chunk, num_threads)
            for logits, name in zip(found, order, strict=True):
                np.testing.assert_array_equal(logits, alone[name])


def random_requests(seed: int) -> list[Request]:
    """Returns requests that share prompts, under different adapters or none."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, VOCAB_SIZE, 30).tolist() for _ in range(2)]
    found = []
    for index in range(10):
        prompt = texts[index % 2][: int(rng.integers(10, 31))] + rng.integers(0, VOCAB_SIZE, 2).tolist()
        sampling = Sampling(temperature=float(rng.choice([0.0, 0.9])), seed=index)
        lora = str(rng.choice(["", *ADAPTERS]))
        found.append(request(f"{index}", prompt, int(rng.integers(5, 20)), sampling=sampling, lora_name=lora))
    return found


def open_engine(folder: Path, runtime: str, policy: str, **options: object) -> Engine:
    lora = [f"{name}={folder / name}" for name in ADAPTERS]
    return build_engine(folder / runtime, EngineConfig.from_options(policy=policy, lora=lora, num_threads=2, **options))


@pytest.fixture(scope="module", params=["llvm", "torch"])
def alone(folder: Path, request: pytest.FixtureRequest) -> Alone:
    """Returns a runtime, and the tokens of each request on it, decoded plainly and by itself."""
    engine, found = open_engine(folder, request.param, "none", enable_prefix_reuse=False), {}
    with pytest.raises(RequestError, match=r"lora_name = 'other': must be a loaded adapter: every, wide, attention"):
        engine.submit(Request("x", np.array([1]), 1, lora_name="other"))
    for seed in range(3):
        found[seed] = {one.request_id: drive(engine, [one]).tokens[one.request_id] for one in random_requests(seed)}
    engine.close()
    return request.param, found


def sent(requests: list[Request], spec: ModelSpec, folder: Path) -> list[Request]:
    """Returns the requests with task ids in place of names; the first of an adapter sends it."""
    found, names = [], list(ADAPTERS)
    for each in requests:
        tensors = {}
        if each.lora_name and all(each.lora_name != other.lora_name for other in requests[: len(found)]):
            tensors = as_tensors(read_adapter(folder / each.lora_name, spec, 64))
        task_id = names.index(each.lora_name) + 7 if each.lora_name else 0
        found.append(replace(each, lora_name="", lora_task_id=task_id, **tensors))
    return found


def test_sent_adapters_give_the_tokens_of_loaded_ones(folder: Path, alone: Alone) -> None:
    options = {"num_kv_blocks": 32, "max_num_seqs": 6, "max_prefill_tokens": 9, "num_threads": 2}
    engine = build_engine(folder / alone[0], EngineConfig.from_options(policy="fixed:3", **options))
    spec = EngineManifest.load(folder / "llvm").target.spec
    for seed, expected in alone[1].items():
        assert drive(engine, sent(random_requests(seed), spec, folder), seed=seed).tokens == expected
    assert engine.metrics().num_reused_blocks and engine.adapters.num_sent_bytes
    tensors = as_tensors(read_adapter(folder / "every", spec, 64))
    weights, config = tensors.values()
    for change, message in (
        ({}, "LoRA task 99 not found in cache. Please send LoRA weights with request"),
        ({"lora_weights": weights[:, :99]}, r"lora_weights = .*needs \d+ finite numbers"),
        ({"lora_weights": np.full_like(weights, np.inf)}, "finite numbers"),
        ({"lora_config": config[1:]}, r"lora_config = .*must be \[21, 3\]"),
        ({"lora_config": np.repeat(config[:1], 21, axis=0)}, "given twice"),
        *(
            ({"lora_config": np.add(config, each)}, "layer 0 to 2, rank 1")
            for each in ((8, 0, 0), (0, 3, 0), (0, 0, 60))
        ),
        ({"lora_config": np.append(config[:20], [[4, 0, 2**31 - 1]], axis=0)}, "rank 1 to 64"),
    ):
        bad = request("bad", [1], lora_task_id=99, **(tensors | change if change else {}))
        with pytest.raises(RequestError, match=message):
            engine.submit(bad)
    assert drive(engine, [request("good", [1], 2)]).tokens["good"]
    engine.close()


def test_a_joined_module_is_its_parts(folder: Path) -> None:
    spec, rng = EngineManifest.load(folder / "llvm").target.spec, np.random.default_rng(0)
    shapes = module_shapes(spec)
    a, b = rng.standard_normal((2, 72)), rng.standard_normal((sum(shapes[name][1] for name in "qkv"), 2))
    row = np.concatenate([a.reshape(-1), b.reshape(-1)]).astype(np.float16)
    found = read_tensors(row[None, None], np.array([[[0, 1, 2]]]), spec, 2)
    assert list(found) == [(1, "q"), (1, "k"), (1, "v")]
    np.testing.assert_array_equal(np.concatenate([pair[1] for pair in found.values()], axis=1), b.T.astype(np.float16))
    assert all((pair[0] == a.T.astype(np.float16)).all() for pair in found.values())


@pytest.mark.parametrize("seed", range(3))
def test_the_memory_of_sent_adapters_is_bounded_and_what_is_in_use_stays(folder: Path, seed: int) -> None:
    spec, rng = EngineManifest.load(folder / "llvm").target.spec, np.random.default_rng(seed)
    matrices = [read_adapter(folder / name, spec, 64) for name in ADAPTERS]

    def stored(matrices: Any) -> Any:
        return SimpleNamespace(num_bytes=sum(part.nbytes for pair in matrices.values() for part in pair))

    most = max(stored(each).num_bytes for each in matrices)
    target: Any = SimpleNamespace(spec=spec, store_adapter=stored)
    wide: Any = SimpleNamespace(spec=spec, store_adapter=lambda matrices: SimpleNamespace(num_bytes=most + 1))
    with pytest.raises(RequestError, match=f"{most + 1} bytes"):  # as it is stored, not as it was sent
        Adapters(wide, 64, most).acquire(request("wide", [1], lora_task_id=1, **as_tensors(matrices[0])))
    adapters, live, seen = Adapters(target, 64, most), {}, set()
    for step in range(200):
        if live and rng.random() < 0.4:
            ended = str(rng.choice(list(live)))
            del live[ended]
            adapters.release([ended])
        task_id, tensors = int(rng.integers(1, 6)), as_tensors(matrices[rng.integers(len(matrices))])
        try:
            more = tensors if rng.random() < 0.7 else {}
            named, adapter = adapters.acquire(request(f"{step}", [1], lora_task_id=task_id, **more))
            assert named.lora_weights is None and named.lora_name
            live[f"{step}"] = task_id, adapter
        except RequestError as error:
            known = ("not found in cache", "no done tasks to evict", "in use with other weights")
            seen |= {words for words in known if words in str(error)}
        assert adapters.num_sent_bytes <= most
        for task_id, adapter in live.values():
            assert adapters.acquire(request("again", [1], lora_task_id=task_id))[1] is adapter
        adapters.release(["again"])
    assert len(seen) == 3


@pytest.mark.parametrize("fault", ["", "prefixes shared by adapters", "adapters swapped"])
def test_tokens_are_those_of_decoding_alone(
    folder: Path, alone: Alone, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes the requests of each seed together, with drafts, in a small pool, prompts in chunks."""
    match, verify_rows = BlockManager.match, verify.verify_rows
    if fault == "adapters swapped":
        swapped = lambda *given: replace(rows := verify_rows(*given), adapters=rows.adapters[::-1])  # noqa: E731
        monkeypatch.setattr(verify, "verify_rows", swapped)
    elif fault:
        monkeypatch.setattr(BlockManager, "match", lambda self, tokens, size, root: match(self, tokens, size))
    found, totals = {}, np.zeros(3, np.int64)
    options = {"num_kv_blocks": 32, "max_num_seqs": 6, "max_prefill_tokens": 9}
    for seed in alone[1]:
        engine = open_engine(folder, alone[0], "fixed:3", pipeline=("serial", "auto")[seed % 2], **options)
        found[seed] = drive(engine, random_requests(seed), seed=seed).tokens
        metrics = engine.metrics()
        totals += metrics.num_accepted, metrics.num_preemptions, metrics.num_reused_blocks
        engine.close()
    assert (found == alone[1]) == (not fault) and totals.all(), totals
