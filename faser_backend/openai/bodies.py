"""From the bytes of a request to its checked fields, at a cost that others do not notice.

Reading JSON and checking it hold the interpreter's lock, so everybody waits for them. Their cost follows the number of
values: these are counted first, by searches that take milliseconds. A large body is read in a thread, one at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from faser_backend.core.errors import RequestError
from faser_backend.core.validation import Brief, refusal_of
from faser_backend.openai.errors import ApiError
from faser_backend.openai.fields import NOTHING, REFUSED, AnyBody, CompletionBody

MAX_BODY_BYTES = 4 << 20
MAX_HELD_BYTES = 128 << 20  # of all bodies beyond SMALL_BYTES that are on their way
BODY_TIMEOUT_S = 30.0
SMALL_BYTES = 16 << 10  # read at once, on the event loop
MAX_VALUES = 64 << 10  # of a body: entries of its lists, keys and values of its objects
MAX_IDS = 256 << 10  # values where prompts may be token ids
MAX_CONTAINERS = 32 << 10  # lists and objects
_READER = ThreadPoolExecutor(1, "large-bodies")


async def read_body(kind: type[AnyBody], request: Request) -> AnyBody:
    """Raises as check_body."""
    with _Held() as held:
        raw = await _receive(request, held)
        if len(raw) <= SMALL_BYTES:
            return _read(kind, raw)
        return await asyncio.get_running_loop().run_in_executor(_READER, _read, kind, raw)


class _Held:
    """Counts the memory of large bodies that are on their way, of all requests together, for the block."""

    in_all = 0

    def __init__(self) -> None:
        self._num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """num_bytes: of the body so far. Raises ApiError."""
        if num_bytes > SMALL_BYTES:
            _Held.in_all += num_bytes - self._num_bytes
            self._num_bytes = num_bytes
            if _Held.in_all > MAX_HELD_BYTES:
                limit = f"large bodies of {MAX_HELD_BYTES} bytes in all are on their way; retry later"
                raise ApiError(limit, status=503, code="unavailable")

    def __enter__(self) -> _Held:
        return self

    def __exit__(self, *exception: object) -> None:
        _Held.in_all -= self._num_bytes


def _read(kind: type[AnyBody], raw: bytes) -> AnyBody:
    return check_body(kind, parse(raw, MAX_IDS if kind is CompletionBody else MAX_VALUES))


async def _receive(request: Request, held: _Held) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise ApiError(f"the body is larger than {MAX_BODY_BYTES} bytes", status=413)
                held.grow(len(body))
    except TimeoutError:
        raise ApiError(f"the body took longer than {BODY_TIMEOUT_S:.0f} s", status=408) from None
    except ClientDisconnect:
        raise ApiError("the client is gone", status=400) from None
    return bytes(body.removeprefix(b"\xef\xbb\xbf"))  # a mark that some editors put before UTF-8


def parse(raw: bytes, max_values: int = MAX_VALUES) -> object:
    """JSON as the standard has it: no NaN, no half surrogate pairs; at most 200 levels deep. Raises ApiError."""
    num_values, num_containers = _counts(raw, max_values)
    if num_values > max_values or num_containers > MAX_CONTAINERS:
        limit = f"at most {max_values} values and {MAX_CONTAINERS} lists and objects are allowed"
        raise ApiError(f"the body has {num_values} values, {num_containers} lists and objects: {limit}", status=413)
    try:
        return from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}") from None


def _counts(raw: bytes, max_values: int) -> tuple[int, int]:
    """(values, lists and objects) of a JSON text; exact where there may be too many, else from above."""
    num_values, num_containers = raw.count(b",") + raw.count(b":"), raw.count(b"[") + raw.count(b"{")
    if num_values <= max_values and num_containers <= MAX_CONTAINERS:
        return num_values, num_containers
    # Texts do not count. Without escapes, every quote begins or ends one.
    text = np.frombuffer(raw.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    is_outside = ~np.logical_xor.accumulate(text == ord('"'))

    def num(marks: str) -> int:
        return int(np.count_nonzero(((text == ord(marks[0])) | (text == ord(marks[1]))) & is_outside))

    return num(",:"), num("[{")


def check_body(kind: type[AnyBody], content: object) -> AnyBody:
    """Raises ApiError or RequestError naming the first field that is wrong, its value and the limit."""
    if not isinstance(content, Mapping):
        raise ApiError(f"the body must be a JSON object, not {type(content).__name__}")
    for name, meaning in REFUSED[kind].items():
        if name in content and content[name] not in NOTHING:
            raise RequestError(name, Brief(content[name]), f"not supported: {meaning}")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise refusal_of(error) from None
