"""The shipped demo pair in process: tokens equal transformers' in every mode of decoding.

A subset of scripts/check_equality.py, which runs all prompts.
"""

from pathlib import Path

import numpy as np
import pytest

from faser_backend.core.config import EngineConfig
from faser_backend.lab.checks.equality import Reference, make_requests, run_mixed
from faser_backend.manifest import EngineManifest
from faser_backend.serving.compose import build_engine
from faser_backend.serving.model_source import demo_engine_dir

ROOT = Path(__file__).resolve().parents[2]


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


def test_greedy_equals_transformers_generate(engine_dir: Path):
    torch = pytest.importorskip("torch", reason="needs the dev extra (torch, transformers)")
    transformers = pytest.importorskip("transformers", reason="needs the dev extra (torch, transformers)")
    torch.set_num_threads(1)
    model = transformers.LlamaForCausalLM.from_pretrained(ROOT / "models/demo/target", dtype=torch.float32).eval()
    requests = make_requests(engine_dir, num_prompts=10, max_tokens=64, temperature=0.0)
    reference = Reference(engine_dir, requests)
    tokens = {}
    for request in requests:
        prompt = torch.from_numpy(request.prompt_ids)[None]
        with torch.no_grad():
            output = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=64,
                do_sample=False,
                eos_token_id=[],
                pad_token_id=0,
            )
        tokens[request.request_id] = np.asarray(output[0, prompt.shape[1] :]).tolist()
    comparison = reference.compare("transformers", tokens, set())
    assert comparison.unexplained == []
    assert comparison.num_near_ties <= 1
