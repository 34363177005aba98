"""Logits and counters that requests ask for: the rows of plain decoding, each once. Unusable logits stay alone."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from faser_backend.core.batch import RowBatch
from faser_backend.core.config import EngineConfig
from faser_backend.core.decision import PipelineMode
from faser_backend.core.errors import ErrorCode
from faser_backend.core.request import NUM_CONTEXT_TOP, EngineOutput, FinishReason, Request, Sampling
from faser_backend.cpu.kernels import layouts
from faser_backend.cpu.sampler import NumpySampler
from faser_backend.cuda.sampler import TorchSampler
from faser_backend.engines import safetensors_checkpoint
from faser_backend.engines.build import build_engines
from faser_backend.pipeline import prefill
from faser_backend.pipeline.engine import Engine
from faser_backend.serving.compose import build_engine
from tests.pipeline.test_engine import alone, random_requests
from tests.support.fakes import HashRunner
from tests.support.forced_engine import open_forced
from tests.support.forcing import ADMITS_NOTHING, always, by_parity, forced, random_everything
from tests.support.harness import BLOCK, VOCAB, drive, fake_engine, open_fake, request
from tests.support.tiny_models import (
    VOCAB_SIZE,
    build_with_draft,
    random_model,
    reference_logits,
    reference_model,
    write_draft,
    write_model,
)

SERIAL, RUN_AHEAD, PING_PONG = PipelineMode
MODEL = HashRunner(8, BLOCK, VOCAB)


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


def check_logits(r: Request, outputs: list[EngineOutput], logits_of, *, atol: float = 0.0) -> None:
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
    driven = drive(engine, requests, seed=seed)
    assert driven.tokens == expected
    for r in requests:
        check_logits(r, driven.outputs[r.request_id], fake_logits)


# -- rows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "mode"), [("none", SERIAL), *(("fixed:4", mode) for mode in PipelineMode), ("faser", RUN_AHEAD)]
)
def test_rows_are_those_of_plain_decoding(cases, policy: str, mode: PipelineMode):
    for seed, num_blocks in enumerate([200, 26]):
        fake = open_forced(policy, forced(mode), num_blocks=num_blocks)
        check_engine(fake.engine, cases[seed], seed)
        assert (fake.engine.metrics().num_preemptions > 0) == (num_blocks < 200)


@pytest.mark.parametrize(
    "decisions",
    [
        forced(SERIAL, pruner=always()),
        forced(SERIAL, pruner=by_parity(), trim=ADMITS_NOTHING),
        *(random_everything(seed) for seed in range(2)),
    ],
)
def test_rows_whatever_is_decided(cases, decisions):
    check_engine(open_forced("fixed:4", decisions, num_blocks=30).engine, cases[0], 1)


@pytest.mark.parametrize("most", [1, 64])
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
    answers = drive(engine, requests).outputs
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
        outputs = drive(engine, [r]).outputs[r.request_id]
        check_logits(r, outputs, fake_logits)
        stats = outputs[-1].stats
        assert stats is not None and (stats.num_reused_tokens > 0) == (r.request_id in ("r1", "r3"))


def test_a_stop_cuts_the_rows_with_the_tokens():
    r = request("r", [1, 2, 3], 20, wants_generation_logits=True, wants_log_probs=True)
    answer = alone([r])["r"]
    stop = answer[6]
    engine, _ = fake_engine("none")
    (output,) = drive(engine, [replace(r, draft_ids=tuple(answer), end_ids=(stop,))]).outputs["r"]
    assert output.finish_reason is FinishReason.END_ID and output.token_ids == answer[: answer.index(stop) + 1]
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


def test_a_prompt_whose_logits_are_wanted_is_run_by_itself_and_those_of_others_as_ever():
    others = [request(f"r{i}", [i] * (9 + i), 6) for i in range(3)]
    asks = request("asks", [7] * 11, 6, wants_context_logits=True, wants_generation_logits=True)
    calls_of = {}
    for name, requests in (("alone", others), ("beside", [*others, asks])):
        fake = open_fake("none", max_prefill_tokens=200)
        calls = watch_calls(fake.targets[0])
        drive(fake.engine, requests)
        calls_of[name] = [(rows.token_ids.tolist(), rows.logit_rows.tolist()) for rows in calls]
    ends = np.cumsum([9, 10, 11]) - 1
    assert calls_of["alone"][0] == ([0] * 9 + [1] * 10 + [2] * 11, ends.tolist()), "logits of their ends alone"
    assert calls_of["beside"][0] == ([0] * 8 + [1] * 9 + [2] * 10, [])
    assert calls_of["beside"][1] == ([7] * 10, list(range(10)))
    assert calls_of["beside"][2] == ([0, 1, 2, 7], list(range(4)))


@pytest.mark.parametrize("mode", PipelineMode)
def test_counters_come_with_every_output_of_who_asks(mode: PipelineMode):
    requests = [replace(r, wants_stats=index % 2 == 0) for index, r in enumerate(random_requests(3, 8))]
    outputs = drive(open_forced("fixed:4", forced(mode), num_blocks=40).engine, requests, seed=0).outputs
    for r in requests:
        *earlier, last = outputs[r.request_id]
        assert last.stats is not None
        assert all((output.stats is not None) == r.wants_stats for output in earlier)
        num_tokens, before = r.prompt_ids.size, None
        for number, output in enumerate([*earlier, last] if r.wants_stats else [], 1):
            assert output.stats is not None and output.stats is not before and output.stats.num_steps == number
            num_tokens += len(output.token_ids)
            assert output.stats.num_allocated_blocks * BLOCK >= num_tokens - 1
            falls = {} if before is None else {n for n, v in asdict(before).items() if v > asdict(output.stats)[n]}
            assert set(falls) <= {"num_allocated_blocks"}
            before = output.stats


@pytest.mark.parametrize("sampler", [NumpySampler(7, 1), TorchSampler(7, 1, torch.device("cpu"))])
def test_copies_outlive_the_buffer(sampler):
    logits = np.random.default_rng(0).normal(size=(3, 7)).astype(np.float32)
    buffer: Any = torch.from_numpy(logits.copy()) if isinstance(sampler, TorchSampler) else logits.copy()
    copied = sampler.to_host(buffer)
    buffer[:] = 0
    assert copied.dtype == np.float32 and (copied == logits).all()


@pytest.fixture(scope="module", params=["llvm", "torch"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and its draft, with an exit; its checkpoint lies beside it."""
    return build_with_draft(tmp_path_factory.mktemp(request.param), runtime=request.param, exit_layers=(2,))


