"""llama.cpp's own server, which continues token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lab.answers import Answer, Job
from lab.bench.servers import free_ports
from lab.peers.streaming import StreamingServer
from lab.places import ANCHORS

BINARY = ANCHORS / "llama-server"
MIN_SLOT_CONTEXT, SPARE_TOKENS = 512, 16


class LlamaServer(StreamingServer):
    """llama-server on a loopback port, num_slots requests at a time.

    options: of its speculation, () for none; look_ahead: tokens that these draft beyond an answer. slot_context: tokens
    of the longest request, prompt and answer. Raises RuntimeError where it does not come up.
    """

    path = "/completion"

    def __init__(
        self,
        target: Path,
        options: tuple[str, ...] = (),
        *,
        look_ahead: int = 0,
        num_slots: int,
        slot_context: int,
        threads: int,
        log: Path,
    ) -> None:
        # Beyond a request the draft looks ahead, and the server keeps a little for itself.
        context = max(MIN_SLOT_CONTEXT, slot_context + look_ahead + SPARE_TOKENS) * num_slots
        (port,) = free_ports(1)
        own = ["-m", str(target), "--port", str(port), "-np", str(num_slots), "-c", str(context)]
        own += ["-t", str(threads), "-tb", str(threads), "--no-webui", "--cache-ram", "0", "--log-disable"]
        super().__init__([str(BINARY), *own, *options], port, log)

    def body(self, job: Job) -> dict[str, Any]:
        return llama_body(job)

    def take(self, event: dict[str, Any], answer: Answer) -> tuple[str, bool]:
        if event.get("stop"):
            timings = event["timings"]
            answer.num_tokens = timings["predicted_n"]
            answer.num_drafted = timings.get("draft_n", 0)
            answer.num_accepted = timings.get("draft_n_accepted", 0)
        return event["content"], bool(event.get("stop"))


def llama_body(job: Job) -> dict[str, Any]:
    """A /completion request: all of its own truncations off, so that temperature alone shapes the law."""
    return {
        "prompt": list(job.prompt_ids),
        "n_predict": job.max_tokens,
        "ignore_eos": not job.is_chat,
        "temperature": job.temperature,
        "seed": job.seed,
        "samplers": ["temperature"],
        "cache_prompt": False,
        "stream": True,
    }


def draft_options(draft: Path, num_draft: int, threads: int) -> tuple[str, ...]:
    """A draft model beside the target, num_draft tokens at a time."""
    own = ("-md", str(draft), "--spec-draft-n-max", str(num_draft), "-td", str(threads))
    return (*own, "--spec-type", "draft-simple")


def llama_version() -> str:
    path = ANCHORS / "llama-version"
    return path.read_text().strip() if path.exists() else "not built"
