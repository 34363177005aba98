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
    names = list(TENSOR_CHANGES) if rng.random() < 0.5 else ["put"]
    chosen = [pick(rng, names) for _ in range(int(rng.integers(1, 4)))]
    for name in chosen:
        TENSOR_CHANGES[name](rng, target, request)
    return Case(", ".join(chosen), request, is_unary=rng.random() < 0.1)


def put(rng: Generator, target: Target, request: Any) -> None:
    """A declared tensor with a bad value, in place of the one that is there."""
    spec = pick(rng, target.specs)
    dims = chosen_dims(rng, spec)
    drop(request, spec.name)
    add(request, spec, bad_values(rng, spec.data_type, math.prod(dims)), [*([1] * target.has_batch), *dims])


def double(rng: Generator, target: Target, request: Any) -> None:
    spec = pick(rng, target.specs)
    for _ in range(2):
        add(request, spec, [b"x" if spec.data_type == "STRING" else 1], [1, 1])


def add(request: Any, spec: TensorSpec, values: list[Any], shape: list[int]) -> None:
    request.inputs.add(name=spec.name, datatype=datatype(spec), shape=shape)
    request.raw_input_contents.append(raw_tensor(spec.data_type, values))


def drop(request: Any, name: str) -> None:
    for index, tensor in enumerate(request.inputs):
        if tensor.name == name:
            del request.inputs[index]
            if index < len(request.raw_input_contents):
                del request.raw_input_contents[index]
            return


def datatype(spec: TensorSpec) -> str:
    return "BYTES" if spec.data_type == "STRING" else spec.data_type


def edit(change: Callable[[Generator, bytes], bytes]) -> Callable[[Generator, Target, Any], None]:
    """A change of the bytes of one tensor."""

    def run(rng: Generator, _: Target, request: Any) -> None:
        if request.raw_input_contents:
            index = int(rng.integers(len(request.raw_input_contents)))
            request.raw_input_contents[index] = change(rng, request.raw_input_contents[index])

    return run


def retype(rng: Generator, _: Target, request: Any) -> None:
    if request.inputs:
        pick(rng, request.inputs).datatype = pick(rng, [*BAD_NUMBERS, "BYTES", "BF16", "", "NONSENSE", "x" * 1000])


def reshape(rng: Generator, _: Target, request: Any) -> None:
    if request.inputs:
        pick(rng, request.inputs).shape[:] = pick(rng, SHAPES)


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
    name = pick(rng, [*ADDRESSES, "outputs", "parameters"])
    if name in ADDRESSES:
        setattr(request, name, pick(rng, ADDRESSES[name]))
    elif name == "outputs":
        request.outputs.add(name=pick(rng, ["", "nonsense", "text_output", "output_ids", "x" * 5000]))
    else:
        request.parameters[pick(rng, PARAMETERS)].int64_param = int(pick(rng, [-1, 0, 1, 2**62]))


ADDRESSES = {
    "model_name": ["", "nobody", "../ensemble", "x" * 5000],
    "model_version": ["-1", "999", "x", "1" * 50],
    "id": ["x" * 100_000, "\n", "🙂"],
}
PARAMETERS = ["sequence_id", "priority", "timeout", "text_input", "nonsense", "triton_enable_empty_final_response"]
TENSOR_CHANGES: dict[str, Callable[[Generator, Target, Any], None]] = {
    "put": put,
    "drop": lambda rng, target, request: drop(request, pick(rng, list(target.values))),
    "double": double,
    "retype": retype,
    "reshape": reshape,
    "cut": edit(lambda rng, raw: raw[: int(rng.integers(0, len(raw) + 1))]),
    "extend": edit(lambda rng, raw: raw + rng.bytes(int(pick(rng, [1, 4, 64, LONG])))),
    "noise": edit(lambda rng, raw: rng.bytes(len(raw))),
    # A string whose announced length is not its own.
    "lie": edit(lambda rng, _: int(pick(rng, [0, 1, 255, 2**31 - 1, 2**32 - 1])).to_bytes(4, "little") + b"abc"),
    "miscount": miscount,
    "invent": invent,
    "address": address,
}


# -- bodies over HTTP ------------------------------------------------------------------------------------------------
def http_case(rng: Generator, target: Target) -> Case:
    way = pick(rng, ["generate", "generate", "generate_stream", "infer"])
    content = dict(target.values) if way != "infer" else infer_body(target)
    labels = [way]
    if rng.random() < 0.85:
        labels.append(change_json(rng, target, content, way))
    body = json.dumps(content).encode()
    if rng.random() < 0.25:
        kind, body = spoil(rng, body)
        labels.append(kind)
    headers, method, model = {}, "POST", target.model
    if rng.random() < 0.1:
        name = pick(rng, list(HEADERS))
        headers = {name: pick(rng, HEADERS[name])}
        labels.append("header")
    if rng.random() < 0.05:
        method, model = pick(rng, ["GET", "PUT", "DELETE"]), pick(rng, [model, "nobody", "%2e%2e", "x" * 4000])
        labels.append("address")
    path = f"/v2/models/{model}/{way}"
    return Case(", ".join(labels), path=path, body=body, headers=headers, method=method)


HEADERS = {
    "inference-header-content-length": ["-1", "0", "1", "10", "99999999999", "x"],
    "content-type": ["application/octet-stream"],
    "content-encoding": ["gzip", "deflate", "nonsense"],
    "x-long": ["x" * 20_000],
}


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
        part = pick(rng, ["name", "datatype", "shape", "data", "parameters"])
        pick(rng, content["inputs"])[part] = wrong_value(rng)
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
    depth = int(rng.integers(1, MAX_DEPTH))
    return pick(rng, [*BAD_JSON, "x" * LONG, json.loads("[" * depth + "]" * depth), bad_text(rng).decode("latin-1")])


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
