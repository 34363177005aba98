"""OpenVINO GenAI answers a benchmark in its own process, over JSON lines: an order in, its answers out.

`python -m lab.peers.worker MODEL ...` runs under a Python that has OpenVINO and perhaps none of our packages. The first
line says that it is ready. An order is {"num_clients": n, "jobs": [fields of lab.answers.Job]}. The reply is
{"seconds": s, "answers": [fields of lab.answers.Answer, without the digest]}, with times of time.perf_counter.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from typing import Any

CACHE_GB, NO_TOP_K = 1, 1 << 31
MAX_NGRAM = 3  # of prompt lookup
Record = dict[str, Any]


def new_answer() -> Record:
    """Returns an answer to a request that is sent now."""
    counts = dict.fromkeys(("num_tokens", "num_drafted", "num_accepted"), 0)
    return {"start_s": time.perf_counter(), "response_s": [], "token_ids": [], **counts}


def take(answer: Record, token_ids: list[int]) -> None:
    """Adds new tokens to the answer."""
    answer["response_s"].append(time.perf_counter())
    answer["token_ids"] += token_ids
    answer["num_tokens"] += len(token_ids)


def serve(args: argparse.Namespace) -> None:
    """Answers orders until stdin ends: requests side by side in a ContinuousBatchingPipeline on a GGUF file."""
    import numpy as np
    import openvino as ov  # pyright: ignore[reportMissingImports]  # of the environment that runs this
    import openvino_genai as genai  # pyright: ignore[reportMissingImports]

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching = CACHE_GB, False
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": args.threads}
    properties |= {"prompt_lookup": True} if args.num_draft else {}
    properties |= {"INFERENCE_PRECISION_HINT": args.precision} if args.precision else {}
    pipeline = genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU", properties)

    def config(job: Record) -> Any:
        wanted = genai.GenerationConfig()
        wanted.max_new_tokens, wanted.apply_chat_template = job["max_tokens"], False
        wanted.eos_token_id, wanted.ignore_eos = args.end_id, not job["is_chat"]
        wanted.do_sample = job["temperature"] > 0
        if wanted.do_sample:
            wanted.temperature, wanted.top_p, wanted.top_k = job["temperature"], 1.0, NO_TOP_K
            wanted.rng_seed = job["seed"]
        if args.num_draft:
            wanted.num_assistant_tokens, wanted.max_ngram_size = args.num_draft, MAX_NGRAM
        return wanted

    def has_ended(handle: Any, answer: Record) -> bool:
        """Takes new tokens. Returns whether the answer has ended."""
        while handle.can_read():
            for output in handle.read().values():
                if output.generated_ids:
                    take(answer, list(output.generated_ids))
                if output.finish_reason != genai.GenerationFinishReason.NONE:
                    return True
        return False

    def answer_all(jobs: list[Record], num_clients: int) -> list[Record]:
        answers: list[Record] = []
        flight: list[tuple[Any, Record]] = []
        while len(answers) < len(jobs) or flight:
            for job in jobs[len(answers) : len(answers) + num_clients - len(flight)]:
                answers.append(new_answer())
                ids = ov.Tensor(np.array([job["prompt_ids"]], dtype=np.int64))
                flight.append((pipeline.add_request(next(request_ids), ids, config(job)), answers[-1]))
            pipeline.step()
            flight = [each for each in flight if not has_ended(*each)]
        return answers

    request_ids = itertools.count()
    print(json.dumps({"version": genai.get_version()}), file=out, flush=True)
    for line in sys.stdin:
        order, start = json.loads(line), time.perf_counter()
        answers = answer_all(order["jobs"], order["num_clients"])
        print(json.dumps({"seconds": time.perf_counter() - start, "answers": answers}), file=out, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--num-draft", type=int, default=0, help="Draft this many tokens by prompt lookup (0: none).")
    parser.add_argument("--precision", help="Set OpenVINO's arithmetic to f32 or bf16.")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--end-id", type=int, required=True)
    args = parser.parse_args()
    serve(args)


if __name__ == "__main__":
    main()
