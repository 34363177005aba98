"""End to end with the real Triton server: every model, streams, cancellation, refusals, its own OpenAI front end."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tritonclient.grpc as triton
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from tritonclient import http
from tritonclient.utils import InferenceServerException

from faser_backend.serving.parameters import GRPC_PREFIX, KEY_HEADER, ServeOptions
from faser_backend.triton.server import TritonServer
from tests.support.chat_templates import CHATML
from tests.support.clients import Stream, post, wait_for_free_blocks
from tests.support.served import on_free_ports

PROMPT = "def größe(x):\n"
SAMPLED = {"temperature": 1.0, "top_p": 1.0, "end_id": -1}
NUM_RUNNING, NUM_QUEUED = 16, 40
ECHO = "exclude_input_in_output"


@pytest.fixture(scope="module")
def server(engine_dir: Path) -> Iterator[ServeOptions]:
    parameters = {
        "engine_dir": str(engine_dir),
        ECHO: "true",
        "policy": "fixed:4",  # drafts in every step, whatever this pair's drafts are worth
        "max_num_seqs": str(NUM_RUNNING),
        "max_queue_size": str(NUM_QUEUED),
        "num_threads": "1",
        "stats_check_period_ms": "50",
    }
    with TritonServer(on_free_ports(), parameters) as running:
        running.wait_ready()
        yield running.options
        running.kill()  # a drain would take seconds


@pytest.fixture
def stream(server: ServeOptions) -> Iterator[Stream]:
    stream = Stream(f"127.0.0.1:{server.grpc_port}")
    yield stream
    stream.close()


def test_conversations_are_prompts_that_the_template_wrote(server: ServeOptions, stream: Stream, engine_dir: Path):
    messages = [{"role": "user", "content": "größe?"}]
    tokenizer = Tokenizer.from_file(str(engine_dir / "tokenizer.json"))
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHATML)
    prompt = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    given = {"max_tokens": 12, "seed": 3, **SAMPLED}
    expected = stream.ask("ensemble", text_input=prompt, **given)
    for model in ("ensemble", "tensorrt_llm_bls"):
        answer = stream.ask(model, messages=json.dumps(messages), **given)
        assert (answer.error, answer.text) == (None, expected.text)
    body = {"MESSAGES": json.dumps(messages), "REQUEST_OUTPUT_LEN": 4}
    status, answer = post(server.http_port, "/v2/models/preprocessing/generate", body)
    assert status == 200 and json.loads(answer)["INPUT_ID"] == tokenizer.encode(prompt).ids


KILLED_CLIENT = """
import sys
from tests.support.clients import Stream
streams = [Stream(sys.argv[1]) for _ in range(4)]
for stream in streams:
    stream.send("ensemble", text_input="def f", max_tokens=400, end_id=-1, stream=True)
for stream in streams:
    stream.receive()
