"""The OpenAI-compatible server as its users see it: the official client against `faser serve --openai-port`."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

from faser_backend.core.errors import ConfigError
from faser_backend.lab.abuse.clients import ask_http
from faser_backend.lab.abuse.served import metric
from faser_backend.lab.checks.servers import free_ports
from faser_backend.openai.app import PAGE
from faser_backend.openai.bodies import REFUSED, ChatBody, CompletionBody, ResponsesBody
from faser_backend.openai.server import callers_of, run_openai
from faser_backend.openai.tools import BareForm, CallFinder, TaggedForm
from faser_backend.serving.parameters import ModelOptions, OpenAIOptions
from tests.openai.test_openai_abuse import head_of
from tests.support.chat_templates import HERMES
from tests.support.clients import wait_for_free_blocks
from tests.support.openai_cases import (
    BASE,
    COLOUR,
    DOCS,
    FIELDS,
    FLAT_WEATHER,
    MESSAGES,
    MODEL,
    PATHS,
    REFUSED_VALUE,
    SOME_VALUE,
    WEATHER,
    Field,
    with_table,
)
from tests.support.processes import wait_until
from tests.support.served import Served, serve
from tests.support.serving_pair import build_pair

KEY = "sk-of-this-test"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
REQUESTS = "nv_trt_llm_request_metrics"


class Api(NamedTuple):
    served: Served
    client: openai.OpenAI
    port: int


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory) -> Path:
    return build_pair(tmp_path_factory.mktemp("openai"), max_context=4096)


@pytest.fixture(scope="module")
def api(engine_dir: Path, tmp_path_factory) -> Iterator[Api]:
    folder, [port] = tmp_path_factory.mktemp("api"), free_ports(1)
    (folder / "template.jinja").write_text(HERMES)
    (folder / "keys").write_text(f"another\n{KEY}\n")
    options = ["--engine-dir", engine_dir, "--num-threads", 1, "--policy", "fixed:3", "--max-queue-size", 64]
    options += ["--chat-template", folder / "template.jinja", "--openai-port", port, "--model-name", MODEL]
    options += ["--api-key-file", folder / "keys", "--speculation-metrics"]
    with serve(*options) as served:
        url = f"http://127.0.0.1:{port}/v1"
        assert served.ready.rstrip().endswith(f"OpenAI's API {url}, chat page {url.removesuffix('v1')}")
        yield Api(served, openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=60), port)


def ask(api: Api, body: type, **fields: Any) -> Any:
    """Calls the endpoint of body with the client's own method; fields that it does not know go into extra_body."""
    client = api.client
    calls = {CompletionBody: client.completions, ChatBody: client.chat.completions, ResponsesBody: client.responses}
    create = calls[body].create
    extra = {name: fields.pop(name) for name in list(fields) if name not in create.__annotations__}
    fields = {"model": MODEL, **fields}
    answer = create(**fields, extra_body=extra)
    return list(answer) if fields.get("stream") else answer


def rows(table: dict[type, dict[str, Any]]) -> list[Any]:
    return [
        pytest.param(body, name, value, id=f"{body.__name__}-{name}")
        for body, fields in table.items()
        for name, value in fields.items()
    ]


@pytest.mark.parametrize(("body", "name", "field"), rows(FIELDS))
def test_field(api: Api, body: type, name: str, field: Field):
    assert ask(api, body, **{**BASE[body], **field.beside, name: field.value})


@pytest.mark.parametrize(("body", "name", "meaning"), rows(REFUSED))
def test_refused_field(api: Api, body: type, name: str, meaning: str):
    value = REFUSED_VALUE.get(name, SOME_VALUE)
    with pytest.raises(openai.BadRequestError) as refusal:
        api.client.post(PATHS[body].removeprefix("/v1"), cast_to=object, body={**BASE[body], name: value})
    assert refusal.value.param == name and meaning in str(refusal.value)
    assert ask(api, body, **{**BASE[body], name: None})


