"""Requests that nobody should send: tensors over gRPC and bodies over HTTP, each remade from a seed and its number.

A case is a request that works with one to three things wrong. Left out are the two inputs that are known to end
Triton 2.51's HTTP frontend, which only `known_crashes` returns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from faser_backend.serving.tensors import LLMAPI_INPUTS, PREPROCESSING_INPUTS, TEXT_INPUTS, TOKEN_INPUTS, TensorSpec
from lab.abuse.clients import make_request, raw_strings, raw_tensor

CONTRACTS = ("inflight_batcher", "llmapi")
PROMPT = "def f(x):\n    return"
MAX_DEPTH = 400  # of brackets
LONG, VERY_LONG = 20_000, 500_000  # characters; the latter in one text of forty
BAD_NUMBERS = {
    "INT32": [-(2**31), -1, 0, 1, 2**31 - 1, 10**6], "INT64": [-(2**63), -1, 2**63 - 1], "UINT8": [0, 255],
    "UINT64": [0, 1, 2**64 - 1], "BOOL": [False, True], "FP16": [0.0, np.nan, np.inf],
    "FP32": [np.nan, np.inf, -np.inf, -1.0, 0.0, 1e38, 1e-45, 2.0],
}  # fmt: skip
SHAPES = [[], [0], [-1], [1], [1, 0], [-1, 1], [1, 1, 1], [2, 1], [1, 2**31], [2**62, 2], [1] * 40, [-(2**63), 1]]
BAD_JSON = [None, True, -1, 0, 10**30, 1.5, float("nan"), "", "x", "\ud800", [], {}, [[1]], {"a": 1}, ["a", 1], 2**64]

Generator = np.random.Generator


@dataclass(frozen=True, slots=True)
class Target:
    """A model, its inputs and a request that works."""

    model: str
    specs: tuple[TensorSpec, ...]
    values: Mapping[str, Any]
    has_batch: bool = True


_TEXT = {"text_input": PROMPT, "max_tokens": 4}
_TOKENS = {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 4}
TARGETS = {
    "inflight_batcher": (
        Target("ensemble", TEXT_INPUTS, _TEXT),
        Target("tensorrt_llm_bls", TEXT_INPUTS, _TEXT),
        Target("tensorrt_llm", TOKEN_INPUTS, _TOKENS),
        Target("preprocessing", PREPROCESSING_INPUTS, {"QUERY": PROMPT, "REQUEST_OUTPUT_LEN": 4}),
    ),
    "llmapi": (
        Target("tensorrt_llm", LLMAPI_INPUTS, {"text_input": PROMPT, "sampling_param_max_tokens": 4}, has_batch=False),
    ),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One request: a gRPC message (unary or in a stream), or an HTTP call."""

    label: str  # what is wrong with it
    request: Any = None
    is_unary: bool = False
    path: str = ""
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    method: str = "POST"


