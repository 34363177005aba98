"""Block drafters: what is read and refused, and their rows against a dense reference, in any batch and format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faser_backend.core.batch import RowBatch
from faser_backend.core.config import EngineConfig
from faser_backend.core.errors import ConfigError
from faser_backend.core.model import DFLASH
from faser_backend.cpu import weights
from faser_backend.cpu.draft_runners import LlvmBlockRunner
from faser_backend.cpu.kernels.matrix_units import has_matrix_units
from faser_backend.engines.dflash import is_dflash
from faser_backend.manifest import MANIFEST_FILE, EngineManifest
from faser_backend.serving.runtimes import open_runtime
from tests.support.block_models import (
    BLOCK_SIZE,
    DRAFTER,
    LAYERS,
    MASK_ID,
    NUM_TARGET_LAYERS,
    PADDED_SIZE,
    BuiltBlocks,
    write_drafter,
)
from tests.support.cpu_products import UNIT_ERROR
from tests.support.refusals import edit_json, refuses_build
from tests.support.tiny_models import VOCAB_SIZE, make_rows, run_all, write_checkpoint

MAX_ERROR = 1e-4
NUM_BLOCKS = 40


@pytest.fixture(autouse=True)
def every_model_is_worth_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "ONE_THREAD_BYTES", 0)


def section(**changes: Any) -> dict[str, Any]:
    return {"dflash_config": {**DRAFTER["dflash_config"], **changes}}


REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"architectures": ["Qwen3DSparkModel"]}, ("architectures = ['Qwen3DSparkModel']", "DFlashDraftModel")),
    ({"architectures": ["DFlash2DraftModel"]}, ("architectures", "DFlash2DraftModel")),
    ({"model_type": "llama"}, ("model_type = 'llama'", "'qwen3'")),
    ({"vocab_size": 96}, ("vocab_size = 96", f"the target's, {PADDED_SIZE}")),
    ({"hidden_size": 48}, ("hidden_size = 48", "the target's, 32")),
    ({"num_target_layers": 9}, ("num_target_layers = 9", f"the target's, {NUM_TARGET_LAYERS}")),
    ({"block_size": 1}, ("block_size = 1", "at least 2")),
    ({"block_size": 65}, ("block_size = 65", "[1, 64]")),
    ({"is_causal": True}, ("is_causal = True",)),
    ({"layer_types": ["full_attention", "sliding_attention"]}, ("layer_types",)),
    (section(mask_token_id=PADDED_SIZE), (f"mask_token_id = {PADDED_SIZE}", f"[0, {PADDED_SIZE - 1}]")),
    (section(mask_token_id=None), ("mask_token_id = None",)),
    (section(target_layer_ids=[0, 5]), ("target_layer_ids = [0, 5]", "[0, 4]")),
    (section(target_layer_ids=[2, 1]), ("target_layer_ids = [2, 1]", "ascending")),
    (section(target_layer_ids=[]), ("target_layer_ids = []",)),
    (section(final_logit_softcapping=30.0), ("final_logit_softcapping = 30.0",)),
    (section(causal=True), ("causal = True",)),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("target")
    return write_checkpoint(root, num_hidden_layers=NUM_TARGET_LAYERS, vocab_size=PADDED_SIZE)


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_other_drafters_are_refused_by_field_and_value(
    target: Path, tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    refuses_build(target, write_drafter(tmp_path / "drafter", **changes), "config.json", *words)


def test_a_drafter_is_no_target(tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path / "drafter")
    refuses_build(drafter, drafter, "drafter: drafts for a target")


@pytest.mark.parametrize("runtime", ["tensorrt", "tensorrt-rtx"])
def test_tensorrt_refuses_block_drafters(target: Path, tmp_path: Path, runtime: str) -> None:
    pytest.importorskip("tensorrt_rtx" if runtime == "tensorrt-rtx" else "tensorrt")
    refuses_build(target, write_drafter(tmp_path / "drafter"), runtime, "block drafters", runtime=runtime)


def test_the_engine_says_what_was_read(tmp_path: Path) -> None:
    built = BuiltBlocks(tmp_path, block_size=None, **section(block_size=BLOCK_SIZE, causal=False))
    draft = built.manifest.draft
    assert draft is not None and draft.spec.family == DFLASH and draft.spec.reads_target
    assert (draft.spec.block_size, draft.spec.mask_id, draft.spec.vocab_size) == (BLOCK_SIZE, MASK_ID, VOCAB_SIZE)
    assert built.manifest.target.spec.feature_layers == tuple(layer + 1 for layer in LAYERS)
    assert is_dflash(DRAFTER) and not is_dflash({"architectures": ["LlamaForCausalLMEagle3"]})


def test_a_mask_without_a_row_is_refused(tmp_path: Path) -> None:
    built = BuiltBlocks(tmp_path)
    edit_json(built.directory / MANIFEST_FILE, lambda fields: fields["draft"]["spec"].update(mask_id=200))
    with pytest.raises(ConfigError, match="mask_id = 200"):
        Runners(built.directory, EngineManifest.load(built.directory))


class Runners:
    """Target and drafter of an engine directory on its runtime."""

    def __init__(self, directory: Path, manifest: Any) -> None:
        runtime = open_runtime(directory, manifest, EngineConfig())
        pools = [runtime.open_pool(model, NUM_BLOCKS) for model in (manifest.target, manifest.draft)]
        pools[1].features = pools[0].features
        whole = runtime.menu.whole
        self.target = runtime.open_runner(manifest.target, whole, pools[0])
        self.drafter = runtime.open_runner(manifest.draft, whole, pools[1])

    def read(self, tokens: list[np.ndarray], starts: list[int], counts: list[int], tables: np.ndarray) -> None:
        """Runs the target on these rows, then makes the drafter's keys and values of them."""
        rows = make_rows(tokens, starts, counts, tables)
        run_all(self.target, rows)
        self.drafter.run_segment(0, rows, None)

    def blocks(self, tokens: list[np.ndarray], lengths: list[int], tables: np.ndarray) -> list[np.ndarray]:
        """Returns the logits of a block behind each sequence."""
        pieces = [np.append(t[-1], np.full(n, MASK_ID)) for t, n in zip(tokens, lengths, strict=True)]
        cu_rows = np.concatenate([[0], np.cumsum([piece.size for piece in pieces])])
        wanted = np.setdiff1d(np.arange(cu_rows[-1]), cu_rows[:-1])
        starts = np.array([t.size - 1 for t in tokens])
        logits = self.drafter.run_segment(1, RowBatch(np.concatenate(pieces), cu_rows, starts, tables, wanted), None)
        return np.split(np.asarray(logits).copy(), np.cumsum(lengths)[:-1])

    def close(self) -> None:
        self.target.close()
        self.drafter.close()


