"""Two replicas on Ray Serve (deploy/ray_serve.py), seen by clients of their one port."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from faser_backend.lab.abuse.served import metric
from faser_backend.lab.checks.servers import free_ports
from faser_backend.serving.processes import arguments
from tests.support.clients import wait_for_free_blocks
from tests.support.served import serve as serve_one
from tests.support.serving_pair import build_pair

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")

import ray
from pydantic import ValidationError
from ray import serve

from deploy.ray_serve import Options, app, routed_text

ROOT = Path(__file__).parent.parent
SERVE_OPTIONS = "--num-threads 1 --policy none --model-name m"
FINISHED = "vllm:request_success_total"  # by reason
WHOLE = FINISHED, "length"  # requests that ran to their max_tokens
FIELDS: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "extra_body": {"ignore_eos": True}}
LONG = {"max_tokens": 2000}
PROMPTS = [f"{word} is said by the {number} of us" for number, word in enumerate(("yes", "no", "def", "caf", "+", "x"))]
# Different from one another, and so long that the router, which gives such a prompt to the least loaded replica,
# alternates between the two.
UNLIKE = [letter * 400 for letter in "abcdefgh"]
REPLACED_WITHIN_S = 100


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory) -> Path:
    return build_pair(tmp_path_factory.mktemp("ray"), max_context=4096)


def options(engine_dir: Path, **more: Any) -> Options:
    return Options(engine_dir=engine_dir, serve_options=SERVE_OPTIONS, min_replicas=2, max_replicas=2, **more)


@pytest.fixture(scope="module")
def cluster(engine_dir: Path) -> Iterator[int]:
    """Yields the port of two replicas."""
    [port] = free_ports(1)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": {"PYTHONPATH": path}},
        log_to_driver=False,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(app(options(engine_dir)), logging_config={"log_level": "WARNING"})
        yield port
    finally:
        serve.shutdown()
        ray.shutdown()


def client_of(port: int) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)


def servers_of(engine_dir: Path) -> dict[int, int]:
    """Returns process id -> metrics port of each replica's `faser serve`."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        command = arguments(int(folder.name))
        if "--openai-port" in command and str(engine_dir) in command and "serve" in command:
            found[int(folder.name)] = int(command[command.index("--metrics-port") + 1])
    return found


async def complete(client: openai.AsyncOpenAI, prompt: str, **fields: Any) -> str:
    answer = await client.completions.create(model="m", prompt=prompt, **{**FIELDS, **fields})
    return answer.choices[0].text


async def follow(client: openai.AsyncOpenAI, prompt: str, has_begun: asyncio.Event, **fields: Any) -> str | None:
    """Returns the streamed text, or None if an event reported that the replica is gone."""
    text = ""
    try:
        async with await client.completions.create(
            model="m", prompt=prompt, stream=True, **{**FIELDS, **fields}
        ) as chunks:
            async for chunk in chunks:
                has_begun.set()
                text += chunk.choices[0].text
    except openai.APIError as error:
        return None if "the replica is gone" in error.message else error.message
    return text


def wait_until(is_so: Callable[[], bool], what: str, timeout_s: float = 20) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.1)


def test_tokens_are_those_of_one_server_and_both_replicas_work(cluster: int, engine_dir: Path):
    async def texts(port: int) -> list[str]:
        client = client_of(port)
        wanted = [complete(client, p, **fields) for p in PROMPTS for fields in ({}, {"temperature": 0.8, "seed": 7})]
        return await asyncio.gather(*wanted)

    found = asyncio.run(texts(cluster))
    assert all(metric(port, *WHOLE) > 0 for port in servers_of(engine_dir).values())
    [port] = free_ports(1)
    with serve_one("--engine-dir", engine_dir, *SERVE_OPTIONS.split(), "--openai-port", port):
        assert found == asyncio.run(texts(port))
    assert len(set(found)) > len(PROMPTS)  # control: prompts and seeds make a difference


def test_prompts_that_begin_alike_go_to_one_replica(cluster: int, engine_dir: Path):
    async def turns() -> None:
        client, text = client_of(cluster), "A conversation that is told at some length. " * 3
        for _ in range(6):
            text += await complete(client, text, max_tokens=8)

    ports = servers_of(engine_dir).values()
    before = [metric(port, *WHOLE) for port in ports]
    asyncio.run(turns())
    wait_until(lambda: sum(metric(port, *WHOLE) for port in ports) == sum(before) + 6, "requests are not counted")
    assert 6 in [metric(port, *WHOLE) - old for port, old in zip(ports, before, strict=True)]


def test_a_client_that_leaves_cancels(cluster: int, engine_dir: Path):
    async def leave() -> None:
        client = client_of(cluster)
        for is_streamed in (True, False):
            tasks = [
                asyncio.create_task(
                    follow(client, p, asyncio.Event(), **LONG) if is_streamed else complete(client, p, **LONG)
                )
                for p in PROMPTS
            ]
            await asyncio.sleep(0.3)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    ports = servers_of(engine_dir).values()
    before = sum(metric(port, *WHOLE) for port in ports)
    asyncio.run(leave())
    for port in ports:
        wait_for_free_blocks(port)
    assert sum(metric(port, *WHOLE) for port in ports) < before + len(PROMPTS)


