"""Runtime torch with every kernel interpreted: a GPU's launches on the CPU, against transformers.

test_kernels.py starts this file, as interpreted_kernels.py.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from faser_backend.cuda import torch_programs
from faser_backend.plugins.launch import runs_kernel
from faser_backend.plugins.pruned_chunk_attention import pruned_chunk_attention_kernel
from tests.support.tiny_models import VOCAB_SIZE, make_rows, random_model, reference_logits, write_model
from tests.support.torch_engines import CPU, open_torch_runner, write_torch_engine

PRODUCTS = {"mm", "addmm", "linear", "matmul", "__matmul__", "mv", "bmm", "baddbmm", "einsum", "dot"}
MAX_ERROR = 2e-4
BLOCK_SIZE = 64
TABLES = np.array([[5], [3]])


class NoProducts(TorchFunctionMode):
    """Refuses torch's products, whose bits depend on the number of rows."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert getattr(function, "__name__", "") not in PRODUCTS, function
        return function(*args, **(kwargs or {}))


def test_interpreted_layers_give_the_logits_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_programs, "count_parts", lambda _: 8)  # so that parts get programs of their own
    assert runs_kernel(pruned_chunk_attention_kernel, torch.zeros(1, device=CPU)), "kernels are interpreted"
    reference: Any = random_model("qwen3", num_hidden_layers=2, max_position_embeddings=512)
    model = write_torch_engine(write_model(reference, tmp_path / "source"), tmp_path, exit_layers=(1,))
    runner = open_torch_runner(model, tmp_path, 10, BLOCK_SIZE)
    rng = np.random.default_rng(3)
    sequences = [rng.integers(0, VOCAB_SIZE, length) for length in (12, 16)]
    expected = [reference_logits(reference, tokens) for tokens in sequences]
    prefill = make_rows(sequences, [0, 0], [3, 8], TABLES, np.zeros(0, np.int64))
    with NoProducts():
        runner.run_segment(1, prefill, runner.run_segment(0, prefill, None))
    for starts, counts in (([3, 8], [3, 2]), ([6, 10], [1, 1])):
        rows = make_rows(sequences, starts, counts, TABLES)
        candidates = rng.integers(0, VOCAB_SIZE, (rows.num_rows, 3))
        with NoProducts():
            hidden, scores = runner.run_segment_with_scores(0, rows, None, candidates)
            logits = runner.run_segment(1, rows, runner.take_rows(hidden, np.arange(rows.num_rows)))
        wanted = np.concatenate([expected[i][starts[i] : starts[i] + counts[i]] for i in range(2)])
        assert np.abs(logits.numpy() - wanted).max() <= MAX_ERROR
        assert np.isfinite(scores.numpy()).all() and scores.any()
    with pytest.raises(AssertionError, match="linear"), NoProducts():
        torch.nn.functional.linear(hidden, hidden)
    bounds = [key for calls in runner._calls for key in calls]
    program = runner._programs[1]
    splits = {program.num_splits(bound, runner.pool.keys(1)) for bound in bounds}  # pyright: ignore[reportAttributeAccessIssue]
    assert splits == {8}, "contexts are split"
    assert not runner.pool.storage[:, :, :, [0, 1, 2, 4, 6, 7, 8, 9, 10]].any(), "unused blocks are unchanged"