def largest_error(built: BuiltBlocks) -> float:
    """Returns the largest error of any logit over two rounds of blocks, of three ragged sequences read in chunks."""
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, VOCAB_SIZE, n) for n in (11, 23, 40)]
    tables = rng.permutation(NUM_BLOCKS)[:36].reshape(3, 12)
    runners, errors = Runners(built.directory, built.manifest), []
    done = [0, 0, 0]
    for ends, lengths in (([6, 15, 38], [5, 2, 4]), ([10, 22, 39], [1, 5, 3])):
        for step in (7, 100):  # a round's context comes in two calls; it overwrites the block before
            counts = [min(end - start, step) for start, end in zip(done, ends, strict=True)]
            going = [index for index, count in enumerate(counts) if count]
            if going:
                first, second, third = ([values[i] for i in going] for values in (tokens, done, counts))
                runners.read(first, second, third, tables[going])
            done = [start + count for start, count in zip(done, counts, strict=True)]
        seen = [t[: end + 1] for t, end in zip(tokens, ends, strict=True)]
        found = runners.blocks(seen, lengths, tables)
        for own, logits, length in zip(seen, found, lengths, strict=True):
            errors.append(np.abs(logits - built.block_of(own, length)).max())
    runners.close()
    return float(max(errors))


@pytest.mark.parametrize("is_tied", [False, True])
def test_blocks_equal_a_dense_run(tmp_path: Path, is_tied: bool) -> None:
    built = BuiltBlocks(tmp_path, is_tied=is_tied)
    error = UNIT_ERROR if has_matrix_units() else MAX_ERROR
    assert largest_error(built) < error
    for fault, value in (("is_causal", True), ("normalises_context", False)):  # negative controls
        setattr(built.reference, fault, value)
        assert largest_error(built) > 10 * error
        delattr(built.reference, fault)
    for name in built.reference.tensors:
        kept = built.reference.tensors[name]
        built.reference.tensors[name] = kept.roll(1, 0)
        assert largest_error(built) > error, name
        built.reference.tensors[name] = kept


def test_rows_of_a_block_that_fill_several_tiles_see_each_other(tmp_path: Path) -> None:
    """With 64 query heads on a KV head, an item of attention holds one row."""
    built = BuiltBlocks(tmp_path, num_attention_heads=64, num_key_value_heads=1)
    assert largest_error(built) < (UNIT_ERROR if has_matrix_units() else MAX_ERROR)


def test_a_drafter_in_another_format_reads_its_target_s_ends(tmp_path: Path) -> None:
    options = {"weights": "bf16", "draft_weights": "fp32", "kv_cache_dtype": "fp32", "compute": "bf16x2"}
    built = BuiltBlocks(tmp_path, options=options)
    assert built.manifest.draft is not None and "embedding" not in built.manifest.draft.weight_format.title
    runners = Runners(built.directory, built.manifest)
    assert isinstance(runners.drafter, LlvmBlockRunner)
    runners.close()
    for parameter in built.target_reference.parameters():
        if parameter.ndim > 1:
            parameter.data.copy_(parameter.bfloat16().float())  # also the reference's embedding and head
    assert largest_error(built) < UNIT_ERROR