def test_refusals_pass_with_their_status(cluster: int):
    async def ask() -> None:
        client = client_of(cluster)
        with pytest.raises(openai.BadRequestError, match="max_tokens = -1"):
            await complete(client, "x", max_tokens=-1)
        with pytest.raises(openai.NotFoundError, match="other"):
            await client.completions.create(model="other", prompt="x")
        assert [model.id async for model in client.models.list()] == ["m"]

    asyncio.run(ask())


def test_a_killed_replica_loses_no_request_of_the_other_and_is_replaced(cluster: int, engine_dir: Path):
    before = servers_of(engine_dir)
    assert len(before) == 2
    killed, survivor = before
    cut_short = [metric(before[survivor], FINISHED, reason) for reason in ("cancelled", "error")]
    whole = metric(before[survivor], *WHOLE)

    async def kill() -> tuple[list[str | None], list[str]]:
        client = client_of(cluster)
        streams = []
        for prompt in UNLIKE:
            has_begun = asyncio.Event()
            streams.append(asyncio.create_task(follow(client, prompt, has_begun, **LONG)))
            await has_begun.wait()
        os.kill(killed, signal.SIGKILL)
        behind = await asyncio.gather(*(complete(client, f"{p} later") for p in PROMPTS))
        return await asyncio.gather(*streams), behind

    streams, behind = asyncio.run(kill())
    lost, kept = [text for text in streams if text is None], [text for text in streams if text is not None]
    assert lost and kept  # each replica had some
    assert len(behind) == len(PROMPTS)  # those after the kill were answered
    time.sleep(1)  # counters lag behind answers
    assert [metric(before[survivor], FINISHED, reason) for reason in ("cancelled", "error")] == cut_short
    assert metric(before[survivor], *WHOLE) >= whole + len(behind) + 1
    wait_until(lambda: len(servers_of(engine_dir)) == 2, "no replacement", timeout_s=REPLACED_WITHIN_S)
    assert survivor in servers_of(engine_dir) and killed not in servers_of(engine_dir)

    async def again() -> list[str | None]:
        client = client_of(cluster)
        return await asyncio.gather(*(follow(client, p, asyncio.Event(), **LONG) for p in UNLIKE))

    [new] = set(servers_of(engine_dir).values()) - set(before.values())
    wait_until(lambda: _is_ready(new), "the replacement is not ready", timeout_s=REPLACED_WITHIN_S)
    whole_again = asyncio.run(again())
    assert [text for text in whole_again if text is None] == []
    assert all(text in (None, now) for text, now in zip(streams, whole_again, strict=True))  # equal tokens


def test_an_update_loses_no_request(cluster: int, engine_dir: Path):
    """Serve replaces every replica; the old ones finish their requests, then end."""
    before = servers_of(engine_dir)

    async def ask(is_over: threading.Event) -> tuple[list[str | None], int]:
        client, num_answered = client_of(cluster), 0
        streams = [asyncio.create_task(follow(client, p, asyncio.Event(), **LONG)) for p in PROMPTS]
        while not is_over.is_set():
            await complete(client, f"number {num_answered}")
            num_answered += 1
        return await asyncio.gather(*streams), num_answered

    is_over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(lambda: asyncio.run(ask(is_over)))
        time.sleep(0.3)
        try:
            serve.run(app(options(engine_dir, max_queued_requests=300)), logging_config={"log_level": "WARNING"})
        finally:
            is_over.set()
        streams, num_answered = asked.result()
    assert None not in streams and len(set(streams)) == len(PROMPTS) and num_answered > 10
    wait_until(lambda: len(servers_of(engine_dir)) == 2, "old servers are left")
    assert not set(before) & set(servers_of(engine_dir))


def _is_ready(metrics_port: int) -> bool:
    try:
        return metric(metrics_port, *WHOLE) >= 0
    except (OSError, AssertionError):
        return False


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"prompt": "abc"}', "abc"),
        (b'{"prompt": [1, 2]}', "1\n2"),
        (b'{"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]}', "be\nhi"),
        (b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}', "hi"),
        (b'{"messages": [{"role": "assistant", "content": null}, 3]}', "\n3"),
        (b'{"prompt": ""}', "-"),
        (b"no json", "-"),
        (b"[" * 100_000, "-"),
        (b"", "-"),
    ],
)
def test_what_the_router_compares(body: bytes, text: str):
    assert routed_text(body) == text


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"max_replica": "2"}, "max_replica"), ({"min_replicas": "3"}, "max_replicas = 1: must be at least"),
     ({"num_gpus": "-1"}, "num_gpus")],
)  # fmt: skip
def test_bad_options_are_named(wrong: dict[str, str], message: str):
    with pytest.raises(ValidationError, match=message):
        app(wrong)
