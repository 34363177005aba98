"""Conformance with TensorRT-LLM's behaviour, as its clients read it: each behaviour, read as strictly as they do."""

import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from faser_backend.serving.parameters import ServeOptions
from faser_backend.triton import launch
from faser_backend.triton.contract import UNSUPPORTED
from faser_backend.triton.model_configs import CONTRACTS, INFLIGHT_BATCHER, LLMAPI, ModelConfig
from faser_backend.triton.tensors import TritonTensor
from tests.support.clients import (
    Arrays,
    Stream,
    events_of,
    ids,
    ids_of,
    infer_grpc,
    infer_http,
    names_of,
    one,
    post,
    stream_grpc,
    text,
    text_of,
    text_request,
    token_request,
    wait_for_free_blocks,
)
from tests.support.conformance_cases import DOCS, VOCAB_SIZE, base_request, neutral, output_of, shape_of, used, written
from tests.support.served import Served, serve
from tests.support.serving_pair import MAX_CONTEXT, byte_level_tokenizer

PROMPT = "def größe(x):\n"
LONG = 200  # tokens: even a busy machine cannot join all of such a stream in one response
STREAM = {"stream": one(True, bool)}
STREAMING = {"streaming": one(True, bool)}
EXCLUDE = {"exclude_input_in_output": one(True, bool)}
PERF_OUTPUTS = ("kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks")
PERF_OUTPUTS += ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")
PERF_OUTPUTS += ("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens")


@pytest.fixture(scope="module")
def start(engine_dir: Path) -> Iterator[Callable[..., Served]]:
    """Servers by contract, streaming or unary, started on first use."""
    with ExitStack() as stack:

        @cache
        def start(contract: str, *, is_decoupled: bool) -> Served:
            options = ["--engine-dir", engine_dir, "--num-threads", 1, "--policy", "fixed:2", "--contract", contract]
            return stack.enter_context(serve(*options, "--decoupled" if is_decoupled else "--no-decoupled"))

        yield start


@pytest.fixture
def decoupled(start) -> Served:
    return start("inflight_batcher", is_decoupled=True)


@pytest.fixture
def unary(start) -> Served:
    return start("inflight_batcher", is_decoupled=False)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_text_has_one_dimension_however_it_is_asked_for(decoupled: Served, unary: Served, model: str):
    arrays = text_request(PROMPT, LONG)
    expected = text_of(infer_grpc(unary.grpc_port, model, arrays))
    assert expected.startswith(PROMPT)
    assert text_of(infer_http(unary.http_port, model, arrays)) == expected
    (whole,) = stream_grpc(decoupled.grpc_port, model, arrays, ["text_output"])
    assert text_of(whole) == expected
    streamed = stream_grpc(decoupled.grpc_port, model, arrays | STREAM, ["text_output"], at_least=2)
    assert PROMPT + "".join(map(text_of, streamed)) == expected
    body = {"text_input": PROMPT, "max_tokens": LONG, "end_id": 1048576}
    status, answer = post(unary.http_port, f"/v2/models/{model}/generate", body)
    assert status == 200 and json.loads(answer)["text_output"] == expected
    status, answer = post(decoupled.http_port, f"/v2/models/{model}/generate_stream", {**body, "stream": True})
    assert status == 200 and PROMPT + "".join(event["text_output"] for event in events_of(answer)) == expected


def documented_commands() -> list[str]:
    """Returns every `faser serve` command in a shell block of a page."""
    pages = [DOCS.parents[1] / "README.md", *DOCS.parent.glob("*.md")]
    blocks = [block for page in pages for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)]
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return sorted({line for line in lines if line.startswith("faser serve")})


def test_every_documented_command_is_one_that_starts(engine_dir: Path, run, monkeypatch: pytest.MonkeyPatch):
    """Runs each command up to the start of the server."""
    started: list[ServeOptions] = []
    monkeypatch.setattr(launch, "serve_until_signalled", lambda options, *_, **__: started.append(options) or 0)
    for command in documented_commands():
        status, _, err = run(*re.sub(r"engines_out|Hug\S+", str(engine_dir), command).split()[1:])
        assert status == 0, (command, err)
    assert {options.contract for options in started} == set(CONTRACTS)


