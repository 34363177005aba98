"""The shipped demo pair in process: tokens of every mode of decoding are those of plain decoding.

A subset of lab.checks.equality, which runs all prompts.
"""

from pathlib import Path

import pytest

from faser_backend.core.config import EngineConfig
from faser_backend.lab.checks.equality import Reference, make_requests, run_mixed
from faser_backend.manifest import EngineManifest
from faser_backend.serving.compose import build_engine
from faser_backend.serving.model_source import demo_engine_dir


@pytest.fixture(scope="module")
def engine_dir() -> Path:
    return demo_engine_dir()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_and_batching_change_no_token(engine_dir: Path, temperature: float):
    requests = make_requests(engine_dir, num_prompts=10, max_tokens=32, temperature=temperature)
    reference = Reference(engine_dir, requests)
    small_pool = -(-EngineManifest.load(engine_dir).target.spec.max_context // 16)
    for policy in ("none", "fixed:8"):
        engine = build_engine(
            engine_dir, EngineConfig(policy=policy, max_num_seqs=16, num_kv_blocks=small_pool, max_prefill_tokens=64)
        )
        tokens, cancelled = run_mixed(engine, requests, seed=3, max_concurrency=16, cancelled_share=0.2)
        comparison = reference.compare(policy, tokens, cancelled)
        assert comparison.unexplained == []
        assert comparison.num_tokens > 200
        engine.close()
