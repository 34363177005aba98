"""EAGLE-3 heads of runtime torch on torch's CPU device: rows and chains against a dense reference, in every format.

Whole engines with such heads are in test_torch_eagle3_drafting.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from faser_backend.core.batch import RowBatch
from faser_backend.core.errors import ConfigError
from faser_backend.cuda.call_shapes import MAX_PROMPT_ROWS
from faser_backend.cuda.runtime import CudaRuntime
from faser_backend.cuda.segment import ProgramSource
from faser_backend.cuda.torch_programs import TorchPrograms
from faser_backend.cuda.torch_weights import HeadTensors
from faser_backend.device.runtime import ModelPair
from faser_backend.engines.build import build_engines
from faser_backend.manifest import EngineManifest
from tests.engines.test_eagle3 import (
    BLOCK_SIZE,
    CONFIGS,
    MAX_ERROR,
    NUM_BLOCKS,
    Built,
    HeadReader,
    check_rows_on_features,
    same_logits,
    shuffled_tables,
)
from tests.support.eagle3_models import FEATURE_LAYERS, NUM_TARGET_LAYERS, write_published
from tests.support.tiny_models import VOCAB_SIZE, make_rows, run_all, write_checkpoint
from tests.support.torch_engines import CPU, NUM_SMS


@pytest.fixture(scope="module", params=CONFIGS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(tmp_path_factory.mktemp("eagle3"), CONFIGS[request.param], runtime="torch", exit_layers=(4,))


@pytest.fixture(scope="module")
def gqa(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(tmp_path_factory.mktemp("eagle3"), runtime="torch")


class Runners(HeadReader):
    """Target and head of an engine directory, and the features that they share. programs: None = runtime torch's."""

    def __init__(self, directory: Path, num_blocks: int = NUM_BLOCKS, programs: ProgramSource | None = None) -> None:
        manifest = EngineManifest.load(directory)
        assert manifest.draft is not None
        models = ModelPair(manifest.target, manifest.draft)
        self.programs: Any = programs or TorchPrograms.of_directory(directory, manifest.dtype, CPU, models.target)
        runtime = CudaRuntime(CPU, self.programs, models, BLOCK_SIZE, dtype=manifest.dtype, shares=None)
        pools = [runtime.open_pool(model, num_blocks) for model in models.present]
        self.features = pools[1].features = pools[0].features
        whole = runtime.menu.whole
        self.head: Any = runtime.open_runner(manifest.draft, whole, pools[1])  # the head is opened first
        self.target: Any = runtime.open_runner(manifest.target, whole, pools[0])

    def features_of(self, num_tokens: int, table: np.ndarray) -> np.ndarray:
        """Returns the features [num_tokens, 3 * hidden_size] of the sequence with this block table."""
        blocks, offsets = np.divmod(np.arange(num_tokens), BLOCK_SIZE)
        return self.features[table[blocks], offsets].flatten(1).float().numpy()


