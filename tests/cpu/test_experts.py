"""Experts whose layers are the project's kernels: routing, equal bits in any batch, and whole engines.

test_families.py compares logits with transformers.
"""

from pathlib import Path

import gguf
import numba
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file

from faser_backend.core.request import Request
from faser_backend.cpu import weights
from faser_backend.cpu.kernels.experts import choose, sort_assignments
from faser_backend.engines.build import build_engines
from tests.cpu import test_engine, test_runner
from tests.cpu.test_runner import BLOCK_SIZE, build, open_runner
from tests.engines.test_families import MAX_ERROR
from tests.engines.test_gguf_checkpoint import QUANTISED
from tests.pipeline.test_eagle3_drafting import make_requests
from tests.support.cpu_products import restore_matrix
from tests.support.gathered_runner import GatheredRunner
from tests.support.gguf_models import write_gguf
from tests.support.tiny_models import VOCAB_SIZE, make_rows, random_model, run_all, write_model

pytestmark = pytest.mark.usefixtures("every_model_is_worth_two_threads")
# Sizes that fill no block of columns, and a router of two blocks, which two threads share.
SIZES = {"hidden_size": 40, "moe_intermediate_size": 24, "num_experts": 19, "num_experts_per_tok": 3}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(random_model("qwen3_moe", **SIZES), tmp_path_factory.mktemp("experts") / "target")