def test_every_field_is_tested_and_on_the_page():
    for body in FIELDS:
        assert set(FIELDS[body]) == {field.alias or name for name, field in body.model_fields.items()}
        nulls = {name: None for name, field in body.model_fields.items() if not field.is_required()}
        assert body.model_validate({**BASE[body], **nulls}), "null means the default"
    docs = DOCS.read_text(encoding="utf-8")
    assert docs == with_table(docs)


# -- text ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
def test_streamed_text_is_the_whole_text_and_counts_agree(api: Api, body: type):
    asked = {**BASE[body], "max_tokens": 24, "seed": 3, "n": 2}
    whole = ask(api, body, **asked)
    chunks = ask(api, body, **asked, stream=True, stream_options={"include_usage": True})
    texts, reasons = ["", ""], [None, None]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += (choice.text if body is CompletionBody else choice.delta.content) or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    expected = [one.text if body is CompletionBody else one.message.content for one in whole.choices]
    assert texts == expected and texts[0] != texts[1]
    assert reasons == [one.finish_reason for one in whole.choices]
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens <= 48


def test_tokens_are_those_of_plain_decoding(api: Api):
    asked = {"prompt": [7, 8, 9], "max_tokens": 40, "temperature": 0.8, "seed": 11, "logprobs": 1}
    plain = ask(api, CompletionBody, **asked, num_draft_tokens=0, spec_decode_metrics="summary")
    drafted = ask(api, CompletionBody, **asked, spec_decode_metrics="summary")
    assert plain.choices[0].logprobs.tokens == drafted.choices[0].logprobs.tokens
    assert plain.metrics["speculative_decoding"]["num_draft_tokens"] == 0
    assert drafted.metrics["speculative_decoding"]["num_draft_tokens"] > 0


def test_a_stop_string_is_cut_off_and_named(api: Api):
    asked = {"prompt": [7, 8, 9], "max_tokens": 40, "seed": 5}
    text = ask(api, CompletionBody, **asked).choices[0].text
    stop = text[10:12]
    choice = ask(api, CompletionBody, **asked, stop=[stop]).choices[0]
    assert choice.text == text[: text.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert ask(api, CompletionBody, **asked, stop=[""]).choices[0].text == text, "an empty one is none"


def test_an_end_token_ends_an_answer_unless_it_is_ignored(api: Api):
    ending = {"prompt": [7, 8, 9], "max_tokens": 5, "logit_bias": {"0": 100}, "temperature": 0}
    ended = ask(api, CompletionBody, **ending)
    assert (ended.choices[0].finish_reason, ended.usage.completion_tokens) == ("stop", 1)
    ignored = ask(api, CompletionBody, **ending, ignore_eos=True)
    assert (ignored.choices[0].finish_reason, ignored.usage.completion_tokens) == ("length", 5)


def test_log_probs_of_both_endpoints_add_up(api: Api):
    for temperature, most in ((0, 3), (2, 2)):
        asked = {"temperature": temperature, "seed": 1, "logprobs": 3 if temperature == 0 else 1}
        tokens = ask(api, CompletionBody, prompt=[7, 8], max_tokens=6, **asked).choices[0].logprobs
        assert len(tokens.tokens) == len(tokens.token_logprobs) == len(tokens.top_logprobs) == 6
        for text, value, top in zip(tokens.tokens, tokens.token_logprobs, tokens.top_logprobs, strict=True):
            assert top[text] == pytest.approx(value, abs=1e-4) and len(top) <= most
            assert temperature or value == pytest.approx(max(top.values()), abs=1e-4)
    chat = ask(api, ChatBody, **BASE[ChatBody], temperature=0, logprobs=True, top_logprobs=2)
    for token in chat.choices[0].logprobs.content:
        assert token.token.startswith("bytes:") or token.token == bytes(token.bytes).decode()
        assert [one.logprob for one in token.top_logprobs] == sorted(t.logprob for t in token.top_logprobs)[::-1]
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob, abs=1e-4)


