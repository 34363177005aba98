"""A request whose logits hold NaN or infinity fails alone, at the token at which it would fail by plain decoding."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from faser_backend.core.config import EngineConfig
from faser_backend.core.errors import ErrorCode
from faser_backend.core.request import FinishReason, Request, Sampling
from faser_backend.cpu.kernels import layouts
from faser_backend.engines import safetensors_checkpoint
from faser_backend.engines.build import build_engines
from faser_backend.pipeline.engine import Engine
from faser_backend.serving.compose import build_engine
from tests.support.harness import drive, open_fake, request
from tests.support.tiny_models import random_model, write_draft, write_model

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
