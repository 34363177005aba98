"""Every input and every output of both contracts over the wire: gRPC streams, unary gRPC and HTTP, both launch modes.

An input that works is taken, one that does not is refused by name and feature when it is used and passes when it asks
for nothing; an output has the name, the type and the rank that TensorRT-LLM sends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from faser_backend.serving.model_configs import CONTRACTS, INFLIGHT_BATCHER, LLMAPI, ModelConfig
from faser_backend.serving.tensors import UNSUPPORTED, TensorSpec
from tests.conformance_cases import DOCS, VOCAB_SIZE, base_request, neutral, output_of, shape_of, used, written
from tests.served import Served, serve
from tests.serving_pair import build_pair, byte_level_tokenizer
from tests.strict_clients import Arrays, infer_grpc, infer_http, names_of, one, stream_grpc

NUM_NEW = 4
CONVERTERS = ("preprocessing", "postprocessing")


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory) -> Path:
    assert byte_level_tokenizer().get_vocab_size() == VOCAB_SIZE
    return build_pair(tmp_path_factory.mktemp("conformance"))


@pytest.fixture(scope="module")
def servers(engine_dir: Path) -> Iterator[dict[str, tuple[Served, Served]]]:
    """By contract, a decoupled server and a unary one."""
    options = ["--engine-dir", engine_dir, "--num-threads", 1, "--policy", "fixed:2"]
    with ExitStack() as stack:
        yield {
            contract: (
                stack.enter_context(serve(*options, "--contract", contract)),
                stack.enter_context(serve(*options, "--contract", contract, "--no-decoupled")),
            )
            for contract in CONTRACTS
        }


def cases(side: str) -> list[Any]:
    return [
        pytest.param(contract, model, spec, id=f"{contract}-{model.name}-{spec.name}")
        for contract, models in (("inflight_batcher", INFLIGHT_BATCHER), ("llmapi", LLMAPI))
        for model in models
        for spec in getattr(model, side)
        if spec.name != "stop"  # another kind of request: test_conformance.py
    ]


def ask_everywhere(servers: tuple[Served, Served], model: ModelConfig, arrays: Arrays) -> list[str]:
    """The error of each way to ask, "" where there was an answer."""
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
def test_input(servers, contract: str, model: ModelConfig, spec: TensorSpec):
    arrays = used(model, spec)
    assert spec.name in arrays
    errors = ask_everywhere(servers[contract], model, arrays)
    if spec.name not in UNSUPPORTED:
        assert set(errors) == {""}
        return
    assert all(f"{spec.name} = " in error and UNSUPPORTED[spec.name].feature in error for error in errors), errors
    assert set(ask_everywhere(servers[contract], model, neutral(model, spec))) == {""}


@pytest.mark.parametrize(("contract", "model", "spec"), cases("outputs"))
def test_output(servers, contract: str, model: ModelConfig, spec: TensorSpec):
    decoupled, unary = servers[contract]
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
    """A request whose answer has NUM_NEW tokens without the prompt, and what the flag asks for."""
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
    assert written(page) == page, "run python -m tests.conformance_cases"


def test_the_rank_that_was_sent_before_fails_a_strict_client():
    """The control: with one dimension too many, the first element is an array, which has no text."""
    with pytest.raises(AttributeError, match="decode"):
        np.array([[b"text"]], dtype=object)[0].decode()