def test_an_echo_has_the_log_probs_that_the_prompt_had_as_an_answer_whole_and_streamed(api: Api):
    prompt = [7, 8, 9, 40, 41]
    asked = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 3}
    whole = ask(api, CompletionBody, **asked)
    assert (whole.usage.completion_tokens, whole.choices[0].finish_reason) == (0, "length")
    echoed, text = whole.choices[0].logprobs, whole.choices[0].text
    assert echoed.token_logprobs[0] is None and echoed.top_logprobs[0] is None
    for index, token in list(enumerate(prompt))[1:]:
        forced = {"prompt": prompt[:index], "max_tokens": 1, "logit_bias": {str(token): 100}, "logprobs": 3}
        spoken = ask(api, CompletionBody, **forced).choices[0].logprobs
        assert echoed.tokens[index] == spoken.tokens[0]
        assert echoed.token_logprobs[index] == pytest.approx(spoken.token_logprobs[0], abs=1e-4)
        assert echoed.top_logprobs[index] == pytest.approx(spoken.top_logprobs[0], abs=1e-4)
    for token, offset in zip(echoed.tokens, echoed.text_offset, strict=True):
        assert text[offset:].startswith(token) or token.startswith("bytes:")
    asked |= {"max_tokens": 5, "seed": 3}
    [whole], chunks = ask(api, CompletionBody, **asked).choices, ask(api, CompletionBody, **asked, stream=True)
    pieces = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(piece.text for piece in pieces) == whole.text
    for name in ("tokens", "token_logprobs", "text_offset"):
        said = [value for piece in pieces if piece.logprobs for value in getattr(piece.logprobs, name)]
        assert said == getattr(whole.logprobs, name)


def test_acceptance_of_a_request_adds_up(api: Api):
    asked = {"prompt": [7, 8, 9], "max_tokens": 48, "seed": 2, "temperature": 0.8}
    answer = ask(api, CompletionBody, **asked, spec_decode_metrics="detailed")
    metrics = answer.metrics["speculative_decoding"]
    by_step, accepted = metrics["per_step_accepted"], metrics["num_accepted_draft_tokens"]
    assert sum(by_step) == accepted == sum(n * count for n, count in enumerate(metrics["acceptance_histogram"]))
    assert len(by_step) == metrics["num_spec_steps"] == sum(metrics["acceptance_histogram"])
    assert 48 <= sum(count + 1 for count in by_step) <= 49  # the last step may emit one token too many
    assert metrics["mean_acceptance_length"] == pytest.approx(48 / metrics["num_spec_steps"])
    chunks = ask(api, CompletionBody, **asked, stream=True, return_token_details=True)
    details = [detail for chunk in chunks for choice in chunk.choices for detail in choice.token_details]
    assert sum(detail["is_drafted"] for detail in details) == accepted
    assert "".join(detail["text"] for detail in details) == answer.choices[0].text
    unasked = ask(api, CompletionBody, prompt=[7, 8], max_tokens=4, num_draft_tokens=0).metrics["speculative_decoding"]
    assert (unasked["mean_acceptance_length"], unasked["draft_acceptance_rate"]) == (1.0, 0.0), "nothing was drafted"


# -- grammar and tools ---------------------------------------------------------------------------------------------
def test_a_schema_is_kept_to_by_every_endpoint(api: Api):
    schema = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR, "strict": True}}
    chat = ask(api, ChatBody, messages=MESSAGES, max_tokens=60, response_format=schema)
    assert json.loads(chat.choices[0].message.content)["hue"] in ("red", "blue")
    text = {"format": {"type": "json_schema", "name": "colour", "schema": COLOUR}}
    response = ask(api, ResponsesBody, input="Name a colour.", text=text)
    assert json.loads(response.output_text)["hue"] in ("red", "blue")
    assert response.status == "completed"
    asked = {"messages": MESSAGES, "max_tokens": 8, "n": 12, "seed": 1, "response_format": {"type": "json_object"}}
    assert {choice.message.content[0] for choice in ask(api, ChatBody, **asked).choices} == {"{"}


