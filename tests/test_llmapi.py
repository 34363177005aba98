"""The llmapi contract: its names and defaults without a server, and one real server that speaks it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from faser_backend.core.errors import RequestError
from faser_backend.core.request import FinishReason, RequestOutput, RequestStats
from faser_backend.serving.llmapi import LlmApiWire
from tests.served import Served, serve
from tests.serving_pair import build_pair
from tests.strict_clients import stream_grpc, text_of
from tests.test_contract import HELLO, TOKENIZER
from tests.triton_clients import Stream, wait_for_free_blocks

YES, SEED = np.array([True]), np.array([4], np.uint64)
REASONS = {"return_finish_reason": YES, "return_stop_reason": YES}
OUTPUTS = ["text_output", "finish_reason", "stop_reason", "cumulative_logprob", "acceptance_rate"]


def parse(**tensors):
    given = {"text_input": np.array([b"the fox"], dtype=object), **tensors}
    (parsed,) = LlmApiWire().parse(given, "r", HELLO, TOKENIZER, is_decoupled=True)
    return parsed


def test_defaults():
    parsed = parse()
    assert parsed.request.max_tokens == 32 and parsed.request.sampling.is_greedy
    assert parsed.excludes_input and not parsed.includes_stop


def test_sampling_parameters_arrive():
    sampling = parse(
        sampling_param_temperature=np.array([0.5], np.float32),
        sampling_param_top_k=np.array([7], np.int32),
        sampling_param_presence_penalty=np.array([0.25], np.float32),
        sampling_param_seed=np.array([9], np.uint64),
    ).request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.presence_penalty, sampling.seed) == (0.5, 7, 0.25, 9)


def test_several_candidates_are_refused():
    with pytest.raises(RequestError, match="sampling_param_best_of = 3: several candidates: not supported"):
        parse(sampling_param_best_of=np.array([3], np.int32))


def test_stop_text_is_cut_off_and_named():
    flags = {name: np.array([True]) for name in ("return_finish_reason", "return_stop_reason")}
    parsed = parse(sampling_param_stop=np.array([b"two"], dtype=object), **flags)
    reply = LlmApiWire().reply(parsed, OUTPUTS, TOKENIZER)
    reply.add(RequestOutput("r", TOKENIZER.encode("one two three")))
    assert reply.is_stopped
    reply.add(RequestOutput("r", [], finish_reason=FinishReason.STOPPED))
    arrays = {name: array.tolist() for name, array in reply.render()}
    assert arrays == {"text_output": [b"one "], "finish_reason": [b"stop"], "stop_reason": [b"two"]}


def test_streamed_text_is_all_text_so_far_and_absent_reasons_are_none():
    flags = {name: np.array([True]) for name in ("return_finish_reason", "return_stop_reason", "streaming")}
    reply = LlmApiWire().reply(parse(**flags), OUTPUTS, TOKENIZER)
    ids = TOKENIZER.encode("one two")
    reply.add(RequestOutput("r", ids[:2]))
    first = {name: array.tolist() for name, array in reply.render()}
    assert (first["finish_reason"], first["stop_reason"]) == ([b"None"], [b"None"])
    reply.add(RequestOutput("r", ids[2:], finish_reason=FinishReason.LENGTH))
    last = {name: array.tolist() for name, array in reply.render()}
    assert (last["text_output"], last["finish_reason"]) == ([b"one two"], [b"length"])
    assert b"one two".startswith(first["text_output"][0])


@pytest.mark.parametrize(
    ("tensors", "temperature"),
    [
        ({"temperature": 0.5}, 0.5),
        ({"temperature": 0.5, "top_p": 0.0}, 0.0),
        ({"top_p": 1.0}, 1.0),
        ({}, 0.0),
    ],
)
def test_a_temperature_alone_samples(tensors, temperature):
    given = {f"sampling_param_{name}": np.array([value], np.float32) for name, value in tensors.items()}
    assert parse(**given).request.sampling.temperature == pytest.approx(temperature)
    if temperature:
        assert parse(**given).request.sampling.seed != parse(**given).request.sampling.seed


def test_cache_use_has_the_names_of_the_llm_api():
    parsed = parse(sampling_param_return_perf_metrics=np.array([True]))
    names = ["kv_cache_reused_block", "kv_cache_missed_block", "kv_cache_hit_rate", "kv_cache_alloc_new_blocks"]
    reply = LlmApiWire().reply(replace(parsed, num_prompt_blocks=4), names, TOKENIZER)
    stats = RequestStats(num_allocated_blocks=5, num_reused_blocks=3)
    reply.add(RequestOutput("r", [], finish_reason=FinishReason.LENGTH, stats=stats))
    arrays = dict(reply.render())
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "kv_cache_reused_block": [3],
        "kv_cache_missed_block": [1],
        "kv_cache_hit_rate": [0.75],
        "kv_cache_alloc_new_blocks": [2],
    }


def test_one_prompt_per_request():
    with pytest.raises(RequestError, match=r"text_input = \[2\]: one prompt per request"):
        parse(text_input=np.array([b"a", b"b"], dtype=object))


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Served]:
    engine_dir = build_pair(tmp_path_factory.mktemp("llmapi"))
    with serve("--contract", "llmapi", "--engine-dir", engine_dir, "--num-threads", 1) as served:
        yield served


def ask(server: Served, *outputs: str, **more: np.ndarray) -> list[Any]:
    given = {"text_input": np.array([b"def f"], dtype=object), "sampling_param_max_tokens": np.array([200], np.int32)}
    given |= {"sampling_param_temperature": np.array([1.0], np.float32), "sampling_param_seed": SEED}
    return stream_grpc(server.grpc_port, "tensorrt_llm", given | more, outputs)


def test_streamed_responses_carry_the_whole_text(server: Served):
    (unary,) = ask(server, "text_output")
    streamed = ask(server, "text_output", "finish_reason", "stop_reason", streaming=YES, **REASONS)
    texts = [text_of(response) for response in streamed]
    assert len(texts) > 3 and all(later.startswith(text) for text, later in pairwise(texts))
    assert texts[-1] == text_of(unary)
    reasons = [response.as_numpy("finish_reason")[0].decode() for response in streamed]
    assert set(reasons[:-1]) == {"None"} and reasons[-1] in ("length", "stop")
    assert {response.as_numpy("stop_reason")[0].decode() for response in streamed} == {"None"}


def test_a_stop_string_is_named_and_cut_off(server: Served):
    (whole,) = ask(server, "text_output")
    stop = text_of(whole)[8:10]
    (answer,) = ask(
        server, "text_output", "finish_reason", "stop_reason", **REASONS,
        sampling_param_stop=np.array([stop.encode()], dtype=object),
    )  # fmt: skip
    assert text_of(answer) == text_of(whole)[: text_of(whole).index(stop)]
    assert answer.as_numpy("stop_reason")[0].decode() == stop
    assert answer.as_numpy("finish_reason")[0] == b"stop"


def test_stop_requests_are_answered_with_cancelled(server: Served):
    stopping = {"text_input": np.array([b"x"], dtype=object), "stop": YES}
    for request_id, message in (
        ("", "A request id must be provided for request cancellation"),
        ("nobody", "Request cancelled by client"),
    ):
        with pytest.raises(InferenceServerException, match=message):
            stream_grpc(server.grpc_port, "tensorrt_llm", stopping, request_id=request_id)
    running = Stream(f"127.0.0.1:{server.grpc_port}", has_batch=False)
    running.send("tensorrt_llm", "mine", text_input="def f", sampling_param_max_tokens=500, streaming=True)
    running.receive()
    with pytest.raises(InferenceServerException, match="Request cancelled by client"):
        stream_grpc(server.grpc_port, "tensorrt_llm", stopping, request_id="mine")
    assert running.answer().error is None
    wait_for_free_blocks(server.metrics_port)
    running.close()
