"""Segments compiled by TensorRT as programs: profiles, shapes and addresses, the pool, and refusals.

The programs and the runner are real; engines are ONNX Runtime sessions (tests.support.ort_engines). TensorRT-RTX itself
refuses engine files, which needs no GPU.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from faser_backend.core.errors import ConfigError, FaserError
from faser_backend.cuda.call_shapes import CallBounds, CallMenu
from faser_backend.cuda.pool import CudaKvPool
from faser_backend.cuda.runner import CudaRunner
from faser_backend.cuda.tensorrt_programs import (
    EngineStore,
    ProfileRange,
    TensorRtSegment,
    bucket_limits,
    cache_path,
    choose_profile,
    open_segments,
)
from faser_backend.engines.tensorrt_buckets import MAX_VERIFY_ROWS
from faser_backend.plugins.tensorrt_import import TensorRtError, import_tensorrt
from tests.support.ort_engines import OrtContext, OrtStore, write_rtx_model
from tests.support.tiny_models import make_rows, reference_logits, reference_model, run_all, write_checkpoint
from tests.support.torch_engines import CPU

NUM_BLOCKS, BLOCK_SIZE = 60, 4
MAX_ERROR = 2e-4
DECODE, VERIFY, PREFILL = 0, 1, 2  # profiles of a build


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source"))


class Opened:
    """A model with open engines on the CPU."""

    def __init__(
        self, source: Path, directory: Path, monkeypatch, exit_layers: tuple[int, ...] = (), dtype: str = "fp32"
    ) -> None:
        monkeypatch.setattr("faser_backend.cuda.tensorrt_programs.current_stream", lambda: 7)
        self.model = write_rtx_model(source, directory, exit_layers=exit_layers, kv_block_size=BLOCK_SIZE, dtype=dtype)
        self.store = OrtStore(directory, self.model)
        self.programs = open_segments(self.model, directory, self.store, CPU)  # type: ignore[arg-type]
        self.pool = CudaKvPool(self.model.spec, NUM_BLOCKS, BLOCK_SIZE, dtype=dtype, device=CPU)
        limits = bucket_limits(self.model.segments, "")
        self.runner = CudaRunner(self.model, self.programs, self.pool, CPU, limits=limits)

    def run(self, rows) -> np.ndarray:
        return run_all(self.runner, rows)

    @property
    def used(self) -> list[OrtContext]:
        return [context for context in self.store.contexts if context.num_runs]


def tables_of(rng: np.random.Generator, num_sequences: int, width: int) -> np.ndarray:
    return rng.permutation(NUM_BLOCKS)[: num_sequences * width].reshape(num_sequences, width)


@pytest.mark.parametrize("exit_layers", [(), (1,), (1, 2)])
def test_ragged_runs_give_a_dense_runs_logits(source: Path, tmp_path: Path, monkeypatch, exit_layers) -> None:
    """Prefill, decode and verification of three sequences in shuffled blocks, padded to buckets."""
    opened = Opened(source, tmp_path, monkeypatch, exit_layers)
    reference = reference_model(source)
    rng = np.random.default_rng(len(exit_layers))
    sequences = [rng.integers(0, 97, int(n)) for n in (40, 31, 25)]
    expected = [reference_logits(reference, tokens) for tokens in sequences]
    tables, starts = tables_of(rng, 3, 12), [0, 0, 0]
    for counts in ([9, 3, 5], [1, 1, 1], [5, 2, 1], [1, 7, 3], [1, 1, 1]):
        logits = opened.run(make_rows(sequences, starts, counts, tables))
        wanted = np.concatenate([expected[i][s : s + n] for i, (s, n) in enumerate(zip(starts, counts, strict=True))])
        assert np.abs(logits - wanted).max() <= MAX_ERROR
        starts = [start + count for start, count in zip(starts, counts, strict=True)]
    assert {context.profile for context in opened.used} == {DECODE, VERIFY, PREFILL}, "tuned for 8, 40 and 32 rows"
    opened.pool.check_integrity()


@pytest.mark.parametrize(("dtype", "errors"), [("fp32", (0, MAX_ERROR)), ("fp16", (MAX_ERROR, 0.5))])
def test_calls_without_logits_or_candidates_have_addresses(
    source: Path, tmp_path: Path, monkeypatch, dtype: str, errors: tuple[float, float]
) -> None:
    """A prompt's chunk needs no logits, and a cut without an exit no scores, but TensorRT needs addresses."""
    opened = Opened(source, tmp_path, monkeypatch, (1,), dtype)
    tokens = np.random.default_rng(0).integers(0, 97, 12)
    rows = make_rows([tokens], [0], [8], tables_of(np.random.default_rng(1), 1, 4), np.zeros(0, np.int64))
    assert opened.run(rows).shape == (0, 97)
    later = opened.run(make_rows([tokens], [8], [4], rows.block_tables))
    assert errors[0] < np.abs(later - reference_logits(reference_model(source), tokens)[8:]).max() <= errors[1]