@pytest.mark.parametrize(
    ("choice", "is_streamed"), [("required", True), ({"type": "function", "function": {"name": "weather"}}, False)]
)
def test_a_required_call_is_made(api: Api, choice: Any, is_streamed: bool):
    asked = {"messages": MESSAGES, "tools": [WEATHER], "tool_choice": choice, "max_tokens": 100, "stream": is_streamed}
    answer = ask(api, ChatBody, **asked)
    if is_streamed:
        calls = [call for chunk in answer for choice in chunk.choices for call in choice.delta.tool_calls or []]
        text = "".join(choice.delta.content or "" for chunk in answer for choice in chunk.choices)
        reason = [choice.finish_reason for chunk in answer for choice in chunk.choices][-1]
    else:
        calls, text = answer.choices[0].message.tool_calls, answer.choices[0].message.content
        reason = answer.choices[0].finish_reason
    [call] = calls
    assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    assert (reason, text or "") == ("tool_calls", "")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_response_calls_a_function_and_its_events_build_the_call(api: Api, choice: Any):
    asked = {"input": "Weather in Rome?", "tools": [FLAT_WEATHER], "tool_choice": choice, "temperature": 0}
    [call] = ask(api, ResponsesBody, **asked).output
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    with api.client.responses.stream(model=MODEL, **asked) as stream:
        events = list(stream)
    assert [event.type.removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    [streamed] = events[-1].response.output
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    talk = [{"role": "user", "content": "Weather in Rome?"}, call.model_dump(), result]
    more = ask(api, ResponsesBody, input=talk, tools=[FLAT_WEATHER], tool_choice="none", max_output_tokens=4)
    assert more.output[0].type == "message" and more.usage.input_tokens > 20


@pytest.mark.parametrize("size", [1, 3, 999])
def test_calls_and_the_text_beside_them_do_not_depend_on_steps(size: int):
    call = '<tool_call>{"name": "f", "arguments": {"html": "</tool_call>"}}</tool_call>'
    too_large = '<tool_call>{"name": "f", "arguments": 1e999}</tool_call>'
    written, finder = f"Look: {call}\n\n{too_large} Done {call}\n", CallFinder(TaggedForm, is_single=False)
    pieces = [written[start : start + size] for start in range(0, len(written), size)]
    text = "".join(finder.read(piece, is_last=piece is pieces[-1])[0] for piece in pieces)
    found = [json.loads(each.arguments) for each in finder.calls]
    assert text == f"Look: \n\n{too_large} Done" and found == [{"html": "</tool_call>"}] * 2


def test_json_with_a_name_is_a_call_only_with_arguments():
    for written, num_calls in {'{"name": "Bob", "age": 3}': 0, '{"name": "f", "parameters": {}}': 1}.items():
        text, calls = CallFinder(BareForm, is_single=False).read(written, is_last=True)
        assert (len(calls), text) == (num_calls, "" if num_calls else written)


def test_beside_tools_an_answer_that_is_no_call_keeps_to_its_format(api: Api):
    """Random weights write neither a call nor the format unless a grammar allows both."""
    schema = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR}}
    asked = {"messages": MESSAGES, "tools": [WEATHER], "response_format": schema, "max_tokens": 100, "n": 6, "seed": 1}
    for choice in ask(api, ChatBody, **asked).choices:
        calls = choice.message.tool_calls
        said = json.loads(calls[0].function.arguments if calls else choice.message.content)
        assert said.get("city") in ("Rome", "Oslo") or said.get("hue") in ("red", "blue")


def test_a_tools_references_have_their_root(api: Api):
    """pydantic writes nested models as references to #/$defs of the tool's own schema."""
    place = {"$ref": "#/$defs/Place"}
    defs = {"Place": {"enum": ["Rome", "Oslo"]}}
    parameters = {"type": "object", "properties": {"city": place}, "required": ["city"], "$defs": defs}
    tool = {"type": "function", "function": {"name": "go", "parameters": parameters}}
    asked = {"messages": MESSAGES, "tools": [tool], "tool_choice": "required", "max_tokens": 100}
    [call] = ask(api, ChatBody, **asked).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) in ({"city": "Rome"}, {"city": "Oslo"})  # only named properties


