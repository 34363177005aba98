"""Which profiles of a compiled engine a share of the GPU may run, and what calls they take: by the manifest alone."""

from __future__ import annotations

from faser_backend.device.cuda.programs import bucket_limits, profiles_of_split
from faser_backend.device.cuda.segment import CallBounds
from faser_backend.manifest import BucketSpec, FileSpec, SegmentSpec


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
