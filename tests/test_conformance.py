"""What TensorRT-LLM's clients see, behaviour by behaviour, with reading code as strict as theirs."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.conformance_cases import DOCS, VOCAB_SIZE
from tests.served import Served, serve
from tests.serving_pair import MAX_CONTEXT, build_pair
from tests.strict_clients import (
    ids,
    ids_of,
    infer_grpc,
    infer_http,
    one,
    stream_grpc,
    text,
    text_of,
    text_request,
    token_request,
)
from tests.triton_clients import events_of, post

PROMPT = "def größe(x):\n"
LONG = 200  # tokens: even a busy machine cannot join all of such a stream in one response
STREAM = {"stream": one(True, bool)}
STREAMING = {"streaming": one(True, bool)}
EXCLUDE = {"exclude_input_in_output": one(True, bool)}
PERF_OUTPUTS = ("kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks")
PERF_OUTPUTS += ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")
PERF_OUTPUTS += ("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens")


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory) -> Path:
    return build_pair(tmp_path_factory.mktemp("conformance"))


@pytest.fixture(scope="module")
def decoupled(engine_dir: Path) -> Iterator[Served]:
    with serve("--engine-dir", engine_dir, "--num-threads", 1, "--policy", "fixed:2") as served:
        yield served


@pytest.fixture(scope="module")
def unary(engine_dir: Path) -> Iterator[Served]:
    with serve("--engine-dir", engine_dir, "--num-threads", 1, "--policy", "fixed:2", "--no-decoupled") as served:
        yield served


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_text_has_one_dimension_however_it_is_asked_for(decoupled: Served, unary: Served, model: str):
    arrays = text_request(PROMPT, LONG)
    expected = text_of(infer_grpc(unary.grpc_port, model, arrays))
    assert expected.startswith(PROMPT)
    assert text_of(infer_http(unary.http_port, model, arrays)) == expected
    (whole,) = stream_grpc(decoupled.grpc_port, model, arrays, ["text_output"])
    assert text_of(whole) == expected
    streamed = stream_grpc(decoupled.grpc_port, model, arrays | STREAM, ["text_output"])
    assert len(streamed) > 1 and PROMPT + "".join(map(text_of, streamed)) == expected
    body = {"text_input": PROMPT, "max_tokens": LONG, "end_id": 1048576}
    status, answer = post(unary.http_port, f"/v2/models/{model}/generate", body)
    assert status == 200 and json.loads(answer)["text_output"] == expected
    status, answer = post(decoupled.http_port, f"/v2/models/{model}/generate_stream", {**body, "stream": True})
    assert status == 200 and PROMPT + "".join(event["text_output"] for event in events_of(answer)) == expected


def documented_commands() -> list[str]:
    """Every `faser serve` that a page shows in a block of shell."""
    pages = [DOCS.parents[1] / "README.md", *DOCS.parent.glob("*.md")]
    blocks = [block for page in pages for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)]
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return sorted({line for line in lines if line.startswith("faser serve")})


@pytest.mark.parametrize("command", documented_commands())
def test_every_documented_command_starts_a_server(command: str, engine_dir: Path):
    options = command.replace("engines_out", str(engine_dir)).split()[2:]
    with serve(*options) as served:
        models = served.ready.strip().rpartition("models ")[2].split(", ")
        with urllib.request.urlopen(f"http://127.0.0.1:{served.http_port}/v2/models/{models[0]}/ready") as answer:
            assert answer.status == 200


def test_both_contracts_are_documented_with_a_command():
    commands = documented_commands()
    assert any("--contract llmapi" in command for command in commands) and "faser serve" in commands


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
    responses = stream_grpc(decoupled.grpc_port, "ensemble", arrays, ["text_output", *PERF_OUTPUTS])
    assert len(responses) > 3
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


def test_token_ids_beyond_the_vocabulary_name_the_option(unary: Served):
    with pytest.raises(InferenceServerException, match=r"input_ids = 99999: .*--out-of-vocab clamp"):
        infer_grpc(unary.grpc_port, "tensorrt_llm", token_request(5, 99999))


def test_the_configuration_shows_what_tools_read_of_it(unary: Served, engine_dir: Path):
    with urllib.request.urlopen(f"http://127.0.0.1:{unary.http_port}/v2/models/tensorrt_llm/config") as answer:
        config = json.loads(answer.read())
    shown = {name: entry["string_value"] for name, entry in config["parameters"].items()}
    assert shown["gpt_model_type"] == "inflight_fused_batching" and shown["gpt_model_path"] == str(engine_dir)
    assert shown["max_beam_width"] == "1" and shown["executor_worker_path"] == "none"
    assert config["max_batch_size"] == 64 and not config["model_transaction_policy"]["decoupled"]


def test_every_row_of_the_behaviours_names_a_test_that_exists():
    page = DOCS.read_text(encoding="utf-8").partition("## Conformance")[2]
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", page)
    assert len(named) > 25
    for file, test in named:
        assert f"def {test}(" in (Path(__file__).parent / file).read_text(encoding="utf-8"), f"{file}::{test}"
