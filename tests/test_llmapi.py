"""The llmapi contract: its names and defaults without a server, and one real server that speaks it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.servers import free_ports
from faser_backend.core.errors import RequestError
from faser_backend.core.request import FinishReason, RequestOutput
from faser_backend.serving.llmapi import LlmApiWire
from faser_backend.serving.server import LaunchOptions, TritonServer
from tests.serving_pair import build_pair
from tests.test_contract import HELLO, TOKENIZER
from tests.triton_clients import Stream, wait_for_free_blocks

OUTPUTS = ["text_output", "finish_reason", "stop_reason", "cumulative_logprob", "acceptance_rate"]


def parse(**tensors):
    given = {"text_input": np.array([b"the fox"], dtype=object), **tensors}
    return LlmApiWire().parse(given, "r", HELLO, TOKENIZER, is_decoupled=True)


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


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[LaunchOptions]:
    engine_dir = build_pair(tmp_path_factory.mktemp("llmapi"))
    parameters = {"engine_dir": str(engine_dir), "num_threads": "1", "stats_check_period_ms": "50"}
    options = LaunchOptions(*free_ports(3), contract="llmapi", parameters=parameters)
    with TritonServer(options) as running:
        running.wait_ready()
        yield options


def test_llmapi_server(server: LaunchOptions):
    stream = Stream(f"127.0.0.1:{server.grpc_port}", has_batch=False)
    given = {"text_input": "def f", "sampling_param_max_tokens": 60, "sampling_param_temperature": 1.0}
    given |= {"sampling_param_seed": 4, "return_finish_reason": True, "return_cumulative_logprob": True}
    unary = stream.ask("tensorrt_llm", **given)
    streamed = stream.ask("tensorrt_llm", streaming=True, **given)
    assert unary.error is None and unary.text and streamed.text == unary.text
    assert unary.last.as_numpy("finish_reason").tolist()[0] in (b"length", b"stop")
    assert unary.last.as_numpy("cumulative_logprob")[0] < 0
    stream.send("tensorrt_llm", text_input="x", stop=True)
    assert "A request id must be provided for request cancellation" in (stream.receive()[1] or "")
    stream.close()
    running = Stream(f"127.0.0.1:{server.grpc_port}", has_batch=False)
    stopper = Stream(f"127.0.0.1:{server.grpc_port}", has_batch=False)
    running.send("tensorrt_llm", request_id="mine", streaming=True, **{**given, "sampling_param_max_tokens": 500})
    running.receive()
    stopper.send("tensorrt_llm", request_id="mine", text_input="x", stop=True)
    assert "Request cancelled by client" in (stopper.receive()[1] or "")
    assert running.answer().error is None
    wait_for_free_blocks(server.metrics_port)
    running.close()
    stopper.close()
