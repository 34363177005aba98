"""Logits that requests ask for: the rows of plain decoding, each once, and nothing where nobody asks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines.build import build_engines
from faser_backend.config import EngineConfig
from faser_backend.core.batch import RowBatch
from faser_backend.core.decision import PipelineMode
from faser_backend.core.errors import ConfigError
from faser_backend.core.request import NUM_CONTEXT_TOP, FinishReason, Request, RequestOutput, SamplingParams
from faser_backend.device.cuda.sampler import TorchSampler
from faser_backend.device.sampler import NumpySampler
from faser_backend.pipeline import prefill
from faser_backend.pipeline.engine import Engine
from faser_backend.policy.registry import policy_usages
from faser_backend.serving.compose import build_engine
from lab.simulation.ports import SimSampler
from tests.fakes import HashRunner
from tests.forced_engine import open_forced
from tests.forcing import ADMITS_NOTHING, always, by_parity, forced, random_everything
from tests.harness import BLOCK, VOCAB, fake_engine, open_fake, request
from tests.test_engine import alone, random_requests
from tests.tiny_models import VOCAB_SIZE, reference_logits, reference_model, write_checkpoint, write_draft

SERIAL, RUN_AHEAD, PING_PONG = PipelineMode
# Trees run in turn alone.
POLICIES = [{"fixed": "fixed:4"}.get(name, name) for name in policy_usages() if name != "tree"]
MODEL = HashRunner(8, BLOCK, VOCAB)


def outputs_of(engine: Engine, requests: list[Request], seed: int | None = None) -> dict[str, list[RequestOutput]]:
    rng = np.random.default_rng(seed)
    pending, outputs = list(requests), defaultdict(list)
    while pending or engine.has_work:
        while pending and (seed is None or rng.random() < 0.4):
            engine.submit(pending.pop(0))
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.check_integrity()
    return outputs


def asking(requests: list[Request], seed: int) -> list[Request]:
    """Each for context logits, generation logits, both, or none, and some with a draft of their own."""
    rng = np.random.default_rng(seed)
    return [
        replace(
            r,
            wants_context_logits=index % 4 in (1, 2),
            wants_generation_logits=index % 4 in (2, 3),
            draft_ids=tuple(rng.integers(VOCAB, size=index % 3).tolist()),
        )
        for index, r in enumerate(requests)
    ]


def check_logits(r: Request, outputs: list[RequestOutput], logits_of, *, atol: float = 0.0) -> None:
    """Each row against logits_of(token ids) [len, V]: of the whole text, or of its end alone."""
    tokens = [token for output in outputs for token in output.token_ids]
    text = np.concatenate([r.prompt_ids, tokens]).astype(np.int64)
    with_tokens = [output for output in outputs if output.token_ids]
    for output in outputs:
        assert (output.generation_logits is not None) == (r.wants_generation_logits and bool(output.token_ids))
        is_first = bool(with_tokens) and output is with_tokens[0]
        assert (output.context_logits is not None) == (r.wants_context_logits and is_first)
        for logits in (output.generation_logits, output.context_logits):
            assert logits is None or logits.dtype == np.float32
        if output.generation_logits is not None:
            assert len(output.generation_logits) == len(output.token_ids)
    num_prompt = r.prompt_ids.size
    wanted = logits_of(text[:-1])
    if r.wants_generation_logits:
        rows = np.concatenate([o.generation_logits for o in with_tokens if o.generation_logits is not None])
        np.testing.assert_allclose(rows, wanted[num_prompt - 1 :], atol=atol, rtol=0)
    context = with_tokens[0].context_logits if with_tokens else None
    if context is not None:
        np.testing.assert_allclose(context, wanted[:num_prompt], atol=atol, rtol=0)


def fake_logits(text: np.ndarray) -> np.ndarray:
    return np.stack([MODEL.logits_after(text[: i + 1]) for i in range(text.size)])


@pytest.fixture(scope="module")
def cases() -> list[tuple[list[Request], dict[str, list[int]]]]:
    many = [random_requests(seed, 12) for seed in range(2)]
    return [(asking(requests, seed), alone(requests)) for seed, requests in enumerate(many)]


def check_engine(engine: Engine, case: tuple[list[Request], dict[str, list[int]]], seed: int | None) -> None:
    requests, expected = case
    outputs = outputs_of(engine, requests, seed)
    for r in requests:
        tokens = [token for output in outputs[r.request_id] for token in output.token_ids]
        assert tokens == expected[r.request_id]
        check_logits(r, outputs[r.request_id], fake_logits)


# -- rows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", PipelineMode)
@pytest.mark.parametrize("policy", POLICIES)
def test_rows_are_those_of_plain_decoding(cases, policy: str, mode: PipelineMode):
    for seed, num_blocks in enumerate([200, 26]):
        fake = open_forced(policy, forced(mode), num_blocks=num_blocks)
        check_engine(fake.engine, cases[seed], seed)
        assert (fake.engine.metrics().num_preemptions > 0) == (num_blocks < 200)


@pytest.mark.parametrize("pruner", [None, always(), by_parity()])
@pytest.mark.parametrize("trim", [None, ADMITS_NOTHING])
def test_rows_of_trimmed_and_pruned_chains(cases, pruner, trim):
    check_engine(open_forced("fixed:4", forced(SERIAL, pruner=pruner, trim=trim)).engine, cases[0], 1)


@pytest.mark.parametrize("seed", range(3))
def test_rows_whatever_is_decided(cases, seed: int):
    check_engine(open_forced("fixed:4", random_everything(seed), num_blocks=30).engine, cases[seed % 2], seed)


@pytest.mark.parametrize("most", [1, 3, 64])
def test_prompts_are_run_in_calls_of_bounded_logits(cases, monkeypatch: pytest.MonkeyPatch, most: int):
    """A small engine bounds them further, and chunks of a prompt in turn bound them, too."""
    monkeypatch.setattr(prefill, "MAX_LOGIT_ROWS", most)
    for max_logit_rows in (None, 2):
        for num_prefill_tokens in (5, 1000):
            fake = open_fake("none", max_prefill_tokens=num_prefill_tokens)
            fake.targets[0].max_logit_rows = max_logit_rows
            calls = watch_calls(fake.targets[0])
            check_engine(fake.engine, cases[0], None)
            sizes = [int(rows.logit_rows.size) for rows in calls if rows.num_sequences == 1]
            assert max(sizes) <= max(min(most, max_logit_rows or most), 3)  # and of verified guesses


def watch_calls(runner: HashRunner) -> list[RowBatch]:
    calls, run = [], runner.run_segment

    def watched(segment: int, rows: RowBatch, hidden: np.ndarray | None) -> np.ndarray:
        calls.append(rows)
        return run(segment, rows, hidden)

    runner.run_segment = watched  # type: ignore[method-assign]
    return calls


def test_log_probs_of_a_prompt_are_those_of_its_logits():
    prompts = [[3], [1, 2], list(range(20)) * 4]
    requests = [request(f"r{i}", ids, 4, wants_context_log_probs=True) for i, ids in enumerate(prompts)]
    engine, _ = fake_engine("fixed:4", max_prefill_tokens=16)
    answers = outputs_of(engine, requests)
    for r in requests:
        first = answers[r.request_id][0]
        assert first.context_logits is None and first.context_log_probs is not None
        own, ids, best = np.split(first.context_log_probs, [1, 1 + NUM_CONTEXT_TOP], axis=1)
        wanted = fake_logits(r.prompt_ids)[:-1].astype(np.float64)
        wanted -= np.log(np.exp(wanted).sum(axis=1, keepdims=True))
        rows = np.arange(len(wanted))
        np.testing.assert_allclose(own[:, 0], wanted[rows, r.prompt_ids[1:]], atol=1e-5)
        np.testing.assert_allclose(best, -np.sort(-wanted, axis=1)[:, :NUM_CONTEXT_TOP], atol=1e-5)
        np.testing.assert_allclose(np.take_along_axis(wanted, ids.astype(int), axis=1), best, atol=1e-5)


def test_reused_prefixes_are_run_again_for_their_logits():
    prompt = list(range(20)) * 2
    requests = [request(f"r{i}", [*prompt, i], 6, wants_context_logits=i == 2) for i in range(4)]
    engine, _ = fake_engine("fixed:4")
    for r in requests:
        outputs = outputs_of(engine, [r])[r.request_id]
        check_logits(r, outputs, fake_logits)
        stats = outputs[-1].stats
        assert stats is not None and (stats.num_reused_tokens > 0) == (r.request_id in ("r1", "r3"))


def test_a_stop_cuts_the_rows_with_the_tokens():
    r = request("r", [1, 2, 3], 20, wants_generation_logits=True, wants_log_probs=True)
    answer = alone([r])["r"]
    stop = answer[6]
    engine, _ = fake_engine("none")
    (output,) = outputs_of(engine, [replace(r, draft_ids=tuple(answer), end_ids=(stop,))])["r"]
    assert output.finish_reason is FinishReason.END_ID and len(output.token_ids) < 20
    check_logits(r, [output], fake_logits)
    assert output.log_probs is not None and len(output.log_probs) == len(output.token_ids)


def test_who_is_cancelled_before_a_token_gets_no_logits():
    engine, _ = fake_engine("none", max_prefill_tokens=4)
    engine.submit(request("r", [1] * 30, 5, wants_context_logits=True, wants_generation_logits=True))
    for _ in range(3):
        assert not engine.step()
    engine.cancel("r")
    (output,) = engine.step()
    assert output.is_final and output.context_logits is None and output.generation_logits is None


# -- nobody else pays ------------------------------------------------------------------------------------


class CountingSampler(NumpySampler):
    num_copied = 0

    def to_host(self, logits: np.ndarray) -> np.ndarray:
        self.num_copied += len(logits)
        return super().to_host(logits)


def prompt_calls(calls: list[RowBatch]) -> list[tuple]:
    return [
        (rows.token_ids.tolist(), rows.cu_rows.tolist(), rows.context_lens.tolist(), rows.logit_rows.tolist())
        for rows in calls
    ]


def test_calls_are_the_same_where_nobody_asks():
    """Also beside who asks: only that prompt is run by itself, with logits of every row but the anchor's."""
    others = [request(f"r{i}", [i] * (9 + i), 6) for i in range(3)]
    asks = request("asks", [7] * 11, 6, wants_context_logits=True, wants_generation_logits=True)
    calls_of, copied = {}, {}
    for name, requests in (("alone", others), ("beside", [*others, asks])):
        fake = open_fake("none", max_prefill_tokens=200)
        sampler = CountingSampler(VOCAB, 8)
        stepper = fake.stepper
        stepper.sampler = stepper.verifier._sampler = stepper.prefiller._sampler = sampler
        calls = watch_calls(fake.targets[0])
        outputs_of(fake.engine, requests)
        calls_of[name], copied[name] = prompt_calls(calls), sampler.num_copied
    assert copied == {"alone": 0, "beside": 10 + 6}
    first, *_ = calls_of["alone"]
    assert first == calls_of["beside"][0] and first[3] == [], "the others' prompts, without logits"
    assert calls_of["beside"][1] == ([7] * 10, [0, 10], [0], list(range(10)))
    assert len(calls_of["beside"]) == len(calls_of["alone"]) + 1