def test_logits_of_real_engines_are_those_of_a_dense_pass(built: Path):
    rng = np.random.default_rng(0)
    model = reference_model(built.parent / "source")
    requests = [
        request(
            f"r{i}",
            rng.integers(VOCAB_SIZE, size=int(rng.integers(1, 80))).tolist(),
            20,
            sampling=Sampling(temperature=0.8 * (i % 2), repetition_penalty=1.3, seed=i),
            wants_context_logits=i % 3 != 0,
            wants_generation_logits=i % 3 != 1,
            draft_ids=(1, 2, 3)[: i % 4],
        )
        for i in range(7)
    ]
    config = EngineConfig.from_options(policy="fixed:4", max_num_seqs=4, max_prefill_tokens=48, num_threads=1)
    engine = build_engine(built, config)
    outputs = drive(engine, requests, seed=1).outputs
    engine.close()
    for r in requests:
        check_logits(r, outputs[r.request_id], lambda text: reference_logits(model, text), atol=2e-4)
    shifted = replace(requests[2], prompt_ids=np.roll(requests[2].prompt_ids, 1))
    with pytest.raises(AssertionError):  # the control: rows of another text
        check_logits(shifted, outputs["r2"], lambda text: reference_logits(model, text), atol=2e-4)


POISON = 7  # the token after which a model's logits, or its hidden state, are not finite
SAMPLINGS = [Sampling(), Sampling(temperature=0.9, seed=3), Sampling(temperature=0.9, seed=4, top_p=0.8, min_p=0.01)]


