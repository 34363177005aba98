"""Dimensions of well-known models, from their published configs, and their numbers of parameters."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faser_backend.core.model import ModelSpec, RopeScaling, rotary_tables
from faser_backend.engines.checkpoint import CheckpointError, ConfigFields
from faser_backend.engines.families import read_spec
from faser_backend.engines.weights import weight_sources
from tests.support.tiny_models import LLAMA3_ROPE

LLAMA3_SCALING = {**LLAMA3_ROPE, "original_max_position_embeddings": 8192}
DIMENSIONS = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip


def config(family: str, sizes: str, **rest: Any) -> dict[str, Any]:
    """Returns a config. sizes: in the order of DIMENSIONS."""
    dimensions = zip(DIMENSIONS, map(int, sizes.split()), strict=True)
    return {"model_type": family, "hidden_act": "silu", "rms_norm_eps": 1e-6, **dict(dimensions), **rest}


PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-2-7b": (
        config("llama", "32 4096 32 32 11008 32000 4096", pretraining_tp=1, rope_scaling=None),
        6_738_415_616,
    ),
    "Llama-3.1-8B": (
        config(
            "llama", "32 4096 32 8 14336 128256 131072", rope_theta=5e5, rope_scaling=LLAMA3_SCALING, mlp_bias=False
        ),
        8_030_261_248,
    ),
    "Mistral-7B-v0.3": (
        config("mistral", "32 4096 32 8 14336 32768 32768", rope_theta=1e6, sliding_window=None),
        7_248_023_552,
    ),
    "Qwen2.5-0.5B": (
        config(
            "qwen2",
            "24 896 14 2 4864 151936 32768",
            rope_theta=1e6,
            sliding_window=32768,
            use_sliding_window=False,
            max_window_layers=24,
            tie_word_embeddings=True,
        ),
        494_032_768,
    ),
    "Qwen3-0.6B": (
        config(
            "qwen3",
            "28 1024 16 8 3072 151936 40960",
            head_dim=128,
            attention_bias=False,
            rope_theta=1000000,
            rope_scaling=None,
            sliding_window=None,
            use_sliding_window=False,
            tie_word_embeddings=True,
        ),
        596_049_920,
    ),
    "Qwen3-30B-A3B": (
        config(
            "qwen3_moe",
            "48 2048 32 4 6144 151936 40960",
            head_dim=128,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            rope_theta=1000000.0,
        ),
        30_532_122_624,
    ),
}


def spec_of(name: str, **changes: Any) -> ModelSpec:
    return read_spec(ConfigFields({**PUBLISHED[name][0], **changes}, Path("published/config.json")))


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_add_up_to_what_is_published(name: str) -> None:
    sources = weight_sources(spec_of(name))
    assert sum(math.prod(source.shape) for source in sources.values()) == PUBLISHED[name][1]


def test_what_families_add_is_read() -> None:
    with pytest.raises(CheckpointError, match="sliding_window = 'absent': means 4096 tokens"):
        spec_of("Llama-2-7b", model_type="mistral", max_position_embeddings=8192)
    assert spec_of("Llama-3.1-8B").rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert spec_of("Qwen2.5-0.5B").has_qkv_bias and spec_of("Qwen2.5-0.5B").tie_word_embeddings
    assert spec_of("Qwen3-0.6B").head_dim == 128 and spec_of("Qwen3-0.6B").has_qk_norm
    assert spec_of("Qwen3-30B-A3B").has_normalized_routing
    assert spec_of("Mistral-7B-v0.3").rope_theta == 1e6 and spec_of("Llama-2-7b").rope_theta == 1e4


@pytest.mark.parametrize("kind", ["rope_type", "type"])
def test_older_and_newer_spellings_of_rotary_settings_agree(kind: str) -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {kind: "linear", "factor": 2.0}}
    new = {"rope_theta": None, "rope_scaling": None, "rope_parameters": {**old["rope_scaling"], "rope_theta": 5e5}}
    assert spec_of("Llama-2-7b", **old) == spec_of("Llama-2-7b", **new)
    assert spec_of("Llama-2-7b", **old).rope_scaling == RopeScaling("linear", 2.0)
    with pytest.raises(CheckpointError, match=r"rope_scaling = .*: must agree with rope_parameters"):
        spec_of("Llama-2-7b", **old, rope_parameters={"rope_type": "default"})


def test_llama3_scaling_keeps_fast_frequencies_and_slows_down_the_slow_ones() -> None:
    spec = spec_of("Llama-3.1-8B", max_position_embeddings=4)
    assert spec.rope_scaling is not None
    frequencies = spec.rope_theta ** (-np.arange(64) / 64)
    ratio = frequencies / spec.rope_scaling.scaled(frequencies)
    turns = 8192 * frequencies / (2 * np.pi)
    assert (ratio[turns > 4] == 1).all() and np.allclose(ratio[turns < 1], 8)
    assert (np.diff(ratio) >= 0).all() and ((ratio > 1) & (ratio < 8)).any()
    cos, sin = rotary_tables(spec)
    assert cos.shape == sin.shape == (4, 64) and cos.dtype == np.float32
    np.testing.assert_allclose(sin[3], np.sin(3 * frequencies / ratio), atol=1e-7)


def test_tables_of_long_contexts_equal_those_of_short_ones() -> None:
    long, short = (spec_of("Qwen3-0.6B", max_position_embeddings=size) for size in (9000, 5000))
    for one, other in zip(rotary_tables(long), rotary_tables(short), strict=True):
        np.testing.assert_array_equal(one[:5000], other)
    position = 8999 * long.rope_theta ** (-np.arange(64) / 64)
    np.testing.assert_allclose(rotary_tables(long)[0][8999], np.cos(position), atol=1e-6)