# -- devices ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", [NumpySampler(7, 1), TorchSampler(7, 1, torch.device("cpu"))])
def test_copies_outlive_the_buffer(sampler):
    logits = np.random.default_rng(0).normal(size=(3, 7)).astype(np.float32)
    buffer: Any = torch.from_numpy(logits.copy()) if isinstance(sampler, TorchSampler) else logits.copy()
    copied = sampler.to_host(buffer)
    buffer[:] = 0
    assert copied.dtype == np.float32 and (copied == logits).all()


def test_simulated_models_have_no_logits():
    with pytest.raises(ConfigError, match="logits: are not simulated"):
        SimSampler.to_host(SimSampler.__new__(SimSampler), np.zeros((1, 1)))


@pytest.fixture(scope="module", params=["onnxruntime", "torch"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and its draft, with an exit; its checkpoint lies beside it."""
    root = tmp_path_factory.mktemp(request.param)
    source = write_checkpoint(root / "source")
    draft = write_draft(source, root / "draft")
    build_engines(source, draft, root / "engine", runtime=request.param, exit_layers=(2,), kv_block_size=4)
    return root / "engine"


@pytest.mark.parametrize("policy", ["none", "fixed:4", "faser"])
def test_logits_of_real_engines_are_those_of_a_dense_pass(built: Path, policy: str):
    rng = np.random.default_rng(0)
    model = reference_model(built.parent / "source")
    requests = [
        request(
            f"r{i}",
            rng.integers(VOCAB_SIZE, size=int(rng.integers(1, 80))).tolist(),
            20,
            sampling=SamplingParams(temperature=0.8 * (i % 2), repetition_penalty=1.3, seed=i),
            wants_context_logits=i % 3 != 0,
            wants_generation_logits=i % 3 != 1,
            draft_ids=(1, 2, 3)[: i % 4],
        )
        for i in range(7)
    ]
    config = EngineConfig.from_options(policy=policy, max_num_seqs=4, max_prefill_tokens=48, num_threads=1)
    engine = build_engine(built, config)
    outputs = outputs_of(engine, requests, seed=1)
    engine.close()
    for r in requests:
        check_logits(r, outputs[r.request_id], lambda text: reference_logits(model, text), atol=2e-4)
    shifted = replace(requests[2], prompt_ids=np.roll(requests[2].prompt_ids, 1))
    with pytest.raises(AssertionError):  # the control: rows of another text
        check_logits(shifted, outputs["r2"], lambda text: reference_logits(model, text), atol=2e-4)
