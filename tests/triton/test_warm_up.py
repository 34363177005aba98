"""A warm-up runs every batch size and leaves no requests, metrics or observations behind."""

import pytest

from faser_backend.core.errors import FaserError
from faser_backend.core.request import Limits
from faser_backend.serving.compose import warm_up, warm_up_batches
from tests.support.harness import open_fake


def test_batches_grow_to_the_most_that_may_run_and_fit_the_context():
    batches = list(warm_up_batches(Limits(vocab_size=50, max_context=20), 12, 256))
    assert [len(batch) for batch in batches] == [1, 1, 1, 2, 2, 4, 4, 8, 8, 12, 12]
    for batch in batches:
        for each in batch:
            each.validate(Limits(50, 20))
            assert each.prompt_ids.max() < 50


def test_leaves_an_engine_as_it_was():
    engine = open_fake("fixed:2").engine
    seen = []
    engine.step_runner.observers.append(seen.append)
    observers = engine.step_runner.observers[:]
    warm_up(engine, max_num_seqs=4, max_prefill_tokens=8)
    assert not seen, "policies and listeners hear nothing of it"
    assert engine.step_runner.observers == observers
    metrics = engine.metrics()
    assert (metrics.num_steps, metrics.num_emitted) == (0, 0)
    assert not engine.has_work
    engine.check_integrity()


def test_a_step_that_fails_is_told():
    fake = open_fake("none")
    fake.targets[0].fails_at_call = 3
    with pytest.raises(FaserError, match="warm-up with 1 requests: the step of this request failed"):
        warm_up(fake.engine, max_num_seqs=1, max_prefill_tokens=8)
