"""Rows with LoRA adapters on runtime `llvm`: equal to a merged model, and to decoding alone in any company."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from faser_backend.core.config import EngineConfig
from faser_backend.core.errors import RequestError
from faser_backend.core.request import Request, Sampling
from faser_backend.cpu import weights
from faser_backend.cpu.kernels import adapters
from faser_backend.engines.build import build_engines
from faser_backend.engines.lora import read_adapter
from faser_backend.pipeline.engine import Engine
from faser_backend.policy.block_manager import BlockManager
from faser_backend.serving.compose import build_engine
from tests.cpu.test_runner import NUM_BLOCKS, build, open_runner
from tests.support.adapters import ATTENTION, merged, write_adapter
from tests.support.harness import drive, request
from tests.support.tiny_models import VOCAB_SIZE, make_rows, reference_logits, run_all, write_checkpoint, write_draft

WIDTHS = {"hidden_size": 72, "intermediate_size": 104}
ADAPTERS = {
    "every": {"rank": 5, "lora_alpha": 10.0},
    "wide": {"rank": 40, "lora_alpha": 20.0, "scale": 0.12},
    "attention": {"rank": 16, "lora_alpha": 16.0, "modules": ATTENTION, "layers": (0, 2)},
    "down": {"rank": 1, "lora_alpha": 4.0, "modules": ("down_proj",), "layers": (1,)},
}


@pytest.fixture(autouse=True)
def every_model_is_worth_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "ONE_THREAD_BYTES", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    source = write_checkpoint(root / "source", **WIDTHS)
    build(source, root / "engine", exit_layers=(1,))
    build(source, root / "int8", weights="int8")
    draft = write_draft(source, root / "draft", noise=0.02)
    build_engines(source, draft, root / "pair", weights="fp32", kv_block_size=4, runtime="llvm")
    for seed, (name, options) in enumerate(ADAPTERS.items()):
        write_adapter(source, root / name, seed=seed, **options)
    return root


def logits_of(folder: Path, engine: str, names: list[str], chunk: int, num_threads: int = 2) -> np.ndarray:
    """Returns [N, 40, vocab_size] of one text under these adapters ("": none), read in chunks of one batch."""
    runner = open_runner(folder / engine, num_threads)
    stored = {name: runner.store_adapter(read_adapter(folder / name, runner.spec, 64)) for name in set(names) - {""}}
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


def test_logits_are_those_of_a_merged_model(folder: Path) -> None:
    found = logits_of(folder, "engine", list(ADAPTERS), 40)
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


def open_engine(folder: Path, policy: str, **options: object) -> Engine:
    lora = [f"{name}={folder / name}" for name in ADAPTERS]
    return build_engine(folder / "pair", EngineConfig.from_options(policy=policy, lora=lora, num_threads=2, **options))


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[int, dict[str, list[int]]]:
    """Returns the tokens of each request, decoded plainly and by itself."""
    engine, found = open_engine(folder, "none", enable_prefix_reuse=False), {}
    with pytest.raises(RequestError, match=r"lora_name = 'other': must be a loaded adapter: every, wide, attention"):
        engine.submit(request("x", [1], lora_name="other"))
    for seed in range(3):
        found[seed] = {one.request_id: drive(engine, [one]).tokens[one.request_id] for one in random_requests(seed)}
    engine.close()
    return found


@pytest.mark.parametrize("fault", ["", "prefixes shared by adapters", "adapters swapped"])
def test_tokens_are_those_of_decoding_alone(
    folder: Path, alone: dict[int, dict[str, list[int]]], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes the requests of each seed together, with drafts, in a small pool, prompts in chunks."""
    match, runs = BlockManager.match, adapters.adapter_runs
    if fault == "adapters swapped":
        monkeypatch.setattr(adapters, "adapter_runs", lambda of_rows: runs(of_rows[::-1]))
    elif fault:
        monkeypatch.setattr(BlockManager, "match", lambda self, tokens, size, root: match(self, tokens, size))
    found, totals = {}, np.zeros(3, np.int64)
    options = {"num_kv_blocks": 32, "max_num_seqs": 6, "max_prefill_tokens": 9}
    for seed in alone:
        engine = open_engine(folder, "fixed:3", pipeline=("serial", "auto")[seed % 2], **options)
        found[seed] = drive(engine, random_requests(seed), seed=seed).tokens
        metrics = engine.metrics()
        totals += metrics.num_accepted, metrics.num_preemptions, metrics.num_reused_blocks
        engine.close()
    assert (found == alone) == (not fault) and totals.all(), totals
