"""Block drafters: what is read and refused, and their rows against a dense reference, in any batch and format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from faser_backend.core.config import EngineConfig
from faser_backend.core.errors import ConfigError
from faser_backend.core.model import DFLASH
from faser_backend.cpu import weights
from faser_backend.cpu.draft_runners import LlvmBlockRunner
from faser_backend.cpu.kernels.layouts import store_matrix
from faser_backend.cpu.kernels.matrix_units import has_matrix_units
from faser_backend.engines.dflash import is_dflash
from faser_backend.manifest import MANIFEST_FILE, EngineManifest
from faser_backend.pipeline.rows import piece_rows
from faser_backend.serving.runtimes import open_runtime
from tests.support.block_models import (
    BLOCK_SIZE,
    DRAFTER,
    DSPARK,
    KINDS,
    LAYERS,
    MASK_ID,
    NUM_TARGET_LAYERS,
    PADDED_SIZE,
    BuiltBlocks,
    write_drafter,
)
from tests.support.cpu_products import UNIT_ERROR, restore_matrix
from tests.support.refusals import edit_json, refuses_build
from tests.support.tiny_models import VOCAB_SIZE, make_rows, run_all, write_checkpoint

pytestmark = pytest.mark.usefixtures("every_model_is_worth_two_threads")
MAX_ERROR = 1e-4
NUM_BLOCKS = 40


def section(**changes: Any) -> dict[str, Any]:
    return {"dflash_config": {**DRAFTER["dflash_config"], **changes}}


REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"architectures": ["DSparkDraftModel"]}, ("architectures = ['DSparkDraftModel']", "['Qwen3DSparkModel']")),
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
    ({**DSPARK, "markov_head_type": "gated"}, ("markov_head_type = 'gated'", "'vanilla'")),
    ({**DSPARK, "markov_head_type": "rnn"}, ("markov_head_type = 'rnn'",)),
    ({**DSPARK, "markov_rank": None}, ("markov_rank = None", "[0, 32]")),
    ({**DSPARK, "markov_rank": 33}, ("markov_rank = 33", "[0, 32]")),
    ({**DSPARK, "markov_rank": 0}, ("enable_confidence_head = True", "False")),
    ({**DSPARK, "confidence_head_with_markov": False}, ("confidence_head_with_markov = False",)),
    ({**DSPARK, "mask_token_id": -1}, (": mask_token_id = -1",)),
    ({**DSPARK, "target_layer_ids": [-1, 3]}, (": target_layer_ids = [-1, 3]",)),
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

    def __init__(self, directory: Path, manifest: Any, num_blocks: int = NUM_BLOCKS) -> None:
        self.runtime = runtime = open_runtime(directory, manifest, EngineConfig())
        pools = [runtime.open_pool(model, num_blocks) for model in (manifest.target, manifest.draft)]
        pools[1].features = pools[0].features
        whole = runtime.menu.whole
        self.target: Any = runtime.open_runner(manifest.target, whole, pools[0])
        self.drafter: Any = runtime.open_runner(manifest.draft, whole, pools[1])

    def read(self, tokens: list[np.ndarray], starts: list[int], counts: list[int], tables: np.ndarray) -> None:
        """Runs the target on these rows, then makes the drafter's keys and values of them."""
        rows = make_rows(tokens, starts, counts, tables)
        run_all(self.target, rows)
        self.drafter.run_segment(0, rows, None)

    def blocks(self, tokens: list[np.ndarray], drafted: list[np.ndarray], tables: np.ndarray) -> list[np.ndarray]:
        """Returns [n, VOCAB_SIZE + 1] of a block behind each sequence, if drafted [n] is drawn: logits, confidence."""
        drafter = self.drafter
        pieces = [
            np.append(t[-1], np.full(d.size - 1 + drafter.num_idle, drafter.mask_id))
            for t, d in zip(tokens, drafted, strict=True)
        ]
        rows = piece_rows(pieces, [t.size - 1 for t in tokens], tables, with_logits=False)
        wanted = np.setdiff1d(np.arange(rows.num_rows), rows.cu_rows if drafter.num_idle else [])
        logits, sure = drafter.run_block(replace(rows, logit_rows=wanted))
        previous = np.concatenate([np.append(t[-1], d[:-1]) for t, d in zip(tokens, drafted, strict=True)])
        logits = np.asarray(drafter.biased(logits, np.arange(previous.size), previous))
        confidences = np.zeros(previous.size) if sure is None else sure + drafter.token_confidences[previous]
        return np.split(np.column_stack([logits, confidences]), np.cumsum([each.size for each in drafted])[:-1])

    def close(self) -> None:
        self.target.close()
        self.drafter.close()