def pick(rng: Generator, values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def make_case(seed: int, number: int, contract: str) -> Case:
    """The same case for the same arguments."""
    rng = np.random.default_rng([seed, number])
    target = pick(rng, TARGETS[contract])
    return (tensor_case if rng.random() < 0.5 else http_case)(rng, target)


def bad_text(rng: Generator) -> bytes:
    length = VERY_LONG if rng.random() < 1 / 40 else LONG
    return pick(
        rng,
        [
            b"", b"\xff\xfe\xfd", b"\x00", "é".encode()[:1], b"\xed\xa0\x80", b"x " * (length // 2), b"x" * length,
            "🙂".encode() * 500, b"[" * MAX_DEPTH, b"{", b'[{"role": "user", "content": 1}]', b"[]", b"null",
            b'[{"role": "user", "content": "x"}]', b"(a+)+$", b"{{ 7 * 7 }}", b"json", b"regex", bytes(range(256)),
        ],
    )  # fmt: skip


def bad_values(rng: Generator, kind: str, num: int) -> list[Any]:
    """num values for a tensor of the type."""
    if kind == "STRING":
        return [bad_text(rng) if num < 3 else b"x" for _ in range(num)]
    return [pick(rng, BAD_NUMBERS[kind]) for _ in range(num)]


def chosen_dims(rng: Generator, spec: TensorSpec) -> list[int]:
    """Dimensions without the batch: mostly as declared, with up to 300 values where their number is open."""
    if rng.random() < 0.1:
        return [int(pick(rng, [0, 2, 300]))]
    open_dim = int(pick(rng, [0, 1, 1, 2, 3])) if spec.dims != (-1,) else int(pick(rng, [0, 1, 2, 300]))
    return [open_dim if dim == -1 else dim for dim in spec.dims]


# -- tensors over gRPC -----------------------------------------------------------------------------------------------
def tensor_case(rng: Generator, target: Target) -> Case:
    request = make_request(target.model, [target.values], has_batch=target.has_batch)
    # Half of them are well formed: Triton refuses the others before a model sees them.
    changes = TENSOR_CHANGES if rng.random() < 0.5 else (put,)
    chosen = [pick(rng, changes) for _ in range(int(rng.integers(1, 4)))]
    for change in chosen:
        change(rng, target, request)
    return Case(", ".join(each.__name__ for each in chosen), request, is_unary=rng.random() < 0.1)


def put(rng: Generator, target: Target, request: Any) -> None:
    """A declared tensor with a bad value, in place of the one that is there."""
    spec = pick(rng, target.specs)
    dims = chosen_dims(rng, spec)
    values = bad_values(rng, spec.data_type, math.prod(dims))
    drop_named(request, spec.name)
    batch = [1] if target.has_batch else []
    request.inputs.add(name=spec.name, datatype=datatype(spec), shape=[*batch, *dims])
    request.raw_input_contents.append(raw_tensor(spec.data_type, values))


def drop_named(request: Any, name: str) -> None:
    for index, tensor in enumerate(request.inputs):
        if tensor.name == name:
            del request.inputs[index]
            if index < len(request.raw_input_contents):
                del request.raw_input_contents[index]
            return


def datatype(spec: TensorSpec) -> str:
    return "BYTES" if spec.data_type == "STRING" else spec.data_type


def drop(rng: Generator, target: Target, request: Any) -> None:
    drop_named(request, pick(rng, list(target.values)))


def double(rng: Generator, target: Target, request: Any) -> None:
    spec = pick(rng, target.specs)
    for _ in range(2):
        request.inputs.add(name=spec.name, datatype=datatype(spec), shape=[1, 1])
        request.raw_input_contents.append(raw_tensor(spec.data_type, [b"x" if spec.data_type == "STRING" else 1]))


def retype(rng: Generator, _: Target, request: Any) -> None:
    if request.inputs:
        pick(rng, request.inputs).datatype = pick(rng, [*BAD_NUMBERS, "BYTES", "BF16", "", "NONSENSE", "x" * 1000])


def reshape(rng: Generator, _: Target, request: Any) -> None:
    if request.inputs:
        pick(rng, request.inputs).shape[:] = pick(rng, SHAPES)


def cut(rng: Generator, _: Target, request: Any) -> None:
    edit_raw(rng, request, lambda raw: raw[: int(rng.integers(0, len(raw) + 1))])


def extend(rng: Generator, _: Target, request: Any) -> None:
    edit_raw(rng, request, lambda raw: raw + rng.bytes(int(pick(rng, [1, 4, 64, LONG]))))


def noise(rng: Generator, _: Target, request: Any) -> None:
    edit_raw(rng, request, lambda raw: rng.bytes(len(raw)))


def lie(rng: Generator, _: Target, request: Any) -> None:
    """A string whose announced length is not its own."""
    length = int(pick(rng, [0, 1, 255, 2**31 - 1, 2**32 - 1]))
    edit_raw(rng, request, lambda _: length.to_bytes(4, "little") + b"abc")


def edit_raw(rng: Generator, request: Any, edit: Callable[[bytes], bytes]) -> None:
    if request.raw_input_contents:
        index = int(rng.integers(len(request.raw_input_contents)))
        request.raw_input_contents[index] = edit(request.raw_input_contents[index])


def miscount(rng: Generator, _: Target, request: Any) -> None:
    """Contents for more tensors than there are, or for fewer."""
    if rng.random() < 0.5 or not request.raw_input_contents:
        request.raw_input_contents.append(rng.bytes(8))
    else:
        del request.raw_input_contents[-1]


def invent(rng: Generator, _: Target, request: Any) -> None:
    request.inputs.add(name=pick(rng, ["", "nonsense", "x" * 5000, "text_input\n"]), datatype="BYTES", shape=[1, 1])
    request.raw_input_contents.append(raw_strings([b"x"]))


def address(rng: Generator, _: Target, request: Any) -> None:
    """Wrong model, version, id, outputs or parameters."""
    match int(rng.integers(6)):
        case 0:
            request.model_name = pick(rng, ["", "nobody", "../ensemble", "x" * 5000])
        case 1:
            request.model_version = pick(rng, ["-1", "999", "x", "1" * 50])
        case 2:
            request.id = pick(rng, ["x" * 100_000, "\n", "🙂"])
        case 3:
            request.outputs.add(name=pick(rng, ["", "nonsense", "text_output", "output_ids", "x" * 5000]))
        case 4:
            request.parameters["sequence_id"].int64_param = int(pick(rng, [-1, 1, 2**62]))
            request.parameters["sequence_start"].bool_param = True
        case _:
            name = pick(rng, ["priority", "timeout", "text_input", "nonsense", "triton_enable_empty_final_response"])
            request.parameters[name].int64_param = int(pick(rng, [-1, 0, 1, 2**62]))


TENSOR_CHANGES = (put, drop, double, retype, reshape, cut, extend, noise, lie, miscount, invent, address)


# -- bodies over HTTP ------------------------------------------------------------------------------------------------
def http_case(rng: Generator, target: Target) -> Case:
    way = pick(rng, ["generate", "generate", "generate_stream", "infer"])
    content = dict(target.values) if way != "infer" else infer_body(target)
    content = {name: value for name, value in content.items() if value is not None}
    labels = [way]
    if rng.random() < 0.85:
        labels.append(change_json(rng, target, content, way))
    body = json.dumps(content).encode()
    if rng.random() < 0.25:
        kind, body = spoil(rng, body)
        labels.append(kind)
    headers, method, model = {}, "POST", target.model
    if rng.random() < 0.1:
        headers = pick(
            rng,
            [
                {"Inference-Header-Content-Length": pick(rng, ["-1", "0", "1", "10", "99999999999", "x"])},
                {"Content-Type": "application/octet-stream"},
                {"Content-Encoding": pick(rng, ["gzip", "deflate", "nonsense"])},
                {"X-Long": "x" * 20_000},
            ],
        )
        labels.append("header")
    if rng.random() < 0.05:
        method, model = pick(rng, ["GET", "PUT", "DELETE"]), pick(rng, [model, "nobody", "%2e%2e", "x" * 4000])
        labels.append("address")
    path = f"/v2/models/{model}/{way}"
    return Case(", ".join(labels), path=path, body=body, headers=headers, method=method)


def infer_body(target: Target) -> dict[str, Any]:
    types = {spec.name: datatype(spec) for spec in target.specs}
    rows = {name: value if isinstance(value, list) else [value] for name, value in target.values.items()}
    inputs = [
        {"name": name, "datatype": types[name], "shape": [1, len(row)] if target.has_batch else [len(row)], "data": row}
        for name, row in rows.items()
    ]
    return {"inputs": inputs}


def change_json(rng: Generator, target: Target, content: dict[str, Any], way: str) -> str:
    """A value becomes one that does not belong there, or one of the right type that is bad. Returns which."""
    if way == "infer":
        tensor = pick(rng, content["inputs"])
        part = pick(rng, ["name", "datatype", "shape", "data", "parameters"])
        tensor[part] = wrong_value(rng)
        return part
    if rng.random() < 0.3:
        name = pick(rng, [*target.values, *(spec.name for spec in target.specs), "nonsense"])
        content[name] = wrong_value(rng)
        return f"type of {name}"
    spec = pick(rng, target.specs)
    values = [
        value.decode("latin-1") if isinstance(value, bytes) else value
        for value in bad_values(rng, spec.data_type, math.prod(chosen_dims(rng, spec)))
    ]
    content[spec.name] = values[0] if len(values) == 1 else values
    return spec.name


def wrong_value(rng: Generator) -> Any:
    return pick(rng, [*BAD_JSON, "x" * LONG, nested(rng), bad_text(rng).decode("latin-1")])


def nested(rng: Generator) -> Any:
    value: Any = 1
    for _ in range(int(rng.integers(1, MAX_DEPTH))):
        value = [value]
    return value


def spoil(rng: Generator, body: bytes) -> tuple[str, bytes]:
    """A text that is no JSON, or hardly. Returns what it is, too."""
    place = int(rng.integers(len(body) + 1))
    return pick(
        rng,
        [
            ("cut", body[:place]), ("inserted", body[:place] + rng.bytes(1) + body[place:]), ("empty", b""),
            ("twice", body + body), ("no text", rng.bytes(200)), ("byte order mark", b"\xef\xbb\xbf" + body),
            ("brackets", b"[" * MAX_DEPTH), ("not an object", b"1"), ("null", b"null"), ("zeros", b"\0" * 1000),
            ("key twice", body[:-1] + b',"max_tokens":1,"max_tokens":-1}'), ("blanks", b" " * LONG + body),
            ("huge number", b'{"text_input":"x","max_tokens":' + b"9" * 400 + b"}"),
        ],
    )  # fmt: skip


def known_crashes(contract: str) -> list[Case]:
    """Ends Triton 2.51's HTTP frontend: a body of 200,000 nested brackets, and one of 600,000 chunks of a byte."""
    path = f"/v2/models/{TARGETS[contract][0].model}/generate"
    chunks = b"1\r\n1\r\n" * 600_000 + b"0\r\n\r\n"
    return [
        Case("200,000 nested brackets", path=path, body=b"[" * 200_000 + b"]" * 200_000),
        Case("600,000 chunks of a byte", path=path, body=chunks, headers={"Transfer-Encoding": "chunked"}),
    ]
