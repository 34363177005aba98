"""Clients' drafts on real engines, in every policy and mode; test_eagle3_drafting.py has them beside a head."""

from __future__ import annotations

from pathlib import Path

import pytest

from faser_backend.core.config import EngineConfig
from faser_backend.serving.compose import build_engine
from tests.pipeline.test_engine import random_requests
from tests.support.forced_engine import POLICIES, guessing
from tests.support.harness import drive


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_of_real_engines_are_those_of_plain_decoding(engine_dir: Path, policy: str):
    requests = random_requests(7, 10)
    plain = build_engine(engine_dir, EngineConfig.from_options(policy="none", max_num_seqs=4, num_threads=1))
    expected = drive(plain, requests).tokens
    num_plain = plain.metrics().num_steps
    plain.close()
    case = guessing(requests, expected, 5, plain.limits.vocab_size)
    for pipeline in ("serial", "ping_pong", "run_ahead") if policy == "fixed:4" else ("auto",):
        config = EngineConfig.from_options(policy=policy, max_num_seqs=4, num_threads=1, pipeline=pipeline)
        engine = build_engine(engine_dir, config)
        assert drive(engine, case.requests, seed=3).tokens == expected
        assert drive(engine, case.requests).tokens == expected
        metrics = engine.metrics()
        assert metrics.num_accepted > 20 and (policy != "none" or metrics.num_steps < 2 * num_plain)
        engine.close()
