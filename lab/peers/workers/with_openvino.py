"""OpenVINO GenAI on a GGUF file: continuous batching, plain or with prompt lookup."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import openvino as ov  # pyright: ignore[reportMissingImports]  # of the environment that runs this
import openvino_genai as genai  # pyright: ignore[reportMissingImports]

from lab.peers.workers.loop import Record, new_answer, serve, take

CACHE_GB = 1
NO_TOP_K = 1 << 31


class Batching:
    """Requests side by side in a ContinuousBatchingPipeline."""

    def __init__(self, args: argparse.Namespace) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.enable_prefix_caching = False
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": args.threads}
        if args.num_draft:
            properties["prompt_lookup"] = True
        if args.precision:
            properties["INFERENCE_PRECISION_HINT"] = args.precision
        self._args, self._next_id = args, 0
        self._pipeline = genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU", properties)

    def answer_all(self, jobs: list[Record], num_clients: int) -> list[Record]:
        answers: list[Record] = []
        flight: list[tuple[Any, Record]] = []
        while len(answers) < len(jobs) or flight:
            while len(answers) < len(jobs) and len(flight) < num_clients:
                job = jobs[len(answers)]
                answers.append(new_answer())
                handle = self._pipeline.add_request(self._next_id, _ids(job), _config(job, self._args))
                self._next_id += 1
                flight.append((handle, answers[-1]))
            self._pipeline.step()
            flight = [each for each in flight if not _read(*each)]
        return answers


def _read(handle: Any, answer: Record) -> bool:
    """Takes what has come. Returns whether the answer has ended."""
    while handle.can_read():
        for output in handle.read().values():
            if output.generated_ids:
                take(answer, list(output.generated_ids))
            if output.finish_reason != genai.GenerationFinishReason.NONE:
                return True
    return False


def _ids(job: Record) -> Any:
    return ov.Tensor(np.array([job["prompt_ids"]], dtype=np.int64))


def _config(job: Record, args: argparse.Namespace) -> Any:
    config = genai.GenerationConfig()
    config.max_new_tokens = job["max_tokens"]
    config.apply_chat_template = False
    config.eos_token_id = args.end_id
    config.ignore_eos = not job["is_chat"]
    config.do_sample = job["temperature"] > 0
    if config.do_sample:
        config.temperature, config.top_p, config.top_k = job["temperature"], 1.0, NO_TOP_K
        config.rng_seed = job["seed"]
    if args.num_draft:
        config.num_assistant_tokens, config.max_ngram_size = args.num_draft, args.max_ngram
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--num-draft", type=int, default=0, help="tokens of prompt lookup; 0: plain decoding")
    parser.add_argument("--precision", help="of its arithmetic, f32 or bf16; default: its own choice")
    parser.add_argument("--max-ngram", type=int, default=3)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--end-id", type=int, required=True)
    serve(genai.get_version(), Batching(parser.parse_args()).answer_all)


if __name__ == "__main__":
    main()