def test_a_client_that_chains_the_models_gets_the_text_of_the_ensemble(unary: Served):
    words = {"BAD_WORDS_DICT": text("q", "z"), "STOP_WORDS_DICT": text("}}}}")}
    given = infer_grpc(
        unary.grpc_port, "preprocessing", {"QUERY": text(PROMPT), "REQUEST_OUTPUT_LEN": one(24), **words}
    )
    passed_on = {
        "input_ids": "INPUT_ID",
        "decoder_input_ids": "DECODER_INPUT_ID",
        "input_lengths": "REQUEST_INPUT_LEN",
        "decoder_input_lengths": "REQUEST_DECODER_INPUT_LEN",
        "request_output_len": "REQUEST_OUTPUT_LEN",
        "bad_words_list": "BAD_WORDS_IDS",
        "stop_words_list": "STOP_WORDS_IDS",
        "embedding_bias": "EMBEDDING_BIAS",
        "end_id": "OUT_END_ID",
        "pad_id": "OUT_PAD_ID",
    }
    arrays = {theirs: given.as_numpy(name) for theirs, name in passed_on.items()}
    found = infer_grpc(unary.grpc_port, "tensorrt_llm", arrays)
    tokens = {"TOKENS_BATCH": found.as_numpy("output_ids"), "SEQUENCE_LENGTH": found.as_numpy("sequence_length")}
    written = infer_grpc(unary.grpc_port, "postprocessing", tokens).as_numpy("OUTPUT")[0].decode()
    whole = {"text_input": text(PROMPT), "max_tokens": one(24), "bad_words": text("q", "z"), "stop_words": text("}}}}")}
    assert written == text_of(infer_grpc(unary.grpc_port, "ensemble", whole))


def test_a_temperature_alone_is_greedy_and_a_seed_that_is_left_out_is_0(unary: Served):
    def ask(**more: np.ndarray) -> str:
        return text_of(infer_grpc(unary.grpc_port, "ensemble", text_request(PROMPT, 40, **more)))

    hot = one(1.0, np.float32)
    greedy = ask()
    assert ask(temperature=hot) == greedy
    assert ask(temperature=hot, top_k=one(0), top_p=one(0.0, np.float32)) == greedy
    assert ask(temperature=hot, top_k=one(1), seed=one(5, np.uint64)) == greedy
    sampled = ask(temperature=hot, top_p=one(1.0, np.float32))
    assert sampled != greedy and sampled == ask(temperature=hot, top_p=one(1.0, np.float32), seed=one(0, np.uint64))
    assert sampled != ask(temperature=hot, top_p=one(1.0, np.float32), seed=one(1, np.uint64))
    assert sampled != ask(top_k=one(4)) != greedy


def test_a_batch_is_answered_prompt_by_prompt(decoupled: Served, unary: Served):
    prompts = [PROMPT, "x", "the quick"]
    alone = [text_of(infer_grpc(unary.grpc_port, "ensemble", text_request(prompt, 8))) for prompt in prompts]
    requests = [text_request(prompt, 8) for prompt in prompts]
    batch = {name: np.concatenate([request[name] for request in requests]) for name in requests[0]}
    merged = infer_grpc(unary.grpc_port, "ensemble", batch)
    assert [each.decode() for each in merged.as_numpy("text_output")] == alone
    assert merged.as_numpy("batch_index").tolist() == [[0], [1], [2]]
    whole = {}
    for response in stream_grpc(decoupled.grpc_port, "ensemble", batch):
        whole[response.as_numpy("batch_index")[0][0]] = text_of(response)
    assert whole == dict(enumerate(alone))
    joined = list(prompts)
    streaming = batch | {"stream": np.full((3, 1), True)}
    for response in stream_grpc(decoupled.grpc_port, "ensemble", streaming):
        joined[response.as_numpy("batch_index")[0][0]] += text_of(response)
    assert joined == alone


