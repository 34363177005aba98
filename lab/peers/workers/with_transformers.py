"""transformers' generate(), plain or with prompt lookup: one request after the other."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from lab.peers.workers.loop import Record, new_answer, serve, take


class Generate:
    """dtype: of weights and arithmetic, by torch's name."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_num_threads(args.threads)
        dtype = getattr(torch, args.dtype)
        self._target: Any = LlamaForCausalLM.from_pretrained(args.model, dtype=dtype).eval()
        self._options: dict[str, Any] = {}
        if args.num_draft:
            self._options["prompt_lookup_num_tokens"] = args.num_draft

    def answer_all(self, jobs: list[Record], num_clients: int) -> list[Record]:
        assert num_clients == 1, num_clients
        return [self._answer(job) for job in jobs]

    def _answer(self, job: Record) -> Record:
        ids = torch.tensor([job["prompt_ids"]])
        options: dict[str, Any] = {"do_sample": job["temperature"] > 0, **self._options}
        if not job["is_chat"]:
            options["min_new_tokens"] = job["max_tokens"]
        if job["temperature"] > 0:
            torch.manual_seed(job["seed"])
            options |= {"temperature": job["temperature"], "top_k": 0, "top_p": 1.0}
        answer = new_answer()
        with torch.inference_mode():
            self._target.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=job["max_tokens"], pad_token_id=0,
                streamer=_Streamer(answer), **options,
            )  # fmt: skip
        return answer


class _Streamer(BaseStreamer):
    """The first thing that it is given is the prompt."""

    def __init__(self, answer: Record) -> None:
        self._answer, self._has_prompt = answer, False

    def put(self, value: Any) -> None:
        if self._has_prompt:
            take(self._answer, value.reshape(-1).tolist())
        self._has_prompt = True

    def end(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--num-draft", type=int, default=0, help="tokens of prompt lookup; 0: plain decoding")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, required=True)
    serve(f"{transformers.__version__} on torch {torch.__version__}", Generate(parser.parse_args()).answer_all)


if __name__ == "__main__":
    main()