def test_every_sequence_of_a_full_batch_may_have_so_many_logit_rows(source: Path, tmp_path: Path, monkeypatch) -> None:
    """Bounds clients' drafts and logits of prompts; with one more row, no profile takes the call."""
    opened = Opened(source, tmp_path, monkeypatch, (1,))
    most, rng = opened.runner.max_logit_rows, np.random.default_rng(0)
    assert most == MAX_VERIFY_ROWS
    sequences, tables = [rng.integers(0, 97, most + 1) for _ in range(8)], tables_of(rng, 8, 5)
    logits = opened.run(make_rows(sequences, [0] * 8, [most] * 8, tables))
    wanted = np.concatenate([reference_logits(reference_model(source), tokens[:most]) for tokens in sequences])
    assert np.abs(logits - wanted).max() <= MAX_ERROR
    with pytest.raises(ConfigError, match="no profile takes a call"):
        opened.run(make_rows(sequences, [0] * 8, [most + 1] * 8, tables))


def test_exit_scores_and_pruned_rows(source: Path, tmp_path: Path, monkeypatch) -> None:
    opened, reference = Opened(source, tmp_path, monkeypatch, (1,)), reference_model(source)
    rng = np.random.default_rng(3)
    sequences = [rng.integers(0, 97, 14) for _ in range(2)]
    tables = tables_of(rng, 2, 4)
    opened.run(make_rows(sequences, [0, 0], [8, 8], tables))
    candidates = rng.integers(0, 97, (10, 5))
    rows = make_rows(sequences, [8, 8], [5, 5], tables)
    hidden, scores = opened.runner.run_segment_with_scores(0, rows, None, candidates)
    with torch.no_grad():
        head = reference.lm_head(reference.model.norm(hidden)).numpy()
    assert np.abs(scores.numpy() - np.take_along_axis(head, candidates, 1)).max() <= MAX_ERROR
    hidden = opened.runner.take_rows(hidden, np.array([0, 1, 5, 6, 7, 8]))
    logits = opened.runner.run_segment(1, make_rows(sequences, [8, 8], [2, 4], tables), hidden).numpy()
    expected = [reference_logits(reference, tokens) for tokens in sequences]
    assert np.abs(logits - np.concatenate([expected[0][8:10], expected[1][8:12]])).max() <= MAX_ERROR


def test_a_call_shape_is_bound_once_in_the_memory_of_all(source: Path, tmp_path: Path, monkeypatch) -> None:
    opened = Opened(source, tmp_path, monkeypatch, (1,))
    tokens = np.random.default_rng(0).integers(0, 97, 30)
    tables = tables_of(np.random.default_rng(1), 1, 8)
    for start in range(3):
        opened.run(make_rows([tokens], [start], [1], tables))
    assert [context.num_runs for context in opened.used] == [3, 3]
    assert len({context.calls[0] for context in opened.store.contexts}) == 1
    assert opened.store.is_captured == [False, False, True, True]


def test_calls_that_no_shape_holds_share_a_context(source: Path, tmp_path: Path, monkeypatch) -> None:
    opened = Opened(source, tmp_path, monkeypatch)
    opened.runner.shapes = CallMenu(BLOCK_SIZE, CallBounds(8, 1, 8, 16, 8, 0), is_padded=True)
    tokens = np.random.default_rng(0).integers(0, 97, 60)
    expected = reference_logits(reference_model(source), tokens)
    tables = tables_of(np.random.default_rng(1), 1, 16)
    for start, end in ((0, 20), (20, 49), (49, 50), (50, 60)):
        logits = opened.run(make_rows([tokens], [start], [end - start], tables))
        assert np.abs(logits - expected[start:end]).max() <= MAX_ERROR
    assert opened.store.is_captured == [False, True]
    assert [context.num_runs for context in opened.store.contexts] == [3, 1]
    assert opened.store.contexts[0].profile == PREFILL  # the last segment; 32 rows are nearer to 10 than 40


def program_and_tensors(source: Path, tmp_path: Path, monkeypatch) -> tuple[TensorRtSegment, dict]:
    opened = Opened(source, tmp_path, monkeypatch)
    tensors = dict(opened.runner.prepare_decode(BOUNDS).tensors)
    spec = opened.model.spec
    for layer in range(spec.num_layers):
        new = torch.zeros(2, spec.num_kv_heads, spec.head_dim)
        tensors |= {f"k_pool.{layer}": opened.pool.keys(layer), f"v_pool.{layer}": opened.pool.values(layer)}
        tensors |= {f"k_new.{layer}": new, f"v_new.{layer}": new.clone()}
    return opened.programs[0], tensors | {"columns": torch.arange(8 * BLOCK_SIZE)}


BOUNDS = CallBounds(2, 2, 1, 8, 2, 0)