def test_token_batches_are_padded_and_cut_by_their_lengths(decoupled: Served, unary: Served):
    batch = {
        "input_ids": np.array([[5, 6, 7], [9, -1, -1]], np.int32),
        "input_lengths": np.array([[3], [1]], np.int32),
        "request_output_len": np.array([[4], [2]], np.int32),
        "end_id": np.array([[-1], [-1]], np.int32),
    }
    alone = [ids_of(infer_grpc(unary.grpc_port, "tensorrt_llm", token_request(5, 6, 7)))]
    alone.append(ids_of(infer_grpc(unary.grpc_port, "tensorrt_llm", token_request(9, max_tokens=2))))
    merged = infer_http(unary.http_port, "tensorrt_llm", batch)
    assert merged.as_numpy("output_ids").shape == (2, 1, 7)
    assert merged.as_numpy("sequence_length").tolist() == [[7], [3]]
    assert merged.as_numpy("output_ids")[1][0].tolist() == [*alone[1], -1, -1, -1, -1]
    for response in stream_grpc(decoupled.grpc_port, "tensorrt_llm", batch):
        assert ids_of(response) == alone[response.as_numpy("batch_index")[0][0]]


def test_several_sequences_of_one_prompt(decoupled: Served, unary: Served):
    sampled = {"runtime_top_p": one(1.0, np.float32), "seed": one(11, np.uint64)} | EXCLUDE
    arrays = token_request(5, 6, 7, max_tokens=12, num_return_sequences=one(3), **sampled)
    found: dict[int, list[int]] = {}
    for response in stream_grpc(decoupled.grpc_port, "tensorrt_llm", arrays | STREAMING):
        found.setdefault(response.as_numpy("sequence_index")[0][0], []).extend(ids_of(response))
    assert sorted(found) == [0, 1, 2] and len(set(map(tuple, found.values()))) == 3
    first = ids_of(infer_grpc(unary.grpc_port, "tensorrt_llm", token_request(5, 6, 7, max_tokens=12, **sampled)))
    assert found[0] == first
    merged = infer_grpc(unary.grpc_port, "tensorrt_llm", arrays)
    assert merged.as_numpy("output_ids")[0].tolist() == [found[0], found[1], found[2]]
    assert merged.as_numpy("sequence_index").tolist() == [[0, 1, 2]]


def test_clients_of_v0_13_find_what_they_index_whatever_they_ask_for(unary: Served):
    answer = infer_grpc(unary.grpc_port, "tensorrt_llm", token_request(5, 6, num_return_sequences=one(1)))
    assert answer.as_numpy("batch_index")[0][0] == 0 and answer.as_numpy("cum_log_probs")[0][0] == 0
    assert answer.as_numpy("sequence_index") is None, "there is nothing to number"


def test_draft_tokens_of_a_client_are_verified_and_change_nothing(unary: Served):
    plain = infer_grpc(unary.grpc_port, "tensorrt_llm", token_request(5, 6, 7, max_tokens=9, **EXCLUDE))
    right = ids_of(plain)
    asked = {"return_perf_metrics": one(True, bool), "num_draft_tokens": one(8)} | EXCLUDE
    for draft, num_right in ((right[:5], 5), ([*right[:2], (right[2] + 1) % VOCAB_SIZE, 8], 2)):
        arrays = token_request(5, 6, 7, max_tokens=len(draft) + 1, draft_input_ids=ids(*draft), **asked)
        answer = infer_grpc(unary.grpc_port, "tensorrt_llm", arrays)
        assert ids_of(answer) == right[: len(draft) + 1]
        assert answer.as_numpy("total_accepted_draft_tokens")[0][0] >= num_right


@pytest.mark.parametrize("name", ["draft_logits", "draft_acceptance_threshold"])
def test_drafts_are_not_accepted_by_their_logits(unary: Served, name: str):
    logits = np.zeros((1, 2, VOCAB_SIZE), np.float32) if name == "draft_logits" else one(0.5, np.float32)
    with pytest.raises(InferenceServerException, match=f"{name} = .*by their logits: not supported"):
        infer_grpc(unary.grpc_port, "tensorrt_llm", token_request(5, 6, draft_input_ids=ids(3, 4), **{name: logits}))


