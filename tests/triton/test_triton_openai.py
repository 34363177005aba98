"""Triton's own OpenAI front end (python/openai of triton-inference-server/server) against our models.

It runs inside NVIDIA's container, over Triton's in-process API. Here its requests go over gRPC: the tensors are those
that it makes of a body, and answers are read as it reads them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tritonclient.grpc as triton

from faser_backend.triton.server import TritonServer
from tests.support.clients import Stream
from tests.support.served import on_free_ports

MODELS = ["ensemble", "tensorrt_llm_bls"]
PROMPT = "def größe(x):\n"
# What it always sends: OpenAI's defaults, and 16 tokens unless --default-max-tokens says otherwise.
DEFAULTS = {"max_tokens": 16, "top_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "temperature": 1.0}
COUNTS = {"return_num_input_tokens": True, "return_num_output_tokens": True}
ECHO = "exclude_input_in_output"  # it looks for this input, and sends it with completions alone


@pytest.fixture(scope="module")
def server(engine_dir: Path) -> Iterator[TritonServer]:
    parameters = {"engine_dir": str(engine_dir), "num_threads": "1", "policy": "fixed:3", ECHO: "true"}
    with TritonServer(on_free_ports(), parameters) as running:
        running.wait_ready()
        yield running
        running.kill()


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


def ask(server: TritonServer, model: str, *, stream: bool, **more: Any) -> Said:
    tensors = {"text_input": PROMPT, "stream": stream, **DEFAULTS, **COUNTS, **more}
    connection = Stream(f"127.0.0.1:{server.options.grpc_port}")
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
def test_what_it_reads_of_a_configuration_when_it_starts(server: TritonServer, model: str):
    with triton.InferenceServerClient(f"127.0.0.1:{server.options.grpc_port}") as client:
        config = client.get_model_config(model, as_json=True)["config"]  # pyright: ignore
    assert config["backend"] == "python"  # not vllm: so it writes requests for TensorRT-LLM
    assert (ECHO in {entry["name"] for entry in config["input"]}) == (model not in ("preprocessing", "postprocessing"))


@pytest.mark.parametrize("model", MODELS)
def test_a_completion_is_one_response_and_the_same_streamed(server: TritonServer, model: str):
    # So many tokens that a busy machine cannot join all of a stream in one response.
    asked = {ECHO: True, "max_tokens": 300}
    whole = ask(server, model, stream=False, **asked)
    assert len(whole.texts) <= 2 and whole.finals[-1]  # what it takes for a unary answer
    assert whole.texts[0] and not any(whole.texts[1:]) and PROMPT not in whole.texts[0]
    assert whole.num_output == [300]
    streamed = ask(server, model, stream=True, **asked)
    assert len(streamed.texts) > 2 and "".join(streamed.texts) == whole.texts[0]
    assert set(streamed.num_input) == set(whole.num_input)
    assert sum(streamed.num_output) == 300  # it sums them; of counts so far it made too many


def test_echo(server: TritonServer):
    """A chat request has no field for the prompt, and relies on the model's parameter."""
    assert ask(server, "ensemble", stream=False, **{ECHO: False}).texts[0].startswith(PROMPT)
    chat = ask(server, "ensemble", stream=False)
    assert chat.texts[0] == ask(server, "ensemble", stream=False, **{ECHO: True}).texts[0]