def test_tensors_that_are_not_the_engines_are_refused(source: Path, tmp_path: Path, monkeypatch) -> None:
    """TensorRT would read whatever is at the address."""
    program, tensors = program_and_tensors(source, tmp_path, monkeypatch)
    program.prepare(tensors, BOUNDS)()
    logits = tensors["logits"]
    wrong = {
        "positions": (tensors["positions"].int(), r"positions = contiguous torch\.int32 .* contiguous int64 \[2\]"),
        "logits": (torch.zeros(3, 97), r"logits = contiguous torch\.float32 \[3, 97\]: .* float32 \[2, 97\]"),
        "k_new.1": (torch.zeros(2, 8, 2).mT, r"k_new\.1 = strided torch\.float32 \[2, 2, 8\]"),
    }
    for name, (tensor, message) in wrong.items():
        with pytest.raises(ConfigError, match=message):
            program.prepare({**tensors, name: tensor}, BOUNDS)
    with pytest.raises(ConfigError, match="tensor logits: the runner does not provide it"):
        program.prepare({name: tensor for name, tensor in tensors.items() if tensor is not logits}, BOUNDS)


def test_what_tensorrt_refuses_is_said(source: Path, tmp_path: Path, monkeypatch) -> None:
    program, tensors = program_and_tensors(source, tmp_path, monkeypatch)
    launch = program.prepare(tensors, BOUNDS)
    monkeypatch.setattr("tests.support.ort_engines.OrtContext.execute_async_v3", lambda *_: False)
    with pytest.raises(TensorRtError, match=r"target\.0\.engine: execute: TensorRT refused the call"):
        launch()
    monkeypatch.setattr("tests.support.ort_engines.OrtContext.set_input_shape", lambda *_: False)
    with pytest.raises(TensorRtError, match=r"target\.0\.engine: \w+ \[.*\]: TensorRT refused it"):
        program.prepare(tensors, BOUNDS)


def profile(index: int, *num_rows: int) -> ProfileRange:
    least, usual, most = ({"x": (count, 4), "pool": (size,)} for count, size in zip(num_rows, (1, 9, 99), strict=True))
    return ProfileRange(index, least, usual, most)


PROFILES = (profile(0, 1, 40, 64), profile(1, 1, 4, 8), profile(2, 2, 4, 8), profile(3, 1, 50, 64))


@pytest.mark.parametrize(("num_rows", "index"), [(1, 1), (2, 1), (8, 1), (9, 0), (44, 0), (45, 3), (64, 3)])
def test_the_profile_that_is_tuned_for_the_nearest_size_is_chosen(num_rows: int, index: int) -> None:
    assert choose_profile(PROFILES, {"x": (num_rows, 4), "pool": (7,)}, "e").index == index


def test_a_call_that_no_profile_takes_is_refused_by_the_closest() -> None:
    message = r"e: no profile takes a call with x \[65, 4\]: \[1, 4\] to \[64, 4\]; build for larger calls"
    with pytest.raises(ConfigError, match=message):
        choose_profile(PROFILES, {"x": (65, 4), "pool": (7,)}, "e")
    with pytest.raises(ConfigError, match=r"pool \[100\]: \[1\] to \[99\]"):
        choose_profile(PROFILES, {"x": (4, 4), "pool": (100,)}, "e")


@pytest.fixture(scope="module")
def engine_bytes() -> bytes:
    """Returns a real engine of TensorRT-RTX."""
    module = import_tensorrt("rtx").module
    builder = module.Builder(module.Logger(module.Logger.ERROR))
    network = builder.create_network(1 << int(module.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    x = network.add_input("x", module.float32, (4, 4))
    network.mark_output(network.add_elementwise(x, x, module.ElementWiseOperation.SUM).get_output(0))
    return bytes(builder.build_serialized_network(network, builder.create_builder_config()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA driver")
def test_an_engine_without_a_gpu(engine_bytes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "target.0.engine"
    path.write_bytes(engine_bytes)
    with pytest.raises(ConfigError) as refused:
        EngineStore("tensorrt_rtx").open(path)
    assert str(refused.value).startswith(
        f"{path}: cannot be loaded: there is no GPU here, or no CUDA driver that works (TensorRT-RTX"
    )


@pytest.mark.parametrize("content", ["junk", "truncated"])
def test_damaged_engines(engine_bytes: bytes, tmp_path: Path, content: str) -> None:
    path = tmp_path / "target.0.engine"
    path.write_bytes(np.random.default_rng(0).bytes(4000) if content == "junk" else engine_bytes[: 1 << 15])
    with pytest.raises(ConfigError, match=r"engine: is (refused .*MALFORMED_ENGINE|damaged, or no engine).*; build it"):
        EngineStore("tensorrt_rtx").open(path)


def test_engines_that_are_not_there(tmp_path: Path) -> None:
    store = EngineStore("tensorrt_rtx")
    (tmp_path / "empty").touch()
    for name in ("missing", "empty"):
        with pytest.raises(ConfigError, match=rf"{name}: cannot be read as an engine"):
            store.open(tmp_path / name)
    store.close()
    assert cache_path(tmp_path / "a.engine") == tmp_path / "a.engine.kernels"


def test_full_tensorrt_has_to_be_installed() -> None:
    with pytest.raises(FaserError, match=r"pip install 'faser-backend\[tensorrt\]'"):
        EngineStore("tensorrt")
