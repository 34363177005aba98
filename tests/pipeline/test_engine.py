"""The real scheduler, step and sampler on models whose every KV entry matters.

The central property: tokens do not depend on speculation, batching, chunking, reuse or preemption.
"""

import numpy as np
import pytest

from faser_backend.core.errors import ConfigError, QueueFullError, RequestError
from faser_backend.core.request import FinishReason, Request, Sampling
from tests.support.harness import CONTEXT, VOCAB, drive, fake_engine, request


def random_requests(seed: int, count: int) -> list[Request]:
    """Mixed prompts (some share prefixes), lengths and sampling parameters."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(VOCAB, size=20).tolist()
    result = []
    for index in range(count):
        prompt = shared[: int(rng.integers(21))] + rng.integers(VOCAB, size=int(rng.integers(1, 30))).tolist()
        sampling = [
            Sampling(),
            Sampling(temperature=1.0, seed=int(rng.integers(1000))),
            Sampling(temperature=0.8, top_k=6, top_p=0.9, seed=int(rng.integers(1000))),
            Sampling(
                temperature=0.9,
                min_p=0.05,
                repetition_penalty=1.2,
                presence_penalty=0.4,
                frequency_penalty=0.3,
                min_tokens=5,
                logit_bias={3: -2.0, 5: 1.5},
                bad_words=((2, 7), (9,)),
                seed=2**64 - 1 - index,
            ),
        ][index % 4]
        end_ids = (1,) if index % 3 == 0 else ()
        stop_sequences = ((4, 6), (8,)) if index % 5 == 0 else ()
        result.append(
            request(
                f"r{index}",
                prompt,
                int(rng.integers(1, 40)),
                sampling=sampling,
                end_ids=end_ids,
                stop_sequences=stop_sequences,
                wants_log_probs=index % 2 == 0,
                max_draft_tokens=None if index % 7 else index % 3,
            )
        )
    return result


def alone(requests: list[Request]) -> dict[str, list[int]]:
    """Every request by itself, without speculation or reuse: the reference."""
    engine, _ = fake_engine("none", can_reuse=False, max_prefill_tokens=1000)
    return {r.request_id: drive(engine, [r]).tokens[r.request_id] for r in requests}


def test_draft_catches_up_after_rounds_without_it():
    """A request that opted out leaves blocks without draft KV; one that drafts reuses them."""
    prompt = list(range(20)) * 2
    silent = request("silent", prompt, 10, max_draft_tokens=0)
    loud = request("loud", prompt, 10)
    expected = alone([silent, loud])
    engine, _ = fake_engine("fixed:4")
    drive(engine, [silent])
    result = drive(engine, [loud])
    assert result.tokens["loud"] == expected["loud"]
    assert result.final["loud"].stats.num_reused_tokens > 0
    assert result.final["loud"].stats.num_accepted > 0


def test_finish_reasons():
    engine, _ = fake_engine("fixed:4")
    free = drive(engine, [request("a", [1, 2, 3], 12)])
    tokens = free.tokens["a"]
    assert free.final["a"].finish_reason is FinishReason.LENGTH
    ended = drive(engine, [request("b", [1, 2, 3], 12, end_ids=(tokens[5],))])
    cut = tokens.index(tokens[5]) + 1
    assert ended.tokens["b"] == tokens[:cut]
    assert ended.final["b"].finish_reason is FinishReason.END_ID
    pair = tuple(tokens[6:8])
    stopped = drive(engine, [request("c", [1, 2, 3], 12, stop_sequences=(pair,))])
    first = next(i for i in range(len(tokens)) if tuple(tokens[i : i + 2]) == pair)
    assert stopped.tokens["c"] == tokens[: first + 2]
    assert stopped.final["c"].finish_reason is FinishReason.STOP_WORDS


def test_stop_request_is_a_normal_shorter_answer():
    engine, _ = fake_engine("fixed:2")
    engine.submit(request("a", [1, 2, 3], 60))
    collected: list[int] = []
    while len(collected) < 5:
        collected += [token for output in engine.step() for token in output.token_ids]
    assert engine.end("a", FinishReason.STOPPED)
    (final,) = engine.step()
    assert final.finish_reason is FinishReason.STOPPED
    assert not engine.end("a", FinishReason.STOPPED)
    assert not engine.has_work


def test_an_ending_during_submission_takes_effect_behind_it(monkeypatch: pytest.MonkeyPatch):
    engine, _ = fake_engine("fixed:2")
    acquire = engine.adapters.acquire

    def meanwhile(asked: Request):
        assert engine.end("a", FinishReason.STOPPED) and engine.step() == []
        return acquire(asked)

    monkeypatch.setattr(engine.adapters, "acquire", meanwhile)
    engine.submit(request("a", [1, 2, 3], 60))
    (final,) = engine.step()
    assert final.finish_reason is FinishReason.STOPPED and not engine.has_work


def test_a_runtime_without_adapters_refuses_them():
    with pytest.raises(ConfigError, match="lora = 'red': this engine's runtime computes no adapters"):
        fake_engine("none")[0].adapters.load("red", {})


def test_queue_limit_and_duplicate_ids():
    engine, _ = fake_engine("none", max_queue_size=2)
    engine.submit(request("a", [1], 4))
    with pytest.raises(RequestError, match="already in use"):
        engine.submit(request("a", [1], 4))
    engine.submit(request("b", [1], 4))
    with pytest.raises(QueueFullError, match="Exceeds maximum queue size"):
        engine.submit(request("c", [1], 4))
    while engine.has_work:
        engine.step()
    engine.submit(request("c", [1], 4))


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("prompt is empty", {"prompt": []}),
        ("below the context length", {"prompt": [1] * CONTEXT}),
        (r"token ids must lie in \[0, 23\]", {"prompt": [1, VOCAB]}),
        (r"token ids must lie in", {"prompt": [-1]}),
        (r"max_tokens = 0: must lie in \[1, 93\]", {"max_tokens": 0}),
        ("temperature = nan", {"sampling": Sampling(temperature=float("nan"))}),
        ("top_k = -1", {"sampling": Sampling(top_k=-1)}),
        ("repetition_penalty = 0", {"sampling": Sampling(repetition_penalty=0.0)}),
        ("seed = -1", {"sampling": Sampling(seed=-1)}),
        ("logit_bias token id = 99", {"sampling": Sampling(logit_bias={99: 1.0})}),
        ("logit_bias", {"sampling": Sampling(logit_bias={1: float("nan")})}),
        ("bad_words = 1025: at most 1024", {"sampling": Sampling(bad_words=((9,),) * 1025)}),
        ("bad_words length = 8193: at most 8192", {"sampling": Sampling(bad_words=((9,) * 8193,))}),
        ("stop_words", {"stop_sequences": ((),)}),
        ("stop_words = 65: at most 64", {"stop_sequences": ((9,),) * 65}),
        ("stop_words length = 4097: at most 4096", {"stop_sequences": ((9,) * 4097,)}),
        ("end_id = 24", {"end_ids": (24,)}),
        ("num_draft_tokens = -1", {"max_draft_tokens": -1}),
        (r"draft_input_ids = 24: must lie in \[0, 23\]", {"draft_ids": (1, VOCAB)}),
    ],
)
def test_bad_requests_get_one_clear_error(field: str, changes: dict):
    engine, _ = fake_engine("none")
    options = {"prompt": [1, 2, 3], "max_tokens": 8, **changes}
    with pytest.raises(RequestError, match=field):
        engine.submit(request("bad", options.pop("prompt"), options.pop("max_tokens"), **options))
    assert not engine.has_work
