"""LoRA adapters of a server: by name over OpenAI's API, by id over Triton, and others after a reload."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai
import pytest
from tritonclient.utils import InferenceServerException

from faser_backend import LLM, RequestOutput, SamplingParams
from faser_backend.engines.lora import read_adapter
from faser_backend.lab.checks.servers import free_ports
from faser_backend.manifest import EngineManifest
from tests.support.adapters import as_tensors, write_adapter
from tests.support.clients import ids_of, one, stream_grpc, token_request
from tests.support.processes import wait_until
from tests.support.served import Served, serve
from tests.support.serving_pair import build_pair

PROMPT = [5, 6, 7, 8, 9, 10] * 4
TOKENS = 12


class Adapted(NamedTuple):
    served: Served
    client: openai.OpenAI
    folder: Path
    expected: dict[str, RequestOutput]  # by adapter, "" without one


@pytest.fixture(scope="module", params=["llvm"])
def adapted(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Adapted]:
    folder, [port] = tmp_path_factory.mktemp("adapted"), free_ports(1)
    engine_dir = build_pair(folder, runtime=request.param)
    for seed, name in enumerate(("red", "blue")):
        write_adapter(folder / "pair" / "target", folder / name, seed=seed)
    texts = [f"{name}={folder / name}" for name in ("red", "blue")]
    with LLM(engine_dir, policy="none", lora=texts) as llm:
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        expected = {name: llm.generate(PROMPT, params, lora=name)[0] for name in ("", "red", "blue")}
    (folder / "key").write_text("k" * 32)
    (folder / "key").chmod(0o600)
    options = ["--engine-dir", engine_dir, "--policy", "fixed:3", "--openai-port", port, "--model-name", "base"]
    with serve(*options, *(f"--lora={text}" for text in texts), "--admin-key-file", folder / "key") as served:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0)
        yield Adapted(served, client, folder, expected)


def complete(adapted: Adapted, model: str, **more: Any) -> str:
    answer: Any = adapted.client.completions.create(
        model=model, prompt=PROMPT, max_tokens=TOKENS, temperature=0, extra_body={"ignore_eos": True}, **more
    )
    assert answer.model == model
    return answer.choices[0].text


@pytest.mark.parametrize("adapted", ["torch", "llvm"], indirect=True)
def test_every_way_to_an_adapter_gives_its_tokens(adapted: Adapted) -> None:
    assert len({answer.text for answer in adapted.expected.values()}) == 3
    models = {model.id: model.model_dump()["parent"] for model in adapted.client.models.list()}
    assert models == {"base": None, "red": "base", "blue": "base"}
    assert adapted.client.models.retrieve("red").id == "red"
    for task_id, (name, answer) in enumerate(adapted.expected.items()):
        assert complete(adapted, name or "base") == complete(adapted, name or "base", logprobs=2) == answer.text
        arrays = token_request(*PROMPT, max_tokens=TOKENS, lora_task_id=one(task_id, np.uint64))
        arrays["exclude_input_in_output"] = one(True, np.bool_)
        response = stream_grpc(adapted.served.grpc_port, "tensorrt_llm", arrays)[0]
        assert ids_of(response) == answer.token_ids


def test_an_adapter_that_a_request_sends_is_known_by_its_id_from_then_on(adapted: Adapted) -> None:
    """The text model passes it over the engine's socket, the token model to the engine itself."""
    folder, expected = adapted.folder, adapted.expected["blue"]
    spec = EngineManifest.load(folder / "engine").target.spec
    tensors = {name: each[None] for name, each in as_tensors(read_adapter(folder / "blue", spec, 64)).items()}
    arrays = token_request(*PROMPT, max_tokens=TOKENS, exclude_input_in_output=one(True, np.bool_))
    for more in (tensors, {}):
        arrays["lora_task_id"] = one(2**40, np.uint64)
        assert ids_of(stream_grpc(adapted.served.grpc_port, "tensorrt_llm", arrays | more)[0]) == expected.token_ids
    text: dict[str, Any] = {"text_input": np.array([[b"a b"]], object), "max_tokens": one(4)}
    for more in (tensors, {}):
        both = [
            stream_grpc(adapted.served.grpc_port, "ensemble", text | {"lora_task_id": one(each, np.uint64)} | sent)
            for each, sent in ((2, {}), (9, more))
        ]
        assert both[0][0].as_numpy("text_output") == both[1][0].as_numpy("text_output")
    for bad, message in (
        (tensors | {"lora_task_id": one(1, np.uint64)}, "must be above 2 with lora_weights"),
        ({"lora_weights": tensors["lora_weights"]}, "lora_weights and lora_config come together"),
        (tensors | {"lora_config": tensors["lora_config"] + 9}, "must be module 0 to 7"),
    ):
        with pytest.raises(InferenceServerException, match=message):
            stream_grpc(adapted.served.grpc_port, "tensorrt_llm", arrays | bad)


def test_an_unknown_adapter_is_refused(adapted: Adapted) -> None:
    with pytest.raises(openai.NotFoundError, match="the model is 'base', with adapter 'red', with adapter 'blue'"):
        complete(adapted, "green")
    with pytest.raises(
        InferenceServerException, match=r"LoRA task 3 not found in cache\. Please send LoRA weights with request"
    ):
        stream_grpc(adapted.served.grpc_port, "tensorrt_llm", token_request(*PROMPT, lora_task_id=one(3, np.uint64)))


def test_a_reload_brings_other_adapters(adapted: Adapted, run: Any) -> None:
    folder = adapted.folder
    reload = ["reload", "--engine-dir", folder / "engine", "--admin-key-file", folder / "key"]
    reload += ["--http", f"127.0.0.1:{adapted.served.http_port}", "--lora", f"green={folder / 'blue'}"]
    assert run(*reload, "--lora", f"base={folder / 'red'}")[0] == 1, "the name of the model itself"
    assert run(*reload)[0] == 0
    wait_until(lambda: [model.id for model in adapted.client.models.list()] == ["base", "green"])
    assert complete(adapted, "green") == adapted.expected["blue"].text
    assert run(*reload[:7], "--no-lora")[0] == 0
    wait_until(lambda: [model.id for model in adapted.client.models.list()] == ["base"])