def test_the_events_of_a_response_build_it(api: Api):
    asked = {"model": MODEL, "input": "Name a colour.", "max_output_tokens": 12, "extra_body": {"ignore_eos": True}}
    with api.client.responses.stream(**asked) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    response = events[-1].response
    assert response.output_text == "".join(deltas) != ""
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.output_tokens == 12


# -- errors, keys, endings -----------------------------------------------------------------------------------------
BROKEN = {"type": "function", "function": {"name": "go", "parameters": {"type": "unavailable"}}}


def schema_of(kind: str) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": {"type": kind}}}


@pytest.mark.parametrize(
    ("body", "fields", "param", "words"),
    [
        (ChatBody, {"messages": []}, "messages", "at least 1"),
        (ChatBody, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'robot'"),
        (
            ChatBody,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
            "image",
        ),
        (ChatBody, {"temperature": -1}, "temperature", "-1"),
        (ChatBody, {"logit_bias": {"99999": 1}}, "logit_bias", "must lie in [0, "),
        (ChatBody, {"tool_choice": "required"}, "tool_choice", "needs tools"),
        (ChatBody, {"response_format": {"type": "json_schema"}}, "response_format", "a schema is required"),
        (ChatBody, {"response_format": schema_of("unavailable")}, "response_format", "unavailable"),  # not 503
        (ChatBody, {"tools": [BROKEN], "tool_choice": "required"}, "tools", "unavailable"),
        (ResponsesBody, {"text": {"format": schema_of("unavailable")}}, "text", "unavailable"),
        (CompletionBody, {"prompt": [7, 10**30]}, "prompt", "must lie in [0, "),
        (ResponsesBody, {"input": [{"role": "user"}]}, "input[0].content", "is required"),
        (ChatBody, {"max_tokens": 100_000}, "max_tokens", "context"),
        (CompletionBody, {"prompt": [7] * 4096}, "prompt", "context"),
        (CompletionBody, {"prompt": "x" * (1 << 20)}, "prompt", "bytes"),
        (ResponsesBody, {"input": "x " * 6000}, "input", "context"),
        (ChatBody, {"messages": [{"role": "user", "content": "x" * (1 << 20)}]}, "messages", "bytes"),
    ],
)
def test_an_error_names_its_field(api: Api, body: type, fields: dict[str, Any], param: str, words: str):
    with pytest.raises(openai.BadRequestError) as refusal:
        ask(api, body, **{**BASE[body], **fields})
    is_too_long = words in ("context", "bytes")
    assert str(refusal.value.param).startswith(param) and words in str(refusal.value)
    assert (refusal.value.code == "context_length_exceeded") == is_too_long


def test_a_full_queue_asks_for_patience(api: Api):
    before = metric(*(counted := (api.served.metrics_port, "vllm:request_success_total", "error")))
    with pytest.raises(openai.RateLimitError, match="Maximum queue size of 64") as refusal:
        ask(api, CompletionBody, prompt=[7, 8], max_tokens=3000, n=128, ignore_eos=True)
    assert (refusal.value.code, refusal.value.param) == ("queue_full", None)
    assert refusal.value.response.headers["retry-after"] == "1"
    wait_until(lambda: metric(*counted) > before)  # reported every few steps


def test_tokens_are_those_of_tritons_ports_and_are_counted_as_well(api: Api):
    asked = {"max_tokens": 20, "seed": 5, "temperature": 0.83, "top_p": 0.9}
    counted = api.served.metrics_port, "nv_inference_request_success", "tensorrt_llm"
    time.sleep(1.5)  # counters of requests that do not pass through Triton are sent twice a second
    before = metric(*counted)
    body = json.dumps(asked | {"text_input": "def f(x):", "exclude_input_in_output": True}).encode()
    reply = ask_http(api.served.http_port, "/v2/models/ensemble/generate", body)
    answer = ask(api, CompletionBody, prompt="def f(x):", logprobs=0, **asked)
    assert json.loads(reply.body)["text_output"] == answer.choices[0].text
    stop = next(token[0] for token in answer.choices[0].logprobs.tokens if token[1:] and token[:6] != "bytes:")
    ask(api, CompletionBody, prompt="def f(x):", stop=stop, **asked)  # within a token: the server ends it
    time.sleep(1.5)
    assert metric(*counted) == before + 3


def test_strangers_and_unknown_models_are_turned_away(api: Api):
    stranger = openai.OpenAI(base_url=api.client.base_url, api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    assert [model.id for model in api.client.models.list()] == [MODEL]
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        ask(api, CompletionBody, **BASE[CompletionBody], model="gpt-5")
    with pytest.raises(openai.NotFoundError, match="no such endpoint"):
        api.client.embeddings.create(model=MODEL, input="x", encoding_format="float")
    with pytest.raises(openai.APIStatusError, match="GET /v1/completions: this endpoint has another method"):
        api.client.get("/completions", cast_to=object)


@pytest.mark.parametrize("sent", [b"{", b"[" * 100_000, b"[1]", b'{"prompt": "' + b"x" * (5 << 20) + b'"}'])
def test_a_body_that_is_none_gets_one_error(api: Api, sent: bytes):
    reply = ask_http(api.port, "/v1/completions", sent, headers=AUTHORIZED)
    assert reply.status in (400, 413) and "body" in json.loads(reply.body)["error"]["message"]


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_goes_away_frees_its_blocks_at_once(api: Api, is_streamed: bool):
    wait_for_free_blocks(api.served.metrics_port)
    body = {"prompt": [5, 6], "max_tokens": 3000, "ignore_eos": True, "num_draft_tokens": 0, "n": 16}
    data = json.dumps(body | {"stream": is_streamed}).encode()
    head = head_of("/v1/completions", AUTHORIZED | {"Content-Length": str(len(data))})
    with socket.create_connection(("127.0.0.1", api.port)) as connection:
        connection.sendall(head + data)
        wait_until(lambda: metric(api.served.metrics_port, REQUESTS, "active") >= 4, "the requests never started")
    wait_for_free_blocks(api.served.metrics_port, timeout_s=3.0)


def test_the_page_and_health_need_no_key_and_metrics_do(api: Api):
    assert "<title>FASER" in ask_http(api.port, "/").body and "ready" in ask_http(api.port, "/health").body
    assert ask_http(api.port, "/metrics").status == 401
    assert REQUESTS in ask_http(api.port, "/metrics", headers=AUTHORIZED).body


def test_the_page_writes_no_markup_from_texts():
    page = PAGE.read_text(encoding="utf-8")
    assert "textContent" in page
    for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "srcdoc", "DOMParser", "eval("):
        assert name not in page


def test_what_keeps_the_api_from_being_served_is_told_before_the_server_starts(engine_dir: Path, tmp_path: Path):
    command = [sys.executable, "-m", "faser_backend.cli", "serve", "--engine-dir", engine_dir, "--openai-port", "1"]
    ended = subprocess.run([*command, "--tls-key", "x"], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1 and "give both or neither" in ended.stderr and "Traceback" not in ended.stderr
    with pytest.raises(ConfigError, match="needs --api-key-file"):
        callers_of(OpenAIOptions(host="0.0.0.0"))
    with pytest.raises(ConfigError, match=r"api-key-file = .*: not readable"):
        callers_of(OpenAIOptions(api_key_file=tmp_path))
    with pytest.raises(ConfigError, match=r"tls-cert = .*: no certificate chain"):
        callers_of(OpenAIOptions(tls_cert=engine_dir / "manifest.json", tls_key=engine_dir / "manifest.json"))
    for name, bad in {"triton-metrics": "x:99999", "port": 0}.items():
        with pytest.raises(ConfigError, match=f"^{name} = "):
            run_openai(OpenAIOptions.from_options(**{name.replace("-", "_"): bad}), ModelOptions())