print("streaming", flush=True)
sys.stdin.read()
"""


def test_streams_with_cancelled_and_killed_clients_leak_nothing(server: ServeOptions):
    url = f"127.0.0.1:{server.grpc_port}"
    given = [{"text_input": f"{PROMPT}{i}", "max_tokens": 90, "seed": i, **SAMPLED} for i in range(32)]
    alone = Stream(url)
    expected = [alone.ask("ensemble", **tensors).text for tensors in given[:32:4]]
    doomed = subprocess.Popen(
        [sys.executable, "-c", KILLED_CLIENT, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert doomed.stdout is not None and doomed.stdout.readline() == "streaming\n"
    streams = [Stream(url) for _ in given]
    for i, (one, tensors) in enumerate(zip(streams, given, strict=True)):
        one.send("ensemble", stream=True, **{**tensors, "max_tokens": 400 if i % 4 == 1 else 90})
    doomed.kill()
    doomed.wait()
    for one in streams[1::4]:
        one.receive()
        one.cancel()
    answers = [one.answer() for i, one in enumerate(streams) if i % 4 != 1]
    assert [answer.error for answer in answers] == [None] * 24
    assert [answers[i].text for i in range(0, 24, 3)] == expected
    wait_for_free_blocks(server.metrics_port)
    for one in (*streams, alone):
        one.close()


def test_stop_request_ends_a_request_early_and_without_error(server: ServeOptions, stream: Stream):
    given = {"text_input": PROMPT, "max_tokens": 480, "end_id": -1}
    stream.send("ensemble", request_id="mine", stream=True, **given)
    stream.receive()
    stopper = Stream(f"127.0.0.1:{server.grpc_port}")
    token_level = {"input_ids": [1], "input_lengths": 1, "request_output_len": 1}
    stopper.send("tensorrt_llm", request_id="mine", stop=True, **token_level)
    result, error, is_last = stopper.receive()
    assert (error, is_last) == (None, True) and not result.get_response().outputs
    answer = stream.answer()
    assert answer.error is None and len(answer.deltas) < 480
    stopper.send("ensemble", request_id="nobody", stop=True, **given)
    assert stopper.receive()[1:] == (None, True)
    stopper.send("ensemble", stop=True, **given)
    assert "Trying to stop a request but request ID is not provided" in (stopper.receive()[1] or "")
    stopper.close()


MEMORY = ("get_system_shared_memory_status", "get_cuda_shared_memory_status")
ADMINISTRATION = (*MEMORY, "get_model_repository_index", "get_log_settings", "get_trace_settings")
OPEN = ("is_server_ready", "get_server_metadata", "get_inference_statistics")


@pytest.mark.parametrize(("library", "header"), [(http, KEY_HEADER), (triton, GRPC_PREFIX + KEY_HEADER)])
def test_administration_opens_to_the_key_alone(server: ServeOptions, library: Any, header: str):
    port = server.http_port if library is http else server.grpc_port
    with library.InferenceServerClient(f"127.0.0.1:{port}") as client:
        for call in ADMINISTRATION:
            for headers in (None, {header: "a-guess"}):
                with pytest.raises(InferenceServerException, match=r"(403|UNAVAILABLE).* restricted"):
                    getattr(client, call)(headers=headers)
            getattr(client, call)(headers={header: server.admin_key})
        for call in OPEN:
            getattr(client, call)()
        with pytest.raises(InferenceServerException, match="restricted"):
            client.register_system_shared_memory("mine", "/anything", 8)


# -- Triton's own OpenAI front end (python/openai of triton-inference-server/server) -----------------------------------
# It runs inside NVIDIA's container, over Triton's in-process API. Here its requests go over gRPC: the tensors are those
# that it makes of a body, and answers are read as it reads them. It looks for the input ECHO, and sends it with
# completions alone.
MODELS = ["ensemble", "tensorrt_llm_bls"]
# What it always sends: OpenAI's defaults, and 16 tokens unless --default-max-tokens says otherwise.
DEFAULTS = {"max_tokens": 16, "top_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "temperature": 1.0}
COUNTS = {"return_num_input_tokens": True, "return_num_output_tokens": True}


class Said(NamedTuple):
    """An answer in the front end: texts of its responses, their usage, and the one marked as final."""

    texts: list[str]
    num_input: list[int]
    num_output: list[int]
    finals: list[bool]


def read_text(result: Any) -> str:
    """Reads one string from a tensor of any rank, as the front end does."""
    text = result.as_numpy("text_output")
    if text is None:
        return ""
    assert text.size == 1
    return text.reshape(-1)[0].decode()


def read_count(result: Any, name: str) -> int:
    output = result.get_output(name)
    assert output.datatype in ("INT32", "UINT32")
    return int(result.as_numpy(name).reshape(-1)[0])


def ask(server: ServeOptions, model: str, *, stream: bool, **more: Any) -> Said:
    tensors = {"text_input": PROMPT, "stream": stream, **DEFAULTS, **COUNTS, **more}
    connection = Stream(f"127.0.0.1:{server.grpc_port}")
    said = Said([], [], [], [])
    try:
        connection.send(model, **tensors)
        while not (said.finals and said.finals[-1]):
            result, error, is_final = connection.receive()
            assert error is None
            said.texts.append(read_text(result))
            said.finals.append(is_final)
            if result.get_output("num_output_tokens") is not None:
                said.num_input.append(read_count(result, "num_input_tokens"))
                said.num_output.append(read_count(result, "num_output_tokens"))
    finally:
        connection.close()
    return said


@pytest.mark.parametrize("model", [*MODELS, "tensorrt_llm", "preprocessing", "postprocessing"])
def test_what_it_reads_of_a_configuration_when_it_starts(server: ServeOptions, model: str):
    with triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        config = client.get_model_config(model, as_json=True)["config"]  # pyright: ignore
    assert config["backend"] == "python"  # not vllm: so it writes requests for TensorRT-LLM
    assert (ECHO in {entry["name"] for entry in config["input"]}) == (model not in ("preprocessing", "postprocessing"))


@pytest.mark.parametrize("model", MODELS)
def test_a_completion_is_one_response_and_the_same_streamed(server: ServeOptions, model: str):
    asked = {ECHO: True, "max_tokens": 300}
    whole = ask(server, model, stream=False, **asked)
    assert len(whole.texts) <= 2 and whole.finals[-1]  # what it takes for a unary answer
    assert whole.texts[0] and not any(whole.texts[1:]) and PROMPT not in whole.texts[0]
    assert whole.num_output == [300]
    while len((streamed := ask(server, model, stream=True, **asked)).texts) <= 2:
        pass  # a busy machine may join them; the timeout of tests ends it
    assert "".join(streamed.texts) == whole.texts[0]
    assert set(streamed.num_input) == set(whole.num_input)
    assert sum(streamed.num_output) == 300  # it sums them; of counts so far it made too many


def test_echo(server: ServeOptions):
    """A chat request has no field for the prompt, and relies on the model's parameter."""
    assert ask(server, "ensemble", stream=False, **{ECHO: False}).texts[0].startswith(PROMPT)
    chat = ask(server, "ensemble", stream=False)
    assert chat.texts[0] == ask(server, "ensemble", stream=False, **{ECHO: True}).texts[0]
