"""Block drafters of runtime torch on torch's CPU device: blocks against a dense reference, and whole engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from faser_backend.core.errors import ConfigError
from faser_backend.cuda.call_shapes import MAX_PROMPT_ROWS
from faser_backend.cuda.torch_programs import TorchPrograms
from tests.cuda.test_memory_plan import INPUTS, captured_bytes, live_bytes, planned
from tests.engines.test_dflash import BLOCK_SIZE, CASES, MASK_ID, MAX_ERROR, Runners, largest_error, notices_faults
from tests.pipeline.test_eagle3_drafting import check_chains, make_requests, tokens_of
from tests.support.block_models import KINDS, BuiltBlocks
from tests.support.tiny_models import make_rows
from tests.support.torch_engines import CPU

TORCH = {"runtime": "torch"}


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> BuiltBlocks:
    return BuiltBlocks(tmp_path_factory.mktemp("blocks"), options=TORCH)


@pytest.fixture(scope="module", params=KINDS)
def either(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BuiltBlocks:
    return BuiltBlocks(tmp_path_factory.mktemp("blocks"), options=TORCH, **KINDS[request.param])


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_blocks_equal_a_dense_run(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    """Contexts come in several calls, and overwrite the blocks of the round before. Calls are padded."""
    notices_faults(BuiltBlocks(tmp_path, options=TORCH, **KINDS[kind], **options), MAX_ERROR)


@pytest.mark.parametrize(("dtype", "most"), [("bf16", 0.8), ("fp16", 0.08)])
def test_blocks_in_halves_are_close(tmp_path: Path, dtype: str, most: float) -> None:
    assert MAX_ERROR < largest_error(BuiltBlocks(tmp_path, options={**TORCH, "dtype": dtype})) < most


def test_contexts_longer_than_any_graph_are_read_alike(untied: BuiltBlocks) -> None:
    """One call of more rows than are captured, and calls of some; rows without a slot and other blocks stay."""
    num_sequences, length, width = 13, 80, 20
    assert num_sequences * length > MAX_PROMPT_ROWS
    tables = np.random.default_rng(0).permutation(num_sequences * width + 3)[:-3].reshape(num_sequences, width)
    features, found = None, []
    for chunk in (length, 9):
        drafter = Runners(untied.directory, untied.manifest, num_sequences * width + 3).drafter
        features = torch.randn_like(drafter.pool.features) if features is None else features
        drafter.pool.features.copy_(features)
        for first in range(0, length, chunk):
            count = min(chunk, length - first)
            tokens = [np.zeros(length, np.int64)] * num_sequences
            drafter.run_segment(0, make_rows(tokens, [first] * num_sequences, [count] * num_sequences, tables), None)
        found.append(drafter.pool.storage[:, :, :, :-1])  # the last block is for padding rows
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
    assert found[0].ne(0).any(-1).sum() == found[0][..., 0, 0, 0].numel() * num_sequences * length


def test_the_runtime_knows_block_drafters(either: BuiltBlocks) -> None:
    """They draft in turn with their target and without a loop on the device; all their calls are captured at start."""
    runners = Runners(either.directory, either.manifest)
    runtime, target, drafter = runners.runtime, runners.target, runners.drafter
    assert not target.block_size
    assert (drafter.block_size, drafter.mask_id, drafter.num_segments) == (BLOCK_SIZE, MASK_ID, 2)
    assert runtime.splits == () and "in turn" in runtime.splits_note
    sampler = runtime.open_sampler(drafter.vocab_size, 4)
    assert runtime.open_draft_loop(drafter, sampler) is None and runtime.open_draft_loop(target, sampler) is not None
    captured = captured_bytes(target, 0) + captured_bytes(drafter, 0)
    assert not any(pool.storage[:, :, :, :-1].any() for pool in (target.pool, drafter.pool))
    models = [either.manifest.target, either.manifest.draft]
    plan = planned(models, dtype="fp32", kv_block_size=4, num_partitions=1)
    captured -= plan.lines["logits"]
    assert 0.8 * plan.lines[INPUTS] < captured <= 1.1 * plan.lines[INPUTS]
    held = live_bytes()
    for opened in (target, drafter, runtime):
        opened.close()
    assert held - live_bytes() > captured + 0.9 * plan.lines["weights"], "nothing is held once all are closed"


def test_a_mask_without_a_row_is_refused(untied: BuiltBlocks, monkeypatch: pytest.MonkeyPatch) -> None:
    assert untied.manifest.draft is not None
    programs = TorchPrograms.of_directory(untied.directory, "fp32", CPU, untied.manifest.target)
    monkeypatch.setattr(type(untied.manifest.draft.spec), "mask_id", MASK_ID + 1)
    with pytest.raises(ConfigError, match=f"mask_id = {MASK_ID + 1}: the embedding has {MASK_ID + 1} rows"):
        programs.open(untied.manifest.draft, "", 1)


@pytest.mark.parametrize("options", [{}, {"num_kv_blocks": 32}, {"draft": "model+ngram"}])
def test_engines_draft_the_reference_s_blocks_and_emit_plain_tokens(
    either: BuiltBlocks, options: dict[str, Any]
) -> None:
    """With few blocks, sequences are preempted."""
    metrics = check_chains(either, "fixed:4", num_shared=9, **options)  # the others have a tie within a rounding
    assert (metrics.num_preemptions > 0) == ("num_kv_blocks" in options)


def test_sampled_tokens_are_those_of_plain_decoding(either: BuiltBlocks) -> None:
    """Prefixes are shared."""
    requests = make_requests(num_shared=9)
    assert tokens_of(either, "faser", requests) == tokens_of(either, "none", requests)
