"""The engine's link: values that cross it come out equal, and invalid ones are refused with one error."""

import contextlib
import math
import os
import pickle
import socket
import struct
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import msgpack
import numpy as np
import pytest

from faser_backend.core.batch import SamplingRows
from faser_backend.core.errors import (
    ConfigError,
    ErrorCode,
    FailedError,
    Failure,
    FaserError,
    QueueFullError,
    RequestError,
)
from faser_backend.core.ports import Behind, run_behind
from faser_backend.core.request import EngineOutput, FinishReason, Limits, Request, RequestStats, Sampling
from faser_backend.cpu.sampler import NumpySampler
from faser_backend.places import DEMO_PAIR
from faser_backend.serving.engine_loop import EngineLoop
from faser_backend.serving.served_model import ServedModel
from faser_backend.text.prompts import PromptFormat
from faser_backend.text.tokenizer import TextTokenizer
from faser_backend.triton.link import (
    Command,
    Event,
    FrameSocket,
    Handshake,
    LinkServer,
    PackingError,
    SocketLink,
    only_socket,
    pack,
    socket_path,
    unpack,
)
from tests.support.harness import CONTEXT, VOCAB, drive, fake_engine, open_fake, request

TOKENIZER = TextTokenizer.from_file(DEMO_PAIR / "target" / "tokenizer.json", PromptFormat("{{ a }}", {"b": "<b>"}))
MODEL = ServedModel("m", TOKENIZER, Limits(VOCAB, CONTEXT), (1, 2), 16, 1000)
HANDSHAKE = Handshake(MODEL, 7, "clamp", True, 0.05)
SAMPLING = Sampling(0.5, 3, 0.9, 0.1, 1.1, 0.2, 0.3, 2, 2**64 - 1, {3: -math.inf, 4: 1.5}, ((1, 2), (3,)))
IDS_5, FLAGS = np.arange(5, dtype=np.int64), (True, True, True, True)
FULL = Request("r", IDS_5, 9, SAMPLING, (1,), ((4, 5),), 0, (6,), *FLAGS, guide="start: /a/")
STATS, FAILURE = RequestStats(arrival_ns=2**62, num_drafted=3), Failure(ErrorCode.TOO_LONG, "why", "max_tokens")
LOGITS, NO_LOGITS = np.ones((2, 3), np.float32), np.zeros((0, 3), np.float32)
ANSWER = EngineOutput("r", [1, 2], [-0.5, -1.0], FinishReason.STOP_WORDS, FAILURE, STATS, LOGITS, None, NO_LOGITS)


def same(left: object, right: object) -> bool:
    """Returns whether dataclasses that hold arrays are equal."""
    return pack(left) == pack(right) and type(left) is type(right)


@pytest.mark.parametrize(
    "value", [Command("submit", "client", FULL), Command("stop", "x"), Event(HANDSHAKE), Event(outputs=[ANSWER])]
)
def test_what_crosses_comes_out_equal(value: Command | Event):
    back = unpack(type(value), pack(value))
    assert same(back, value)
    if isinstance(back, Command) and back.request is not None:
        assert back.request.sampling == FULL.sampling
        assert back.request.prompt_ids.dtype == np.int64 and back.request.prompt_ids.tolist() == [0, 1, 2, 3, 4]
        assert replace(back.request, prompt_ids=FULL.prompt_ids, sampling=FULL.sampling).guide == "start: /a/"
    if isinstance(back, Event) and back.outputs:
        (output,) = back.outputs
        assert output.context_logits is not None and output.context_logits.shape == (2, 3)
        assert output.generation_logits is not None and output.generation_logits.shape == (0, 3)
        assert output.finish_reason is FinishReason.STOP_WORDS
    if isinstance(back, Event) and back.handshake:
        assert back.handshake.model.tokenizer.encode("def f(x):") == TOKENIZER.encode("def f(x):")


def test_objects_do_not_cross():
    grammar = object()
    guided = replace(FULL, sampling=replace(FULL.sampling, grammar=grammar))  # pyright: ignore[reportArgumentType]
    with pytest.raises(PackingError, match="object is no plain data"):
        pack(Command("submit", "", guided))
    with pytest.raises(PackingError, match="array of object"):
        pack(Command("submit", "", replace(FULL, prompt_ids=np.array([print], object))))


def plain_command(**changes: object) -> bytes:
    """Returns a submit command as a map, with changed fields of its request."""
    call = msgpack.unpackb(pack(Command("submit", "", request("r", [1, 2]))))  # arrays stay extension types
    call["request"] |= changes
    return pack(call)