def test_logits_of_prompt_and_answer_are_those_that_chose_the_tokens(decoupled: Served, unary: Served):
    asked = {"return_context_logits": one(True, bool), "return_generation_logits": one(True, bool)} | EXCLUDE
    arrays = token_request(5, 6, 7, 8, max_tokens=6, **asked)
    for _ in range(2):  # the second prompt is in the cache, and must be read all the same
        answer = infer_grpc(unary.grpc_port, "tensorrt_llm", arrays)
        context, generation = answer.as_numpy("context_logits"), answer.as_numpy("generation_logits")
        assert context.shape == (1, 4, VOCAB_SIZE) and generation.shape == (1, 1, 6, VOCAB_SIZE)
        assert generation[0][0].argmax(axis=1).tolist() == ids_of(answer)
        assert np.array_equal(context[0][-1], generation[0][0][0])
    rows = []
    streamed = stream_grpc(decoupled.grpc_port, "tensorrt_llm", arrays | STREAMING)
    for response in (streamed[0], streamed[-1]):
        assert np.allclose(response.as_numpy("context_logits"), context, atol=1e-4)
    for response in streamed:
        rows.append(response.as_numpy("generation_logits")[0][0])
        assert rows[-1].shape[0] == len(ids_of(response))
    assert np.allclose(np.concatenate(rows), generation[0][0], atol=1e-4)


def test_max_tokens_beyond_the_context_are_clamped_and_a_prompt_beyond_it_is_refused(unary: Served):
    answer = infer_grpc(unary.grpc_port, "tensorrt_llm", token_request(5, 6, 7, max_tokens=10**6))
    assert answer.as_numpy("sequence_length")[0][0] == MAX_CONTEXT
    with pytest.raises(InferenceServerException, match=f"context length of {MAX_CONTEXT} tokens"):
        infer_grpc(unary.grpc_port, "tensorrt_llm", token_request(*[5] * MAX_CONTEXT))


def test_perf_metrics_come_with_every_streamed_response(decoupled: Served):
    arrays = text_request(PROMPT, LONG, return_perf_metrics=one(True, bool)) | STREAM
    responses = stream_grpc(decoupled.grpc_port, "ensemble", arrays, ["text_output", *PERF_OUTPUTS], at_least=4)
    for response in responses:
        for name in PERF_OUTPUTS:
            assert np.isfinite(response.as_numpy(name)[0][0])
        assert response.as_numpy("kv_cache_alloc_total_blocks")[0][0] > 0
    drafted = [response.as_numpy("total_draft_tokens")[0][0] for response in responses]
    assert drafted == sorted(drafted) and drafted[-1] > drafted[0]


def test_keys_that_triton_would_drop_are_refused_where_a_contract_knows_them(unary: Served):
    body = {"text_input": PROMPT, "max_tokens": 2, "bad_words": "", "stop_words": ""}
    url = "/v2/models/ensemble/generate"
    status, answer = post(unary.http_port, url, {**body, "runtime_top_p": 0.5})
    assert status == 400 and "runtime_top_p = 'given': model ensemble has no such input" in answer
    status, answer = post(unary.http_port, url, {**body, "decoder_text_input": "x"})
    assert status == 400 and "encoder-decoder models: not supported" in answer
    status, _ = post(unary.http_port, url, {**body, "accumulate_tokens": True, "mine": "own"})
    assert status == 200


def test_padding_beyond_the_sequence_length_is_not_read(unary: Served):
    tokens = np.array([[[70, 71, -1, -1], [70, 71, 72, 99999]]], np.int32)
    arrays = {"TOKENS_BATCH": tokens, "SEQUENCE_LENGTH": np.array([[2, 3]], np.int32)}
    found = infer_grpc(unary.grpc_port, "postprocessing", arrays).as_numpy("OUTPUT")
    assert found.shape == (2,) and found[1].decode().startswith(found[0].decode())
    with pytest.raises(InferenceServerException, match="TOKENS_BATCH = -1: token ids must lie in"):
        infer_grpc(unary.grpc_port, "postprocessing", arrays | {"SEQUENCE_LENGTH": np.array([[3, 3]], np.int32)})


@pytest.mark.parametrize("end_id", [-1, 1048576, 2**31 - 1])
def test_an_end_id_that_no_token_has_never_stops(unary: Served, end_id: int):
    answer = infer_grpc(unary.grpc_port, "tensorrt_llm", token_request(5, 6, max_tokens=60) | {"end_id": one(end_id)})
    assert answer.as_numpy("sequence_length")[0][0] == 62


