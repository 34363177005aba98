"""Malformed requests over gRPC and HTTP, each reproducible from a seed and its number.

A case is a valid request in which declared tensors get bad values, or nodes of the message change their type. Two
inputs are left out that end Triton 2.51's HTTP frontend: 200,000 nested brackets, and 600,000 chunks of one byte.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from faser_backend.lab.bench.wire import Tensor, as_request, tensors_of
from faser_backend.triton.tensors import LLMAPI_INPUTS, PREPROCESSING_INPUTS, TEXT_INPUTS, TOKEN_INPUTS, TritonTensor

CONTRACTS = ("inflight_batcher", "llmapi")
PROMPT = "def f(x):\n    return"
MAX_DEPTH = 400  # of brackets
LONG, VERY_LONG = 20_000, 500_000  # characters; the latter rarely
NUMBERS = {
    "INT32": [-(2**31), -1, 0, 1, 2**31 - 1, 10**6], "INT64": [-(2**63), -1, 2**63 - 1], "UINT8": [0, 255],
    "UINT64": [0, 1, 2**64 - 1], "BOOL": [False, True], "FP16": [0.0, np.nan, np.inf],
    "FP32": [np.nan, np.inf, -np.inf, -1.0, 0.0, 1e38, 1e-45, 2.0],
}  # fmt: skip
TEXTS = [
    b"", b"\xff\xfe\xfd", b"\x00", "é".encode()[:1], b"\xed\xa0\x80", b"x " * (LONG // 2), b"x" * LONG,
    "🙂".encode() * 500, b"[" * MAX_DEPTH, b"{", b'[{"role": "user", "content": 1}]', b"[]", b"null",
    b'[{"role": "user", "content": "x"}]', b"(a+)+$", b"{{ 7 * 7 }}", b"json", b"regex", bytes(range(256)),
]  # fmt: skip
WORDS = [
    "", "nonsense", "x" * 5000, "\n", "🙂", "../ensemble", "-1", "999", "1" * 50, "text_input", "text_output",
    "output_ids", "BYTES", "BF16", *NUMBERS,
]  # fmt: skip
# Replacements of a node of a gRPC message by its type, and of a JSON node.
NODES = {str: WORDS, int: [-(2**63), -1, 0, 1, 2, 2**31, 2**62]}
JSON_NODES = [
    "null", "true", "-1", "0", str(10**30), "1.5", "NaN", '"\\ud800"', "[]", "{}", "[[1]]", '{"a": 1}', '["a", 1]',
    str(2**64), "[" * MAX_DEPTH + "]" * MAX_DEPTH, *map(json.dumps, ["x" * LONG, *WORDS]),
    *(json.dumps(text.decode("latin-1")) for text in TEXTS),
]  # fmt: skip
LENGTHS = [0, 1, 255, 2**31 - 1, 2**32 - 1]  # claimed lengths of a string
BODIES = [b"", b"1", b"null", b"[" * MAX_DEPTH, b"\0" * 1000, b'{"text_input":"x","max_tokens":' + b"9" * 400 + b"}"]
HEADERS = [
    *({"Inference-Header-Content-Length": length} for length in ("-1", "0", "1", "10", "99999999999", "x")),
    {"Content-Type": "application/octet-stream"}, {"X-Long": "x" * 20_000},
    *({"Content-Encoding": kind} for kind in ("gzip", "deflate", "nonsense")),
]  # fmt: skip
WAYS = ("stream", "stream", "stream", "stream", "unary", "generate", "generate", "generate_stream", "infer")
# Optional fields of a gRPC message.
EXTRAS: list[dict[str, Any]] = [
    {"outputs": [{"name": "text_output"}]}, {"outputs": [{"name": "output_ids"}]}, {"model_version": "1"}, {"id": "1"},
    *({"parameters": {name: {"int64_param": 1}}} for name in ("priority", "timeout", "text_input", "nonsense")),
    {"parameters": {"sequence_id": {"int64_param": 1}, "sequence_start": {"bool_param": True}}},
]  # fmt: skip

Generator = np.random.Generator


@dataclass(frozen=True, slots=True)
class Target:
    """A model, its inputs and a valid request."""

    model: str
    specs: tuple[TritonTensor, ...]
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

    label: str  # model, transport and mutation
    request: Any = None
    is_unary: bool = False
    path: str = ""
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    method: str = "POST"


def pick(rng: Generator, values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def make_case(seed: int, number: int, contract: str) -> Case:
    """Makes a case; equal arguments give equal cases."""
    rng = np.random.default_rng([seed, number])
    target, way = pick(rng, TARGETS[contract]), pick(rng, WAYS)
    tensors = tensors_of([target.values], has_batch=target.has_batch)
    # Half of them are well formed: Triton refuses the others before a model is called.
    is_formed, num_wrong, labels = rng.random() < 0.5, int(rng.integers(1, 4)), [f"{target.model} {way}"]
    for spec in [pick(rng, target.specs) for _ in range(num_wrong * is_formed)]:
        tensors[spec.name] = bad_tensor(rng, spec, has_batch=target.has_batch)
        labels.append(spec.name)
    tree: Any = {"inputs": [tensor.head(name) for name, tensor in tensors.items()]}
    if way in ("stream", "unary"):
        tree |= {"model_name": target.model, "raw_input_contents": [tensor.raw for tensor in tensors.values()]}
        if not is_formed:
            tree |= copy.deepcopy(pick(rng, EXTRAS))
            labels += [change(rng, tree, is_json=False) for _ in range(num_wrong)]
        return Case(", ".join(labels), as_request(tree), is_unary=way == "unary")
    for head, (name, tensor) in zip(tree["inputs"], tensors.items(), strict=True):
        head["data"] = tensor.values
        if way != "infer":
            tree[name] = tensor.values[0] if len(tensor.values) == 1 else tensor.values
    if way != "infer":
        del tree["inputs"]
    labels += [] if is_formed else [change(rng, tree, is_json=True) for _ in range(num_wrong)]
    body = json.dumps(tree, default=lambda raw: raw.decode("latin-1")).encode()
    headers, method, model = {}, "POST", target.model
    if rng.random() < 0.25:
        body = spoilt(rng, body)
        labels.append("spoilt")
    if rng.random() < 0.1:
        headers = pick(rng, HEADERS)
        labels.append("header")
    if rng.random() < 0.05:
        method, model = pick(rng, ["GET", "PUT", "DELETE"]), pick(rng, [model, "nobody", "%2e%2e", "x" * 4000])
        labels.append("address")
    return Case(", ".join(labels), path=f"/v2/models/{model}/{way}", body=body, headers=headers, method=method)


def bad_tensor(rng: Generator, spec: TritonTensor, *, has_batch: bool) -> Tensor:
    """Draws a bad tensor: mostly the declared dimensions, up to 300 values where their number is open."""
    open_dim = int(pick(rng, [0, 1, 2, 300] if spec.dims == (-1,) else [0, 1, 1, 2, 3]))
    dims = [open_dim if dim == -1 else dim for dim in spec.dims]
    if rng.random() < 0.1:
        dims = [int(pick(rng, [0, 2, 300]))]
    num = math.prod(dims)
    if spec.data_type != "STRING":
        values = [pick(rng, NUMBERS[spec.data_type]) for _ in range(num)]
    elif rng.random() < 1 / 400:
        values = [b"x " * (VERY_LONG // 2)] * num
    else:
        values = [pick(rng, TEXTS) if num < 3 else b"x" for _ in range(num)]
    return Tensor(spec.data_type, [1] * has_batch + dims, values)


def containers(node: Any) -> Iterator[Any]:
    """Returns the non-empty objects and lists of a tree."""
    if isinstance(node, dict | list) and node:
        yield node
        for each in node.values() if isinstance(node, dict) else node:
            yield from containers(each)


def change(rng: Generator, tree: Any, *, is_json: bool) -> str:
    """Removes, doubles or replaces one node of a tree. Returns which."""
    if not tree:
        return "nothing left"
    parent = pick(rng, list(containers(tree)))
    key = pick(rng, list(parent) if isinstance(parent, dict) else range(len(parent)))
    how = pick(rng, ["gone", "twice", "other", "other"])
    if how == "gone":
        del parent[key]
    elif how == "twice" and isinstance(parent, list):
        parent.insert(key, parent[key])
    elif is_json:
        parent[key] = json.loads(pick(rng, JSON_NODES))
    elif isinstance(parent[key], bytes):
        parent[key] = bad_bytes(rng, parent[key])
    else:
        kind = type(parent[key])
        parent[key] = pick(rng, NODES.get(kind, [kind()]))
    return f"{key} {how}"


def bad_bytes(rng: Generator, raw: bytes) -> bytes:
    """Returns a value of another length, noise, or a string with a wrong length prefix."""
    cut, more = raw[: int(rng.integers(len(raw) + 1))], rng.bytes(int(pick(rng, [1, 4, 64, LONG])))
    return pick(rng, [cut, raw + more, rng.bytes(len(raw)), int(pick(rng, LENGTHS)).to_bytes(4, "little") + b"abc"])


def spoilt(rng: Generator, body: bytes) -> bytes:
    """Returns a body that is not JSON, or barely."""
    place = int(rng.integers(len(body) + 1))
    key_twice = body[:-1] + b',"max_tokens":1,"max_tokens":-1}'
    inserted = body[:place] + rng.bytes(1) + body[place:]
    marked, behind_blanks = b"\xef\xbb\xbf" + body, b" " * LONG + body
    return pick(rng, [body[:place], inserted, body + body, rng.bytes(200), marked, key_twice, behind_blanks, *BODIES])