def requests_of(vocab_size: int, bias: dict[int, float] | None = None, **extra: bool) -> list[Request]:
    rng = np.random.default_rng(5)
    prompts = [rng.integers(8, vocab_size, rng.integers(3, 12)).tolist() for _ in range(9)]
    prompts[1][-1] = prompts[4][0] = POISON
    samplings = [replace(each, logit_bias=bias) for each in SAMPLINGS]
    return [request(f"r{i}", prompt, 24, sampling=samplings[i % 3], **extra) for i, prompt in enumerate(prompts)]


def check(open_engine: Callable[[str], Engine], requests: list[Request], policies: list[str]) -> None:
    """Compares all requests at once, and twice, with each alone by plain decoding."""
    engine = open_engine("none")
    alone = [drive(engine, [each]) for each in requests]
    engine.close()
    tokens = {key: tokens for run in alone for key, tokens in run.tokens.items()}
    ends = {key: output for run in alone for key, output in run.final.items()}
    failed = {key for key, output in ends.items() if output.finish_reason is FinishReason.ERROR}
    assert {"r1"} <= failed < ends.keys() and not ends["r1"].token_ids
    for policy in policies:
        engine = open_engine(policy)
        for _ in range(2):  # the second time in blocks that hold what the failed requests left
            together = drive(engine, requests, seed=2)
            for key, output in together.final.items():
                num_tokens = len(together.tokens[key] if key in failed else tokens[key])  # of the last step, none
                assert together.tokens[key] == tokens[key][:num_tokens]
                assert (output.finish_reason, output.error) == (ends[key].finish_reason, ends[key].error)
                assert key not in failed or (output.error and output.error.code is ErrorCode.INTERNAL)
        assert engine.metrics().num_failed_steps == 0
        engine.close()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("of_draft", [False, True])
def test_one_row_fails_one_request(value: float, of_draft: bool):
    def open_engine(policy: str) -> Engine:
        fake = open_fake(policy, draft_noise=0.1)
        for runner in (*fake.targets, *(fake.drafts if of_draft else ())):
            good = runner.logits_after
            runner.logits_after = lambda tokens, good=good: (
                good(tokens) if tokens[-1] != POISON else good(tokens) + value
            )
        return fake.engine

    check(open_engine, requests_of(24, wants_log_probs=True), ["none", "fixed:3"])


@pytest.mark.parametrize("runtime", ["llvm", "torch"])
def test_real_engines_keep_a_broken_sequence_to_itself(runtime: str, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(safetensors_checkpoint, "checked_finite", lambda tensor, *_: tensor)  # a build refuses NaN
    monkeypatch.setattr(layouts, "_finite", lambda values, dtype, _: values.astype(dtype))
    model = random_model("llama")
    write_draft(write_model(model, tmp_path / "target"), tmp_path / "draft")
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
    write_model(model, tmp_path / "target")
    build_engines(tmp_path / "target", tmp_path / "draft", tmp_path / "engine", runtime=runtime, kv_block_size=4)

    def open_engine(policy: str) -> Engine:
        options = {"max_num_seqs": 4, "num_kv_blocks": 40, "num_threads": 1, "enable_prefix_reuse": False}
        return build_engine(tmp_path / "engine", EngineConfig.from_options(policy=policy, **options))

    # Attention gives masked positions weight 0, and 0 * NaN is NaN: a drafted POISON would fail its own sequence.
    check(open_engine, requests_of(97, {POISON: -np.inf}), ["none", "fixed:3"])