def test_the_configuration_shows_what_tools_read_of_it(unary: Served, engine_dir: Path):
    with urllib.request.urlopen(f"http://127.0.0.1:{unary.http_port}/v2/models/tensorrt_llm/config") as answer:
        config = json.loads(answer.read())
    shown = {name: entry["string_value"] for name, entry in config["parameters"].items()}
    assert shown["gpt_model_type"] == "inflight_fused_batching" and shown["gpt_model_path"] == str(engine_dir)
    assert shown["max_beam_width"] == "1" and shown["executor_worker_path"] == "none"
    assert config["max_batch_size"] == 64 and not config["model_transaction_policy"]["decoupled"]


# -- the llmapi contract ----------------------------------------------------------------------------------------------
YES, SEED = np.array([True]), np.array([4], np.uint64)
REASONS = {"return_finish_reason": YES, "return_stop_reason": YES}


@pytest.fixture
def llmapi(start) -> Served:
    return start("llmapi", is_decoupled=True)


def ask(llmapi: Served, *outputs: str, at_least: int = 0, **more: np.ndarray) -> list[Any]:
    given = {"text_input": np.array([b"def f"], dtype=object), "sampling_param_max_tokens": np.array([200], np.int32)}
    given |= {"sampling_param_temperature": np.array([1.0], np.float32), "sampling_param_seed": SEED}
    return stream_grpc(llmapi.grpc_port, "tensorrt_llm", given | more, outputs, at_least=at_least)


def test_streamed_responses_carry_the_whole_text(llmapi: Served):
    (unary,) = ask(llmapi, "text_output")
    streamed = ask(llmapi, "text_output", "finish_reason", "stop_reason", at_least=4, streaming=YES, **REASONS)
    texts = [text_of(response) for response in streamed]
    assert all(later.startswith(text) for text, later in pairwise(texts))
    assert texts[-1] == text_of(unary)
    reasons = [response.as_numpy("finish_reason")[0].decode() for response in streamed]
    assert set(reasons[:-1]) == {"None"} and reasons[-1] in ("length", "stop")
    assert {response.as_numpy("stop_reason")[0].decode() for response in streamed} == {"None"}


def test_a_stop_string_is_named_and_cut_off(llmapi: Served):
    (whole,) = ask(llmapi, "text_output")
    stop = text_of(whole)[8:10]
    (answer,) = ask(
        llmapi, "text_output", "finish_reason", "stop_reason", **REASONS,
        sampling_param_stop=np.array([stop.encode()], dtype=object),
    )  # fmt: skip
    assert text_of(answer) == text_of(whole)[: text_of(whole).index(stop)]
    assert answer.as_numpy("stop_reason")[0].decode() == stop
    assert answer.as_numpy("finish_reason")[0] == b"stop"


def test_stop_requests_are_answered_with_cancelled(llmapi: Served):
    stopping = {"text_input": np.array([b"x"], dtype=object), "stop": YES}
    for request_id, message in (
        ("", "A request id must be provided for request cancellation"),
        ("nobody", "Request cancelled by client"),
    ):
        with pytest.raises(InferenceServerException, match=message):
            stream_grpc(llmapi.grpc_port, "tensorrt_llm", stopping, request_id=request_id)
    running = Stream(f"127.0.0.1:{llmapi.grpc_port}", has_batch=False)
    running.send("tensorrt_llm", "mine", text_input="def f", sampling_param_max_tokens=500, streaming=True)
    running.receive()
    with pytest.raises(InferenceServerException, match="Request cancelled by client"):
        stream_grpc(llmapi.grpc_port, "tensorrt_llm", stopping, request_id="mine")
    assert running.answer().error is None
    wait_for_free_blocks(llmapi.metrics_port)
    running.close()


# -- every input and output -------------------------------------------------------------------------------------------
# Over gRPC streams, unary gRPC and HTTP, in both launch modes. An input that works is taken, one that does not is
# refused by name and feature when it is used and passes when it asks for nothing; an output has the name, type and
# rank that TensorRT-LLM sends.
NUM_NEW = 4
CONVERTERS = ("preprocessing", "postprocessing")


def cases(side: str) -> list[Any]:
    return [
        pytest.param(contract, model, spec, id=f"{contract}-{model.name}-{spec.name}")
        for contract, models in (("inflight_batcher", INFLIGHT_BATCHER), ("llmapi", LLMAPI))
        for model in models
        for spec in getattr(model, side)
        if spec.name != "stop"  # another kind of request
    ]


