"""The profiles of a compiled engine that a share of the GPU may run, and the calls that fit them."""

from types import SimpleNamespace
from typing import Any

import pytest

from faser_backend.core.config import EngineConfig
from faser_backend.core.errors import ConfigError
from faser_backend.core.model import ModelSpec
from faser_backend.cuda.call_shapes import CallBounds
from faser_backend.cuda.tensorrt_programs import bucket_limits, profiles_of_split
from faser_backend.device.runtime import ModelPair
from faser_backend.manifest import BucketSpec, FileSpec, ModelEngine, SegmentSpec
from faser_backend.runtime_spec import RUNTIMES
from faser_backend.serving.compose import check_call_limits, with_prompt_rows

SPEC = ModelSpec(1, 8, 1, 1, 8, 8, 97, 64, 1e4, 1e-5, True)


def segment(*buckets: BucketSpec) -> SegmentSpec:
    return SegmentSpec(FileSpec("target.0.engine", "0" * 64, 1), 0, 1, (), (), buckets)


def bucket(split: str = "", **most: int) -> BucketSpec:
    return BucketSpec("verify", {name: (1, 1, value) for name, value in most.items()}, split)


def test_a_share_runs_its_own_profiles_and_the_others_where_it_has_none() -> None:
    buckets = [bucket(T=8), bucket(T=64), bucket("8/124", T=32), bucket("8/124", T=16)]
    assert profiles_of_split(buckets, "") == [0, 1]
    assert profiles_of_split(buckets, "8/124") == [2, 3]
    assert profiles_of_split(buckets, "16/116") == [0, 1]
    assert profiles_of_split([], "8/124") is None


def test_limits_are_what_every_segment_takes() -> None:
    first = segment(bucket(T=64, B=8, MB=32), bucket(T=256, B=4, MB=64), bucket("8/124", T=16, B=2, MB=8))
    last = segment(bucket(T=128, B=16, MB=64, R=128))
    free = 1 << 30
    assert bucket_limits([first, last], "") == CallBounds(128, 8, free, 64, 128, free)
    assert bucket_limits([first, last], "8/124") == CallBounds(16, 2, free, 8, 128, free)
    assert bucket_limits([first, segment()], "") is None


@pytest.mark.parametrize(("runtime", "most", "usual"), [("torch", 0, 1024), ("llvm", 0, 256), ("tensorrt", 512, 512)])
def test_gpus_read_1024_prompt_tokens_per_step_if_engines_take_them(runtime: str, most: int, usual: int) -> None:
    model = ModelEngine(SPEC, None, (segment(bucket(T=64, B=8), bucket(T=most, B=4)) if most else segment(),))
    manifest: Any = SimpleNamespace(target=model, runtime_spec=RUNTIMES[runtime])
    assert with_prompt_rows(EngineConfig(), manifest).max_prefill_tokens == usual
    assert with_prompt_rows(EngineConfig(max_prefill_tokens=256), manifest).max_prefill_tokens == 256


def test_limits_of_serving_are_within_those_of_the_build() -> None:
    model = ModelEngine(SPEC, None, (segment(bucket(T=64, B=8, MB=32), bucket(T=256, B=4, MB=64)),))
    models = ModelPair(model, model)
    check_call_limits(models, EngineConfig.from_options(max_num_seqs=8, max_prefill_tokens=256))
    for name, value in (("max_num_seqs", 9), ("max_prefill_tokens", 257)):
        limit, flag = value - 1, name.replace("_", "-")
        with pytest.raises(
            ConfigError, match=f"{name} = {value}: .* was built for at most {limit}; .* --{flag} {value}"
        ):
            check_call_limits(models, EngineConfig.from_options(**{"max_num_seqs": 4, name: value}))