def array(*content: object) -> msgpack.ExtType:
    """Returns an array as it crosses, of any content."""
    return msgpack.ExtType(1, msgpack.packb(content))


HOSTILE = [
    (plain_command(surprise=1), "Command.request.surprise = 1: unexpected keyword argument"),
    (plain_command(max_tokens="many"), "Command.request.max_tokens = 'many': input should be a valid integer"),
    (plain_command(end_ids=[1, "x"]), r"Command.request.end_ids\[1\] = 'x': input should be a valid integer"),
    (plain_command(sampling={"grammar": {"start": 1}}), "grammar = .*: input should be an instance of Grammar"),
    (plain_command(prompt_ids=[1, 2]), "prompt_ids = .*: input should be an instance of ndarray"),
    (plain_command(prompt_ids=array("object", [2], bytes(16))), "array of 'object': must be one of"),
    (plain_command(prompt_ids=array("int64", [2**61], bytes(16))), "array"),
    (plain_command(prompt_ids=array("int64", [2], bytes(15))), "buffer size"),
    (pack({"verb": "close", "id": "x"}), "Command.verb = 'close': input should be 'submit'"),
    (pack([1]), "Command = .*: input should be a dictionary or an instance of Command"),
    (pack(msgpack.ExtType(5, b"x")), "extension type 5: unknown"),
    (pickle.dumps(("submit", "x")), "no MessagePack"),
    (b"\xdd\xff\xff\xff\xff", "no MessagePack"),
    (b"\x91" * 100_000, "no MessagePack"),
]


@pytest.mark.parametrize(("data", "error"), HOSTILE)
def test_a_hostile_frame_is_refused_by_name(data: bytes, error: str):
    with pytest.raises(PackingError, match=error):
        unpack(Command, data)


@pytest.mark.parametrize(
    "error", [QueueFullError(3), RequestError("top_p", 2, "must lie in (0, 1]"), ConfigError("x"), PackingError("y")]
)
def test_errors_keep_their_code_and_field_across_the_link(error: FaserError):
    back = unpack(Event, pack(Event(error=error.failure))).error
    assert back is not None
    restored = FailedError(back)
    assert (str(restored), restored.code, restored.field) == (str(error), error.code, error.field)


def test_the_only_engines_socket_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("faser_backend.triton.link.MAX_SOCKET_PATH", 1000)  # /tmp holds other sockets
    for process, words in ((2**30, "start it first"), (os.getppid(), ""), (os.getpid(), f"engine-{os.getpid()}.sock")):
        socket_path(process).touch()  # the first one is stale
        with pytest.raises(ConfigError, match=words) if words else contextlib.nullcontext():
            assert only_socket() == socket_path(process)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """Connects a socket to the link of a fake engine."""
    engine, _ = fake_engine()
    loop = EngineLoop(engine)
    server = LinkServer(loop, HANDSHAKE, tmp_path / "engine.sock")
    yield tmp_path / "engine.sock"
    server.close()
    loop.close()


def test_tokens_are_sent_and_policies_learn_while_the_device_is_busy_with_the_next_call(monkeypatch):
    behind: Behind = deque()
    fake, events, ended = open_fake("none", behind=behind), list[str](), threading.Event()
    sampler = cast(NumpySampler, fake.step_runner.sampler)
    sample = sampler.sample
    monkeypatch.setattr(fake.step_runner.scheduler.policy, "observe", lambda record: events.append("learned"))

    def waits(logits: np.ndarray, rows: SamplingRows) -> np.ndarray:
        events.append("queued")
        run_behind(behind)
        events.append("waited")
        return sample(logits, rows)

    def deliver(outputs: list[EngineOutput] | None) -> None:
        events.extend("sent" for output in outputs or [] if output.token_ids)
        if outputs and outputs[-1].is_final:
            ended.set()

    sampler.sample = waits  # type: ignore[method-assign]
    loop = EngineLoop(fake.engine)
    loop.subscribe(deliver).submit(request("r", [1, 2, 3], 3), "")
    assert ended.wait(10)
    loop.close()
    first, second, last = ["queued", "waited"], ["queued", "sent", "waited"], ["queued", "sent", "learned", "waited"]
    assert events == [*first, *second, *last, "sent"]  # the first step read the prompt