@pytest.fixture
def servers(start, contract: str) -> tuple[Served, Served]:
    """A streaming server and a unary one."""
    return start(contract, is_decoupled=True), start(contract, is_decoupled=False)


def ask_everywhere(servers: tuple[Served, Served], model: ModelConfig, arrays: Arrays) -> list[str]:
    """Returns the error of each way to send the request, "" for an answer."""
    decoupled, unary = servers
    ways = [
        lambda: infer_grpc(unary.grpc_port, model.name, arrays),
        lambda: infer_http(unary.http_port, model.name, arrays),
    ]
    if model.name not in CONVERTERS:
        ways.append(lambda: stream_grpc(decoupled.grpc_port, model.name, arrays)[0])
    errors = []
    for way in ways:
        try:
            way()
            errors.append("")
        except InferenceServerException as error:
            errors.append(str(error))
    return errors


@pytest.mark.parametrize(("contract", "model", "spec"), cases("inputs"))
def test_input(servers, contract: str, model: ModelConfig, spec: TritonTensor):
    arrays = used(model, spec)
    assert spec.name in arrays
    errors = ask_everywhere(servers, model, arrays)
    if spec.name not in UNSUPPORTED:
        assert set(errors) == {""}
        return
    assert all(f"{spec.name} = " in error and UNSUPPORTED[spec.name].feature in error for error in errors), errors
    assert set(ask_everywhere(servers, model, neutral(model, spec))) == {""}


@pytest.mark.parametrize(("contract", "model", "spec"), cases("outputs"))
def test_output(servers, contract: str, model: ModelConfig, spec: TritonTensor):
    decoupled, unary = servers
    output = output_of(model, spec)
    if output.flag == "never":
        answer = infer_grpc(unary.grpc_port, model.name, base_request(model), [spec.name])
        assert answer.as_numpy(spec.name) is None
        return
    arrays = asking_for(model, output.flag)
    ways = [
        infer_grpc(unary.grpc_port, model.name, arrays, [spec.name]),
        infer_http(unary.http_port, model.name, arrays, [spec.name]),
    ]
    if model.name not in CONVERTERS and output.flag != "num_return_sequences":
        ways += stream_grpc(decoupled.grpc_port, model.name, arrays, [spec.name])
    num_prompt = 3 if model.name == "tensorrt_llm" else len(byte_level_tokenizer().encode("def f").ids)
    expected = shape_of(output, num_new=NUM_NEW, num_prompt=num_prompt)
    if output.flag == "num_return_sequences":
        # Unary, one response holds them all; streamed, each sequence has responses of its own.
        for answer in stream_grpc(decoupled.grpc_port, model.name, arrays, [spec.name]):
            assert answer.as_numpy(spec.name).shape == expected
        expected = (1, 2)
    for answer in ways:
        array = answer.as_numpy(spec.name)
        assert array.shape == expected
        assert datatype_of(answer, spec.name) == spec.data_type.replace("STRING", "BYTES")
        if not isinstance(answer.get_response(), dict):
            assert names_of(answer) == [spec.name]


def asking_for(model: ModelConfig, flag: str) -> Arrays:
    """Returns a request whose answer has NUM_NEW tokens without the prompt, and the flag's values."""
    arrays = base_request(model)
    if model.name in CONVERTERS:
        return arrays
    if model in LLMAPI:
        return {**arrays, **({flag: np.array([True])} if flag else {})}
    arrays["exclude_input_in_output"] = one(True, bool)
    if flag == "num_return_sequences":
        return {**arrays, flag: one(2)}
    return {**arrays, **({flag: one(True, bool)} if flag else {})}


def datatype_of(answer: Any, name: str) -> str:
    response = answer.get_response()
    if isinstance(response, dict):  # HTTP
        return next(output["datatype"] for output in response["outputs"] if output["name"] == name)
    return next(output.datatype for output in response.outputs if output.name == name)


def test_the_page_tells_what_is_tested():
    page = DOCS.read_text(encoding="utf-8")
    assert written(page) == page, "run python -m tests.support.conformance_cases"
