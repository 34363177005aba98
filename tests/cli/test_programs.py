"""Which profiles of a compiled engine a share of the GPU may run, and what calls they take: by the manifest alone."""

from __future__ import annotations

import pytest

from faser_backend.core.config import EngineConfig
from faser_backend.core.errors import ConfigError
from faser_backend.core.model import ModelSpec
from faser_backend.cuda.call_shapes import CallBounds
from faser_backend.cuda.tensorrt_programs import bucket_limits, profiles_of_split
from faser_backend.device.runtime import ModelPair
from faser_backend.manifest import BucketSpec, FileSpec, ModelEngine, SegmentSpec
from faser_backend.serving.compose import check_call_limits

SPEC = ModelSpec(
    num_layers=1,
    hidden_size=8,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=8,
    vocab_size=97,
    max_context=64,
    rope_theta=1e4,
    rms_eps=1e-5,
    tie_word_embeddings=True,
)


def segment(*buckets: BucketSpec) -> SegmentSpec:
    return SegmentSpec(FileSpec("target.0.engine", "0" * 64, 1), 0, 1, (), (), buckets)


def bucket(split: str = "", **most: int) -> BucketSpec:
    return BucketSpec("verify", {name: (1, 1, value) for name, value in most.items()}, split)


class TestBuckets:
    def test_a_share_runs_its_own_profiles_and_the_others_where_it_has_none(self) -> None:
        buckets = [bucket(T=8), bucket(T=64), bucket("8/124", T=32), bucket("8/124", T=16)]
        assert profiles_of_split(buckets, "") == [0, 1]
        assert profiles_of_split(buckets, "8/124") == [2, 3]
        assert profiles_of_split(buckets, "16/116") == [0, 1]
        assert profiles_of_split([], "8/124") is None

    def test_limits_are_what_every_segment_takes(self) -> None:
        first = segment(bucket(T=64, B=8, MB=32), bucket(T=256, B=4, MB=64), bucket("8/124", T=16, B=2, MB=8))
        last = segment(bucket(T=128, B=16, MB=64, R=128))
        free = 1 << 30
        assert bucket_limits([first, last], "") == CallBounds(128, 8, free, 64, 128, free)
        assert bucket_limits([first, last], "8/124") == CallBounds(16, 2, free, 8, 128, free)
        assert bucket_limits([first, segment()], "") is None

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_num_seqs": 8, "max_prefill_tokens": 256}, None),
            ({"max_num_seqs": 9}, r"max_num_seqs = 9: target.0.engine was built for at most 8; .* --max-num-seqs 9"),
            (
                {"max_num_seqs": 4, "max_prefill_tokens": 257},
                "max_prefill_tokens = 257: target.0.engine was built for at most 256; .* --max-prefill-tokens 257",
            ),
        ],
    )
    def test_what_is_served_has_to_lie_within_what_was_built(
        self, options: dict[str, int], message: str | None
    ) -> None:
        model = ModelEngine(SPEC, None, (segment(bucket(T=64, B=8, MB=32), bucket(T=256, B=4, MB=64)),))
        config = EngineConfig.from_options(**options)
        if message is None:
            check_call_limits(ModelPair(model, model), config)
        else:
            with pytest.raises(ConfigError, match=message):
                check_call_limits(ModelPair(model, model), config)