def test_requests_over_the_link_get_the_tokens_that_they_get_without_it(path: Path):
    link = SocketLink(path, 5.0)
    assert same(link.handshake, HANDSHAKE)
    link.submit(request("r", [1, 2, 3]), "client")
    link.submit(request("bad", [1, 2, 3], max_tokens=10**6), "client")
    tokens, errors, open_ids = [], [], {"r", "bad"}
    while open_ids:
        for output in link.outputs.get(timeout=10) or []:
            tokens += output.token_ids
            errors += [output.error] if output.error else []
            open_ids -= {output.request_id} if output.is_final else set()
    engine, _ = fake_engine()
    assert tokens == drive(engine, [request("r", [1, 2, 3])]).tokens["r"]
    assert [(error.field, str(error)[:20]) for error in errors] == [("max_tokens", "max_tokens = 1000000")]
    link.close()
    assert link.outputs.get(timeout=5) is None
    with pytest.raises(FailedError, match="the engine process is gone"):
        link.submit(request("late", [1]), "")


def test_an_unexpected_error_is_its_requests_alone_and_a_server_that_closes_ends_its_links(tmp_path, monkeypatch):
    engine, _ = fake_engine()
    loop = EngineLoop(engine)
    server, acquire = LinkServer(loop, HANDSHAKE, tmp_path / "engine.sock"), engine.adapters.acquire
    monkeypatch.setattr(engine.adapters, "acquire", lambda one: acquire(one) if one.request_id == "good" else 1 / 0)
    link = SocketLink(tmp_path / "engine.sock", 5.0)
    for name in ("bad", "good"):
        link.submit(request(name, [1], 1), "")
    ended = {output.request_id: output for _ in range(2) for output in link.outputs.get(timeout=10) or []}
    assert ended["bad"].error is not None and ended["good"].is_final and ended["good"].error is None
    server.close()
    assert link.outputs.get(timeout=5) is None
    loop.close()


BAD_BYTES = [
    (struct.pack(">i", 3) + b"\xc1\xc1\xc1", "no MessagePack"),
    (struct.pack(">i", 0x7FFFFFFF), ""),  # longer than any command
    (struct.pack(">iQ", -1, 2**63 - 1), ""),
    (b"\0\0\0", ""),
]


@pytest.mark.parametrize(("data", "error"), BAD_BYTES)
def test_who_sends_bad_frames_is_told_and_hung_up_on(path: Path, data: bytes, error: str):
    other = SocketLink(path, 5.0)
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(str(path))
        frames = FrameSocket(stream, max_received=1 << 20, max_sent=1 << 20)
        assert same(unpack(Event, frames.receive() or b"").handshake, HANDSHAKE)
        stream.sendall(data)
        stream.shutdown(socket.SHUT_WR)
        if error:
            told = unpack(Event, frames.receive() or b"").error
            assert told is not None and error in told.message
        assert frames.receive() is None
    other.submit(request("r", [1, 2]), "")  # nobody else notices
    assert other.outputs.get(timeout=10)
    other.close()


def test_a_frame_that_is_too_long_is_not_sent():
    left, right = socket.socketpair()
    with left, right, pytest.raises(PackingError, match="frame = 11 bytes: must be at most 10"):
        FrameSocket(left, max_received=10, max_sent=10).send(bytes(11))


def test_a_frontend_that_reads_nothing_delays_nobody_and_loses_nothing(path: Path):
    kept: list[EngineOutput] = []
    slow, other = SocketLink(path, 5.0, lambda outputs: kept.extend(outputs or [])), SocketLink(path, 5.0)
    for request_id in (ids := [f"{number}-{'long name' * 500}" for number in range(4)]):
        slow.submit(request(request_id, [1, 2, 3], 80), "")  # 1.4 MB of outputs; a socket holds 0.2
    other.submit(request("r", [4], 100), "")
    while not any(output.is_final for output in other.outputs.get(timeout=10) or []):
        assert not kept
    while sum(output.is_final for output in kept) < len(ids):
        assert slow.read()
    [expected] = drive(fake_engine()[0], [request("r", [1, 2, 3], 80)]).tokens.values()
    for request_id in ids:
        assert [one for output in kept if output.request_id == request_id for one in output.token_ids] == expected
    slow.close()
    other.close()


def test_logits_that_do_not_fit_into_a_frame_fail_their_request_alone(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("faser_backend.triton.link.MAX_EVENT_BYTES", 3000)
    link = SocketLink(path, 5.0)
    link.submit(request("big", list(range(20)) * 3, 4, wants_context_logits=True), "")
    link.submit(request("small", [1, 2, 3], 30, wants_generation_logits=True), "")
    final = {}
    while len(final) < 2:
        for output in link.outputs.get(timeout=10) or []:
            if output.is_final:
                final.setdefault(output.request_id, output)  # behind the error comes that it was cancelled
    assert final["small"].error is None
    assert final["big"].error is not None and final["big"].error.field == "return_context_logits"
    link.close()
