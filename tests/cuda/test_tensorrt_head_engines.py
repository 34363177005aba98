"""EAGLE-3 heads behind TensorRT's runner: features, logits and chains against a dense reference, tokens of plain
decoding. Engines are the graphs that TensorRT-RTX gets, run by ONNX Runtime (tests.support.ort_engines)."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from faser_backend.device.runtime import ModelPair
from tests.cuda.test_torch_eagle3 import Runners
from tests.engines.test_eagle3 import MAX_ERROR, NUM_BLOCKS, Built, check_rows_on_features, same_logits
from tests.pipeline.test_eagle3_drafting import check_chains, make_requests, open_engine, prune
from tests.support.harness import drive
from tests.support.ort_engines import OrtPrograms, graphs_are_engines
from tests.support.tiny_models import VOCAB_SIZE, largest_error

RUNTIME = "tensorrt_rtx"


@pytest.fixture(scope="module", autouse=True)
def _graphs_are_engines() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        graphs_are_engines(patch)
        yield


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(tmp_path_factory.mktemp("chains"), runtime=RUNTIME, exit_layers=(4,))


def open_runners(built: Built) -> Runners:
    models = ModelPair(built.manifest.target, built.manifest.draft)
    return Runners(built.directory, programs=OrtPrograms(built.directory, models))


def test_rows_on_the_target_s_features_equal_a_dense_run(built: Built) -> None:
    runners = open_runners(built)
    check_rows_on_features(built, runners)
    assert largest_error(runners.target, built.target_reference, 0, NUM_BLOCKS) <= MAX_ERROR


def test_half_precision_heads_run(tmp_path: Path) -> None:
    half = Built(tmp_path, runtime=RUNTIME, dtype="fp16")
    runners, tokens = open_runners(half), np.random.default_rng(4).integers(0, VOCAB_SIZE, 12)
    logits = runners.read([tokens], [0], [11], np.arange(4)[None])
    wanted = half.reference.run(tokens[1:], half.reference.joined(half.features(tokens))[:-1])[0]
    assert runners.features.dtype == torch.float16
    assert same_logits(logits, wanted, 0.1) and not same_logits(logits, wanted)


def test_chains_are_the_reference_s_and_tokens_plain_decoding_s(built: Built) -> None:
    """The pool holds one full context, so sequences are preempted."""
    assert check_chains(built, "fixed:4", count=5, num_kv_blocks=32).num_preemptions > 0


def test_calls_that_no_shape_holds_are_no_different(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such calls share a context, and each has its own hidden states."""
    monkeypatch.setattr("faser_backend.cuda.call_shapes.menu_shapes", lambda *_: [])
    check_chains(built, "fixed:4", count=5)


def test_rows_that_leave_at_an_exit_leave_no_hole(built: Built) -> None:
    assert check_chains(built, "fixed:5", prune, count=5).num_pruned > 0


# -- negative controls ----------------------------------------------------------------------------------


def test_an_engine_never_writes_what_it_is_reading(
    built: Built, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The layer's hidden states go where its next call reads them: by a copy, else the contexts here object."""
    monkeypatch.setattr("faser_backend.cuda.tensorrt_programs._apart", lambda *_: {})
    engine = open_engine(built, "fixed:3")
    drive(engine, make_requests(2, is_greedy=True))
    engine.close()
    assert "hidden_out is written where ['hidden'] are read" in caplog.text