def found_blocks(built: BuiltBlocks) -> list[tuple[np.ndarray, ...]]:
    """Returns two rounds of blocks of three ragged sequences read in chunks, each with its sequence and drafted
    tokens."""
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, VOCAB_SIZE, n) for n in (11, 23, 40)]
    tables = rng.permutation(NUM_BLOCKS)[:36].reshape(3, 12)
    runners, found = Runners(built.directory, built.manifest), []
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
        drafted = [rng.integers(0, VOCAB_SIZE, length) for length in lengths]
        found += zip(runners.blocks(seen, drafted, tables), seen, drafted, strict=True)
    runners.close()
    return found


def largest_error(built: BuiltBlocks, found: list[tuple[np.ndarray, ...]] | None = None) -> float:
    """Returns the largest error of any logit or confidence."""
    blocks = found or found_blocks(built)
    return max(float(np.abs(block - np.column_stack(built.block_of(*given))).max()) for block, *given in blocks)


def notices_faults(built: BuiltBlocks, error: float, factor: float = 10) -> None:
    """Compares blocks with the reference, and with one that has a fault or another tensor."""
    found = found_blocks(built)
    assert largest_error(built, found) < error
    faults = [("is_causal", True), ("normalises_context", False)]
    faults += [("num_idle", 1)] * built.reference.is_dspark + [("bias_lag", 1)] * built.reference.has_bias
    for fault, value in faults:
        setattr(built.reference, fault, value)
        assert largest_error(built, found) > 10 * error, fault
        delattr(built.reference, fault)
    for name, kept in list(built.reference.tensors.items()):
        built.reference.tensors[name] = kept.flatten().roll(1).view_as(kept) if kept.numel() > 1 else kept + 1
        assert largest_error(built, found) > factor * error, name
        built.reference.tensors[name] = kept


CASES = [("dflash", {}), ("dflash", {"is_tied": True}), ("dspark", {}), ("dspark", {"has_ends": True}), ("rank 0", {})]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_blocks_equal_a_dense_run(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    error = UNIT_ERROR if has_matrix_units() else MAX_ERROR
    notices_faults(BuiltBlocks(tmp_path, **KINDS[kind], **options), error, factor=1)


def test_rows_of_a_block_that_fill_several_tiles_see_each_other(tmp_path: Path) -> None:
    """With 64 query heads on a KV head, an item of attention holds one row."""
    built = BuiltBlocks(tmp_path, num_attention_heads=64, num_key_value_heads=1)
    assert largest_error(built) < (UNIT_ERROR if has_matrix_units() else MAX_ERROR)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tables_of_tokens_keep_their_16_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    options = {"kv_cache_dtype": "fp32", "compute": "bf16x2", "draft_weights": "fp16"}
    built = BuiltBlocks(tmp_path, dtype=dtype, options=options, **DSPARK)
    stored = weights.WeightFile(built.directory / "draft.safetensors").tensor("markov_w1")
    wanted = built.reference.tensors["markov_head.markov_w1.weight"][:VOCAB_SIZE]
    assert stored.nbytes == 2 * wanted.numel() and np.array_equal(stored.astype(np.float32), wanted)
    assert largest_error(built) < UNIT_ERROR


def test_a_drafter_in_another_format_reads_its_target_s_ends(tmp_path: Path) -> None:
    options = {"draft_weights": "int8", "compute": "bf16x2"}  # whose kernel other tests need too
    built = BuiltBlocks(tmp_path, options=options)
    assert built.manifest.draft is not None and "embedding" not in built.manifest.draft.weight_format.title
    runners = Runners(built.directory, built.manifest)
    assert isinstance(runners.drafter, LlvmBlockRunner)
    runners.close()
    for name, tensor in built.reference.tensors.items():
        if tensor.ndim > 1:
            stored = store_matrix(tensor.T.numpy(), "int8")
            built.reference.tensors[name] = torch.from_numpy(restore_matrix(stored, *tensor.T.shape, "int8").T)
    assert largest_error(built) < UNIT_ERROR
