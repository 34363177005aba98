"""Clients' drafts on real engines: every policy and mode, and a head that reads the target's states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from faser_backend.core.config import EngineConfig
from faser_backend.core.record import StepRecord
from faser_backend.serving.compose import build_engine
from tests.engines.test_eagle3 import Built
from tests.pipeline.test_eagle3_drafting import ChainChecker, make_requests, open_engine
from tests.pipeline.test_engine import random_requests
from tests.support.forced_engine import POLICIES, guessing
from tests.support.harness import drive
from tests.support.tiny_models import VOCAB_SIZE


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


class OwnChains(ChainChecker):
    """Compares with the reference what the head itself drafted."""

    def observe(self, record: StepRecord) -> None:
        own = np.where(record.frontier.is_client, 0, record.frontier.num_drafted)
        super().observe(replace(record, frontier=replace(record.frontier, num_drafted=own)))


def test_a_head_reads_what_the_target_made_of_the_guess(tmp_path: Path):
    """EAGLE-3: behind a client's chain the head catches up from the target's hidden states, and drafts as ever."""
    built = Built(tmp_path)
    requests = make_requests(10, is_greedy=True)
    plain = open_engine(built, "none")
    expected = drive(plain, requests).tokens
    plain.close()
    case = guessing(requests, expected, 1, VOCAB_SIZE)
    engine, checker = open_engine(built, "fixed:3", enable_prefix_reuse=False), OwnChains(built)
    engine.step_runner.observers.append(checker.observe)
    assert drive(engine, case.requests, seed=1).tokens == expected
    assert engine.metrics().num_accepted > 10
    engine.close()
    assert checker.num_equal == checker.num_chains > 20