@pytest.fixture(scope="module")
def directory(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds a target with an exit, and a draft of experts that is often right."""
    root = tmp_path_factory.mktemp("int4")
    model = random_model("qwen3_moe", **SIZES)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    options = {"exit_layers": (1, 2), "kv_block_size": BLOCK_SIZE, "kv_cache_dtype": "fp32"}
    options |= {"weights": "int4", "draft_weights": "int4"}
    build_engines(source, write_model(model, root / "draft"), root / "engine", runtime="llvm", **options)
    return root / "engine"


def test_a_row_has_the_same_bits_in_any_company_on_any_threads(directory: Path) -> None:
    test_runner.check_bits(directory)


@numba.njit
def choices(logits, chances, shares, chosen, normalises):
    """Chooses experts row by row; logits stay unchanged."""
    for row in range(logits.shape[0]):
        chances[row] = logits[row]
        choose(chances[row], shares[row], chosen[row], normalises)


@pytest.mark.parametrize(
    ("num_experts", "num_chosen", "normalises"),
    [(1, 1, True), (8, 1, False), (8, 8, True), (19, 3, False), (128, 8, True)],
)
def test_the_best_experts_are_chosen_with_their_shares(num_experts: int, num_chosen: int, normalises: bool) -> None:
    rng = np.random.default_rng(num_experts)
    logits = (4 * rng.standard_normal((50, num_experts))).astype(np.float32)
    logits[1] = 0  # all equal: the first ones are chosen
    logits[2, ::2] = logits[2].max() + 1
    logits[3] *= 1e4  # one takes all
    chances, shares = np.empty_like(logits), np.empty((50, num_chosen), np.float32)
    chosen = np.empty((50, num_chosen), np.int32)
    choices(logits, chances, shares, chosen, normalises)
    exact = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    exact /= exact.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(chances, exact, rtol=5e-6, atol=1e-30)
    np.testing.assert_array_equal(chosen, np.argsort(-chances, axis=1, kind="stable")[:, :num_chosen])
    np.testing.assert_array_equal(chosen[1], np.arange(num_chosen))
    wanted = np.take_along_axis(exact, chosen.astype(np.int64), axis=1)
    if normalises:
        wanted /= wanted.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(shares, wanted, rtol=1e-5, atol=1e-30)


def test_no_expert_is_chosen_twice_where_logits_are_no_numbers() -> None:
    """Its rows would exceed their buffer."""
    logits = np.zeros((3, 19), np.float32)
    logits[0], logits[1, 4], logits[2, 7] = np.nan, np.inf, -np.inf
    chosen = np.empty((3, 8), np.int32)
    choices(logits, np.empty_like(logits), np.empty((3, 8), np.float32), chosen, True)
    assert [len(set(row)) for row in chosen.tolist()] == [8, 8, 8] and chosen.min() >= 0 and chosen.max() < 19


@numba.njit
def sort(ends, order, rows, chosen, num_rows):
    sort_assignments(ends, order, rows, chosen, num_rows)


@pytest.mark.parametrize("num_rows", [0, 1, 30])
def test_assignments_are_sorted_by_expert_then_by_row(num_rows: int) -> None:
    rng = np.random.default_rng(0)
    chosen = np.stack([rng.permutation(9)[:3] for _ in range(30)]).astype(np.int32)
    ends, order, rows = np.full(11, -5, np.int32), np.full((30, 3), -1, np.int32), np.full(90, -1, np.int32)
    sort(ends, order, rows, chosen, num_rows)
    taken = chosen[:num_rows]
    np.testing.assert_array_equal(ends, [(taken <= expert).sum() for expert in range(11)])
    sorted_order = np.argsort(taken.ravel(), kind="stable")
    np.testing.assert_array_equal(rows[: sorted_order.size], sorted_order // 3)
    np.testing.assert_array_equal(order[:num_rows].ravel()[sorted_order], np.arange(sorted_order.size))
    assert (rows[sorted_order.size :] == -1).all() and (order[num_rows:] == -1).all()


def test_the_router_stays_float32(source: Path, directory: Path) -> None:
    wanted = load_file(source / "model.safetensors")
    for layer in range(3):
        stored = weights.WeightFile(directory / "target.safetensors").tensor(f"layers.{layer}.router")
        router = wanted[f"model.layers.{layer}.mlp.gate.weight"]
        np.testing.assert_array_equal(restore_matrix(stored, *router.shape[::-1], "fp32").T, router)


def test_calls_without_logits_and_of_one_row(source: Path, tmp_path: Path) -> None:
    """The last layer then has no rows, or fewer than experts; compared with ONNX Runtime."""
    build(source, tmp_path / "engine")
    runners = (open_runner(tmp_path / "engine"), GatheredRunner(source, tmp_path, block_size=BLOCK_SIZE))
    tokens, table = np.random.default_rng(0).integers(0, VOCAB_SIZE, 12), np.arange(3)[None]
    found = []
    for runner in runners:
        silent = make_rows([tokens], [0], [11], table, logit_rows=np.zeros(0, np.int64))
        assert run_all(runner, silent).shape == (0, VOCAB_SIZE)
        found.append(run_all(runner, make_rows([tokens], [11], [1], table)))
    assert np.abs(found[0] - found[1]).max() <= MAX_ERROR


@pytest.mark.parametrize(("kind", "stored_as"), [(Type.Q8_0, "int8"), (Type.Q4_0, "int4")])
def test_experts_of_a_gguf_file_are_stored_number_by_number(kind: Type, stored_as: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    model = random_model("qwen3_moe", **{**QUANTISED, "moe_intermediate_size": 64, "num_hidden_layers": 1})
    write_gguf(model, file, kind=kind)
    manifest = build_engines(file, None, tmp_path / "engine", runtime="llvm", kv_block_size=BLOCK_SIZE)
    assert manifest.target.weight_format.formats == (stored_as,) * 3 and manifest.target.weight_format.rounded == ""
    file_weights = weights.WeightFile(tmp_path / "engine" / "target.safetensors")
    [stacked] = [tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == "blk.0.ffn_down_exps.weight"]
    for expert, blocks in enumerate(stacked.data):
        stored = file_weights.tensor(f"layers.0.experts.{expert}.down")
        wanted = gguf.quants.dequantize(blocks, kind)
        np.testing.assert_array_equal(restore_matrix(stored, 64, model.config.hidden_size, stored_as).T, wanted)


# -- whole engines -------------------------------------------------------------------------------------

opened, expected = test_engine.opened, test_engine.expected  # fixtures
test_policies_and_batches_change_no_token = test_engine.test_policies_and_batches_change_no_token
test_preemption_changes_no_token = test_engine.test_preemption_changes_no_token
test_rows_that_leave_at_exits_change_no_token = test_engine.test_rows_that_leave_at_exits_change_no_token


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Returns requests, some greedy, some sampled."""
    return make_requests()
