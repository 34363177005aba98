#!/usr/bin/env python3
"""Streams one completion from a running server over gRPC, then prints what speculation gained.

A plain client of the `ensemble` model, without imports from the project.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton

PROMPTS = Path(__file__).resolve().parents[1] / "models" / "demo" / "prompts.jsonl"
FLAGS = ["stream", "exclude_input_in_output", "return_perf_metrics", "return_num_output_tokens"]
OUTPUTS = ["text_output", "num_output_tokens", "total_draft_tokens", "total_accepted_draft_tokens"]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Streams one completion and prints its acceptance.")
    parser.add_argument("--url", default="127.0.0.1:8001", help="gRPC address of the server")
    parser.add_argument("--prompt", help="text to complete; default: one of the held-out prompts")
    parser.add_argument("--chat", action="store_true", help="the prompt is a message of a user: asks a chat model")
    parser.add_argument("--prompt-index", type=int, default=1, help="which held-out prompt")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def request_inputs(prompt: str, args: argparse.Namespace) -> list[triton.InferInput]:
    asked = json.dumps([{"role": "user", "content": prompt}]) if args.chat else prompt
    fields = {
        "messages" if args.chat else "text_input": ("BYTES", np.array(asked, dtype=object)),
        "max_tokens": ("INT32", np.int32(args.max_tokens)),
        "temperature": ("FP32", np.float32(args.temperature)),
        "top_p": ("FP32", np.float32(1.0)),  # without it or top_k, the server decodes greedily
        "seed": ("UINT64", np.uint64(args.seed)),
        **dict.fromkeys(FLAGS, ("BOOL", np.bool_(True))),
    }
    inputs = []
    for name, (kind, value) in fields.items():
        inputs.append(triton.InferInput(name, [1, 1], kind))
        inputs[-1].set_data_from_numpy(np.reshape(value, (1, 1)))
    return inputs


def stream(url: str, inputs: list[triton.InferInput]) -> dict[str, Any]:
    """Prints text as it arrives. Returns the answer's counters and its times in seconds."""
    answers: queue.Queue = queue.Queue()
    found: dict[str, Any] = {}
    with triton.InferenceServerClient(url) as client:
        client.start_stream(callback=partial(lambda q, result, error: q.put((result, error)), answers))
        start = time.perf_counter()
        client.async_stream_infer(
            "ensemble",
            inputs,
            outputs=[triton.InferRequestedOutput(name) for name in OUTPUTS],
            enable_empty_final_response=True,
        )
        is_final = False
        while not is_final:
            result, error = answers.get(timeout=60)
            if error is not None:
                sys.exit(f"error: {error}")
            is_final = result.get_response().parameters["triton_final_response"].bool_param
            text = result.as_numpy("text_output")
            if text is None:
                continue
            print(text[0].decode(), end="", flush=True)
            found.setdefault("ttft_s", time.perf_counter() - start)
            for name in OUTPUTS[1:]:
                value = result.as_numpy(name)
                if value is not None:
                    # A response counts its own tokens, and the drafts of the request so far.
                    found[name] = int(value[0][0]) + (found.get(name, 0) if name == "num_output_tokens" else 0)
        found["seconds"] = time.perf_counter() - start
    return found


def main() -> None:
    args = parse_args()
    prompt = args.prompt
    if prompt is None:
        entry = json.loads(PROMPTS.read_text(encoding="utf-8").splitlines()[args.prompt_index])
        prompt = entry["prompt"]
        print(f"== prompt {entry['id']} from {entry['source']}, which the models never saw:")
    print(prompt + "\n" * args.chat + "\033[32m" * sys.stdout.isatty(), end="", flush=True)
    found = stream(args.url, request_inputs(prompt, args))
    print("\033[0m" * sys.stdout.isatty())
    tokens, drafted, accepted = (found.get(name, 0) for name in OUTPUTS[1:])
    if not tokens:
        sys.exit("error: the server answered without tokens")
    verifications = max(tokens - accepted, 1)  # each verification emits one token beyond those accepted
    print(f"== {tokens} tokens in {found['seconds']:.2f} s = {tokens / found['seconds']:.0f} tokens/s, ", end="")
    print(f"first after {found['ttft_s'] * 1e3:.0f} ms; temperature {args.temperature:g}, seed {args.seed}")
    print(f"== accepted {accepted} of {drafted} drafted tokens ({accepted / max(drafted, 1):.0%}): ", end="")
    print(f"{tokens / verifications:.2f} tokens per verification")


if __name__ == "__main__":
    main()
