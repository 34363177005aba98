"""Counters that come with every output of a request that asks for them."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace

import pytest

from faser_backend.core.decision import PipelineMode
from tests.forced_engine import open_forced
from tests.forcing import forced
from tests.harness import BLOCK
from tests.test_engine import random_requests
from tests.test_returned_logits import outputs_of


@pytest.mark.parametrize("mode", PipelineMode)
def test_counters_come_with_every_output_of_who_asks(mode: PipelineMode):
    requests = [replace(r, wants_stats=index % 2 == 0) for index, r in enumerate(random_requests(3, 8))]
    fake = open_forced("fixed:4", forced(mode), num_blocks=40)
    outputs = outputs_of(fake.engine, requests, seed=0)
    for r in requests:
        *earlier, last = outputs[r.request_id]
        assert last.stats is not None
        if not r.wants_stats:
            assert all(output.stats is None for output in earlier)
            continue
        all_stats = [output.stats for output in (*earlier, last) if output.stats is not None]
        assert len(set(map(id, all_stats))) == len(earlier) + 1, "a copy each"
        for number, stats in enumerate(all_stats, 1):
            assert stats.num_steps == number
            num_tokens = r.prompt_ids.size + sum(len(o.token_ids) for o in outputs[r.request_id][:number])
            assert stats.num_allocated_blocks * BLOCK >= num_tokens - 1
        for before, after in itertools.pairwise(all_stats):
            falls = {name for name, value in asdict(before).items() if value > asdict(after)[name]}
            assert falls <= {"num_allocated_blocks"}
