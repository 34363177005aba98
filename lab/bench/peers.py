"""Other people's programs on the same pair: llama.cpp's server, and transformers' generate.

Both are given the token ids that our text models make of a prompt or message, so that tokenisers and chat templates
play no part. transformers and torch are imported only when asked for; llama-server is a binary that the caller names.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import Tokenizer

from lab.answers import Answer, Job
from lab.bench.servers import ServerProcess, free_ports

MIN_SLOT_CONTEXT, SPARE_TOKENS = 512, 16


class LlamaServer(ServerProcess):
    """llama-server on a loopback port, num_slots requests at a time. draft None: no speculation.

    slot_context: tokens of the longest request, prompt and answer. Raises RuntimeError where it does not come up.
    """

    def __init__(
        self,
        binary: Path,
        target: Path,
        draft: Path | None,
        num_draft: int,
        *,
        num_slots: int,
        slot_context: int,
        threads: int,
        log: Path,
    ) -> None:
        # Beyond a request the draft looks ahead, and the server keeps a little for itself.
        context = max(MIN_SLOT_CONTEXT, slot_context + num_draft + SPARE_TOKENS) * num_slots
        (port,) = free_ports(1)
        self._url = f"http://127.0.0.1:{port}"
        options = ["-m", str(target), "--port", str(port), "-np", str(num_slots), "-c", str(context)]
        options += ["-t", str(threads), "-tb", str(threads), "--no-webui", "--cache-ram", "0", "--log-disable"]
        if draft is not None:
            options += ["-md", str(draft), "--spec-draft-n-max", str(num_draft), "-td", str(threads)]
            options += ["--spec-type", "draft-simple"]
        super().__init__([str(binary), *options], self._url + "/health", log)
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise

    def run(self, jobs: list[Job], num_clients: int) -> tuple[list[Answer], float]:
        return asyncio.run(self._run(jobs, num_clients))

    async def _run(self, jobs: list[Job], num_clients: int) -> tuple[list[Answer], float]:
        answers = [Answer(0.0, [], 0, 0, 0, "") for _ in jobs]
        work = iter([(llama_body(job), answer) for job, answer in zip(jobs, answers, strict=True)])
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            start = time.perf_counter()
            await asyncio.gather(*(self._client(session, work) for _ in range(num_clients)))
            return answers, time.perf_counter() - start

    async def _client(self, session: aiohttp.ClientSession, work: Iterator[tuple[dict[str, Any], Answer]]) -> None:
        for body, answer in work:
            text = hashlib.sha256()
            answer.start_s = time.perf_counter()
            async with session.post(self._url + "/completion", json=body) as response:
                response.raise_for_status()
                async for line in response.content:
                    if not line.startswith(b"data: "):
                        continue
                    event = json.loads(line[6:])
                    # An answer may be nothing but the token that ends it: its end is its response then.
                    if event["content"] or (event.get("stop") and not answer.response_s):
                        answer.response_s.append(time.perf_counter())
                        text.update(event["content"].encode())
                    if event.get("stop"):
                        timings = event["timings"]
                        answer.num_tokens = timings["predicted_n"]
                        answer.num_drafted = timings.get("draft_n", 0)
                        answer.num_accepted = timings.get("draft_n_accepted", 0)
            answer.digest = text.hexdigest()


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


class TransformersPeer:
    """generate(), plain or assisted, one request after the other. Its answers come whole."""

    def __init__(self, target: Path, draft: Path | None, threads: int) -> None:
        import torch
        from transformers import LlamaForCausalLM

        torch.set_num_threads(threads)
        self._tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
        self._torch = torch
        self._target: Any = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self._draft = None if draft is None else LlamaForCausalLM.from_pretrained(draft, dtype=torch.float32).eval()

    def run(self, jobs: list[Job], num_clients: int) -> tuple[list[Answer], float]:
        """Raises ValueError for more than one client: generate() answers one at a time."""
        if num_clients != 1:
            raise ValueError(f"num_clients = {num_clients}: transformers is measured with 1")
        torch = self._torch
        answers = []
        begin = time.perf_counter()
        for job in jobs:
            ids = torch.tensor([job.prompt_ids])
            options: dict[str, Any] = {"do_sample": job.temperature > 0}
            if not job.is_chat:
                options["min_new_tokens"] = job.max_tokens
            if job.temperature > 0:
                torch.manual_seed(job.seed)
                options |= {"temperature": job.temperature, "top_k": 0, "top_p": 1.0}
            if self._draft is not None:
                options["assistant_model"] = self._draft
            start = time.perf_counter()
            with torch.inference_mode():
                answer = self._target.generate(ids, max_new_tokens=job.max_tokens, pad_token_id=0, **options)
            end = time.perf_counter()
            text = self._tokenizer.decode(answer[0, ids.shape[1] :].tolist(), skip_special_tokens=False)
            digest = hashlib.sha256(text.encode()).hexdigest()
            answers.append(Answer(start, [end], answer.shape[1] - ids.shape[1], 0, 0, digest))
        return answers, time.perf_counter() - begin