def test_rows_on_the_target_s_features_equal_a_dense_run(built: Built) -> None:
    """Calls are padded here."""
    runners = Runners(built.directory)
    tokens, tables = check_rows_on_features(built, runners)
    assert built.manifest.target.spec.feature_layers == FEATURE_LAYERS
    is_written = np.zeros((NUM_BLOCKS, BLOCK_SIZE), np.bool_)
    for t, table in zip(tokens, tables, strict=True):
        is_written[table[np.arange(t.size - 1) // BLOCK_SIZE], np.arange(t.size - 1) % BLOCK_SIZE] = True
    assert not runners.features[:-1][torch.from_numpy(~is_written)].any(), "padding rows write no block"


def test_chains_on_own_hidden_states_equal_a_dense_run(built: Built) -> None:
    """Five greedy steps of three sequences; the second is removed after two."""
    rng, runners = np.random.default_rng(5), Runners(built.directory)
    tokens = [rng.integers(0, VOCAB_SIZE, n) for n in (11, 6, 19)]
    tables, counts = shuffled_tables(rng, 3), [10, 5, 18]
    run_all(runners.target, make_rows(tokens, [0] * 3, counts, tables))
    rows = make_rows([t[1:] for t in tokens], [0] * 3, counts, tables, np.cumsum(counts) - 1)
    logits, hidden = runners.head.run_layer(rows, runners.head.run_segment(0, rows, None))
    read = [(t[1:], built.reference.joined(built.features(t))[:-1]) for t in tokens]
    going = np.arange(3)
    for step in range(5):
        runs = [built.reference.run(*read[i]) for i in going]
        assert same_logits(logits.numpy(), np.stack([found[-1] for found, _ in runs]))
        error = np.abs(hidden.numpy() - torch.stack([made[-1] for _, made in runs]).numpy()).max()
        assert error <= (1 + step) * MAX_ERROR, "the rounding of a step enters the next"
        drafted = logits.argmax(1).numpy()
        for i, token, (_, made) in zip(going, drafted, runs, strict=True):
            read[i] = np.append(read[i][0], token), torch.cat([read[i][1], made[-1:]])
        if step == 1:
            hidden, drafted, going = runners.head.take_rows(hidden, np.array([0, 2])), drafted[[0, 2]], going[[0, 2]]
        lens = np.array([read[i][0].size - 1 for i in going])
        newest = RowBatch(drafted, np.arange(going.size + 1), lens, tables[going], np.arange(going.size))
        logits, hidden = runners.head.run_layer(newest, hidden)


def test_taken_states_are_copies(gqa: Built) -> None:
    head = Runners(gqa.directory).head
    hidden = torch.arange(12.0).view(6, 2)
    pieces = [head.take_rows(hidden, np.array(rows)) for rows in ([4], [0, 1, 2], [1, 5])]
    hidden.zero_()
    assert torch.cat(pieces)[:, 0].tolist() == [8, 0, 2, 4, 2, 10]


def test_prompts_longer_than_any_graph_are_read_alike(gqa: Built, tmp_path: Path) -> None:
    """One call of the target and of the head without logits, with their own tensors; then one more row."""
    source = write_checkpoint(
        tmp_path / "target", num_hidden_layers=NUM_TARGET_LAYERS, max_position_embeddings=2 * MAX_PROMPT_ROWS
    )
    build_engines(source, gqa.head_dir, tmp_path / "engine", runtime="torch", kv_block_size=BLOCK_SIZE)
    found = []
    num_tokens = MAX_PROMPT_ROWS + 5
    tokens = np.random.default_rng(1).integers(0, VOCAB_SIZE, num_tokens + 2)
    for chunk in (num_tokens, 100):
        table = np.arange(num_tokens // BLOCK_SIZE + 2)[None]
        runners = Runners(tmp_path / "engine", table.size)
        for first in range(0, num_tokens, chunk):
            count = min(chunk, num_tokens - first)
            rows = make_rows([tokens], [first], [count], table, np.zeros(0, np.int64))
            run_all(runners.target, rows)
            run_all(runners.head, make_rows([tokens[1:]], [first], [count], table, np.zeros(0, np.int64)))
        found.append(runners.read([tokens], [num_tokens], [1], table))
    assert same_logits(*found)


def test_the_embedding_is_the_target_s_own_where_the_head_has_none(gqa: Built) -> None:
    """Both use the same tensor, and only the target's file holds it."""
    models = [gqa.manifest.target, gqa.manifest.draft]
    target, head = map(Runners(gqa.directory).programs.weights, models)
    assert isinstance(head, HeadTensors) and not isinstance(target, HeadTensors)
    assert head.decoder.embedding is target.embedding
    sizes = [(gqa.directory / f"{name}.safetensors").stat().st_size for name in ("target", "draft")]
    assert sizes == [model.num_weight_bytes for model in models if model is not None]


@pytest.mark.parametrize(("dtype", "most"), [("fp32", MAX_ERROR), ("bf16", 0.1), ("fp16", 0.01)])
def test_other_published_layouts_give_the_same_head(dtype: str, most: float, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    target, head, reference = write_published(tmp_path, rng)
    directory = tmp_path / "engine"
    manifest = build_engines(target, head, directory, runtime="torch", dtype=dtype, kv_block_size=BLOCK_SIZE)
    assert manifest.target.spec.feature_layers == (1, 4, 7)
    runners = Runners(directory)
    tokens, table = rng.integers(0, VOCAB_SIZE, 10), shuffled_tables(rng, 1)
    found = runners.read([tokens], [0], [9], table)
    features = torch.from_numpy(runners.features_of(9, table[0]))  # as this dtype rounds them
    wanted, _ = reference.run(tokens[1:], reference.joined(features))
    assert same_logits(found, wanted, most) and not np.isfinite(wanted).all()


def test_a_head_s_file_without_its_map_is_refused(gqa: Built, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(gqa.directory / "draft.safetensors")
    assert gqa.manifest.draft is not None
    del tensors["token_ids"]
    save_file(tensors, tmp_path / "draft.safetensors")
    programs = TorchPrograms.of_directory(tmp_path, "fp32", CPU, gqa.manifest.target)
    save_file(load_file(gqa.directory / "target.safetensors"), tmp_path / "target.safetensors")
    with pytest.raises(ConfigError, match="tensor token_ids is missing"):
        programs.open(gqa.manifest.draft, "", NUM_SMS)
