"""Cases of kernels and synthetic pairs: what the GPU check builds its figures on."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from lab.gpu import first_contact, kernel_checks, kernels, ladder, parity
from lab.gpu.kernel_cases import DTYPES, GEOMETRIES, random_call, timed_calls
from lab.gpu.pairs import model_pair, random_tensors
from lab.gpu.worker import Context
from lab.shapes import TINY_PAIR, AttentionShape

torch.set_num_threads(1)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_random_calls_are_such_as_runners_make(name):
    rng = np.random.default_rng(3)
    for geometry in GEOMETRIES[name] * 5:
        call = random_call(geometry, DTYPES[name], "cpu", rng)
        table, cu_rows, contexts, slots = (tensor.numpy() for tensor in call.tensors[5:])
        written = slots[slots >= 0]
        assert np.unique(written).size == written.size, "no two rows share a slot"
        assert (slots[cu_rows[-1] :] == -1).all(), "rows of nobody write nothing"
        sequence = np.repeat(np.arange(contexts.size), np.diff(cu_rows))
        for row in np.flatnonzero(slots[: cu_rows[-1]] >= 0):
            owner = sequence[row]
            position = contexts[owner] + row - cu_rows[owner]
            assert slots[row] // geometry.kv_block_size == table[owner, position // geometry.kv_block_size]


def test_copies_of_a_timed_call_share_no_block():
    calls = timed_calls(AttentionShape(2, 20, 5, 4, 2, 32), 3, torch.float32, "cpu", 0)
    tables = [set(call.tensors[5].flatten().tolist()) for call in calls]
    assert not tables[0] & tables[1] and not tables[1] & tables[2]
    slots = calls[1].tensors[8].numpy()
    assert {int(slot) // 16 for slot in slots} <= tables[1]


def test_synthetic_weights_keep_hidden_states_near_one():
    spec = TINY_PAIR.target
    weights = random_tensors(spec, "fp32", torch.device("cpu"), 0)
    assert weights.embedding.std().item() == pytest.approx(1.0, abs=0.05)
    assert weights.layers[0].qkv.shape == ((4 + 2 * 2) * 16, 64)
    again = random_tensors(spec, "fp32", torch.device("cpu"), 0)
    assert torch.equal(weights.layers[2].down, again.layers[2].down)
    pair = model_pair(TINY_PAIR, "fp32")
    assert [(each.first_layer, each.last_layer) for each in pair.target.segments] == [(0, 1), (1, 3)]
    assert pair.target.segments[0].has_exit_scores and not pair.draft.segments[0].has_exit_scores


def test_a_wrong_kernel_and_one_that_leaves_rows_unwritten_are_found(monkeypatch):
    def wrong(hidden, kept, out) -> None:
        out.copy_(hidden[kept] * 1.1)

    monkeypatch.setattr(kernel_checks, "compact_rows", wrong)
    monkeypatch.setattr(kernel_checks, "gated_silu", lambda gate_up, out: None)
    found = kernels.correctness(Context("cpu", is_tiny=True, seed=0, end_s=time.monotonic() + 60))
    wrong_ones = {case["kernel"] for case in found["cases"] if not case["is_right"]}
    assert wrong_ones == {"compact_rows", "gated_silu"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("part", [parity.torch_runtime, ladder.demo, first_contact.run])
def test_parts_refuse_another_device_than_was_asked_for(part):
    with pytest.raises(RuntimeError, match=r"device = 'cuda': torch .* would compute on 'cpu'"):
        part(Context("cuda", is_tiny=True, seed=0, end_s=time.monotonic() + 60))
