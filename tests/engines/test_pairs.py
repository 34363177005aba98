"""Drafts and targets that differ: padded rows are cut, mismatches are refused, and pairs decode losslessly."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from faser_backend import LLM, SamplingParams
from faser_backend.engines.build import build_engines
from faser_backend.manifest import EngineManifest
from tests.engines.test_families import MAX_ERROR, NUM_BLOCKS, open_runner
from tests.support.refusals import refuses_build
from tests.support.serving_pair import byte_level_tokenizer
from tests.support.tiny_models import make_rows, random_model, reference_logits, run_all, write_model, write_tokenizer
from tests.support.trtllm_models import write_trtllm


def source(path: Path, variant: str = "llama3_rope", *, num_tokens: int = 97, **changes: object) -> Path:
    """Writes a checkpoint whose tokenizer has num_tokens tokens, whatever rows its vocabulary has."""
    directory = write_model(random_model(variant, **changes), path)
    write_tokenizer(directory, num_tokens)
    return directory


def edit_tokenizer(directory: Path, added: list[dict]) -> None:
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] = [flags | token for token in added]
    path.write_text(json.dumps(content))


def test_vocabularies_padded_differently_are_cut_to_their_tokenizer(tmp_path: Path) -> None:
    target = source(tmp_path / "target", vocab_size=104)
    draft = source(tmp_path / "draft", "qwen2_tied", vocab_size=112)
    manifest = build_engines(target, draft, tmp_path / "engine", kv_block_size=4)
    assert EngineManifest.load(tmp_path / "engine") == manifest
    sizes = [(model.spec.vocab_size, model.spec.padded_vocab_size) for model in (manifest.target, manifest.draft)]
    assert sizes == [(97, 104), (97, 112)]
    tokens = np.random.default_rng(0).integers(0, 97, 20)
    tables = np.random.default_rng(1).permutation(NUM_BLOCKS)[:5][None]
    logits = run_all(open_runner(manifest, tmp_path / "engine"), make_rows([tokens], [0], [20], tables))
    expected = reference_logits(random_model("llama3_rope", vocab_size=104), tokens)
    assert logits.shape == (20, 97)
    assert np.abs(logits - expected[:, :97]).max() <= MAX_ERROR


def test_ids_without_a_token_are_never_drawn_and_speculation_stays_lossless(tmp_path: Path) -> None:
    """The padding rows of the target's head have the largest logits: plain argmax would always choose them."""
    tokenizer = byte_level_tokenizer()
    num_tokens = tokenizer.get_vocab_size()
    for name, rows, seed in (("target", num_tokens + 15, 0), ("draft", num_tokens + 3, 1)):
        model = random_model("qwen3", seed=seed, vocab_size=rows, eos_token_id=0)
        with torch.no_grad():
            model.lm_head.weight[num_tokens:] *= 50
        write_model(model, tmp_path / name)
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
    build_engines(tmp_path / "target", tmp_path / "draft", tmp_path / "engine")
    answers = {}
    for policy in ("none", "fixed:4"):
        with LLM(tmp_path / "engine", policy=policy) as llm:
            for temperature in (0.0, 5.0):
                params = SamplingParams(max_tokens=40, temperature=temperature, seed=3)
                answers[policy, temperature] = llm.generate([5, 6, 7], params)[0].token_ids
    for temperature in (0.0, 5.0):
        assert answers["none", temperature] == answers["fixed:4", temperature]
        assert max(answers["none", temperature]) < num_tokens
    assert len(set(answers["none", 5.0])) > 10


def test_pairs_of_different_families_and_layouts(tmp_path: Path) -> None:
    target = write_trtllm(random_model("qwen3"), tmp_path / "target", tp=2, pp=3)
    manifest = build_engines(target, source(tmp_path / "draft", "qwen2"), tmp_path / "engine", exit_layers=(1,))
    assert (manifest.target.spec.family, manifest.draft.spec.family) == ("qwen3", "qwen2")


def test_tokenizers_that_differ(tmp_path: Path) -> None:
    target, draft = source(tmp_path / "target", num_tokens=97), source(tmp_path / "draft", num_tokens=96)
    refuses_build(target, draft, "target (97 tokens, vocab_size 97)", "draft (96 tokens", "'token96'", "96 and None")
    write_tokenizer(draft, 97, first="[UNK]")
    refuses_build(target, draft, "'token0'", "0 and None")


def test_special_tokens_that_differ(tmp_path: Path) -> None:
    target, draft = source(tmp_path / "target"), source(tmp_path / "draft")
    end, other = ({"id": i, "content": f"token{i}", "special": True} for i in (3, 4))
    edit_tokenizer(target, [end, other])
    edit_tokenizer(draft, [end, {**other, "special": False}])
    refuses_build(target, draft, "special tokens", "id 4", "'token4' and None")
    edit_tokenizer(draft, [end, other])
    build_engines(target, draft, tmp_path / "out")


def test_contexts_that_differ(tmp_path: Path) -> None:
    long, short = source(tmp_path / "long"), source(tmp_path / "short", max_position_embeddings=64)
    refuses_build(long, short, "max_position_embeddings", "target = 128", "draft = 64", "max_context = 64")
    refuses_build(long, short, "max_context = 65", "[1, 64]", "128", max_context=65)
    refuses_build(long, long, "max_context = 0", "[1, 128]", max_context=0)
    limited = build_engines(long, short, tmp_path / "limited", max_context=48)
    assert (limited.target.spec.max_context, limited.draft.spec.max_context) == (48, 48)
    follows = build_engines(short, long, tmp_path / "follows")
    assert (follows.target.spec.max_context, follows.draft.spec.max_context) == (64, 64)


def test_dtypes_of_the_two_are_converted_and_recorded(tmp_path: Path) -> None:
    target = write_model(random_model("qwen2").to(torch.bfloat16), tmp_path / "target")
    mixed = random_model("llama3_rope").to(torch.float16)
    mixed.get_submodule("model.layers.1.self_attn.v_proj").to(torch.bfloat16)  # as single tensors of some GGUF files
    draft = write_model(mixed, tmp_path / "draft")
    for runtime, dtype in (("llvm", "fp32"), ("torch", "bf16")):
        manifest = build_engines(target, draft, tmp_path / "engine", runtime=runtime, dtype=dtype)
        assert (manifest.target.spec.checkpoint_dtype, manifest.draft.spec.checkpoint_dtype) == ("BF16", "F16")


@pytest.mark.parametrize("runtime", ["torch", "tensorrt_rtx"])
def test_weights_that_the_dtype_cannot_hold(runtime: str, tmp_path: Path) -> None:
    model = random_model("qwen2").to(torch.bfloat16)
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.down_proj.weight")[0, 0] = -1e5
    target = write_model(model, tmp_path / "target")
    words = ("layers.1.down", "99840", "float16", "65504")
    refuses_build(target, target, *words, runtime=runtime, dtype="fp16")
