#!/usr/bin/env python3
"""Streams one completion of a running server's `ensemble` over HTTP, then prints what speculation gained.

Needs only the standard library.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

PROMPTS = Path(__file__).resolve().parents[1] / "models" / "demo" / "prompts.jsonl"
COUNTS = ("num_output_tokens", "total_draft_tokens", "total_accepted_draft_tokens")
SEED = 1


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Streams one completion and prints its acceptance.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server's HTTP port")
    parser.add_argument("--prompt", help="text to complete; default: one of the held-out prompts")
    parser.add_argument("--chat", action="store_true", help="the prompt is a message of a user: asks a chat model")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.8)
    return parser.parse_args()


def stream(prompt: str, args: argparse.Namespace) -> dict[str, Any]:
    """Prints text as it arrives. Returns the answer's counts and its times in seconds."""
    asked = {"messages": json.dumps([{"role": "user", "content": prompt}])} if args.chat else {"text_input": prompt}
    asked |= {"max_tokens": args.max_tokens, "temperature": args.temperature, "seed": SEED}
    asked["top_p"] = 1.0  # without it or top_k, the server decodes greedily
    flags = ("stream", "exclude_input_in_output", "return_perf_metrics", "return_num_output_tokens")
    body = json.dumps(asked | dict.fromkeys(flags, True)).encode()
    found: dict[str, Any] = dict.fromkeys((*COUNTS, "verifications"), 0)
    start = time.perf_counter()
    with urllib.request.urlopen(f"{args.url}/v2/models/ensemble/generate_stream", body, timeout=60) as lines:
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            event = json.loads(line[5:])
            if "error" in event:
                sys.exit(f"error: {event['error']}")
            found["verifications"] += event[COUNTS[0]] > 0
            print(event["text_output"], end="", flush=True)
            found.setdefault("ttft_s", time.perf_counter() - start)
            # A response counts its own tokens, and the drafts of the request so far.
            event[COUNTS[0]] += found[COUNTS[0]]
            found |= {name: event[name] for name in COUNTS}
    return found | {"seconds": time.perf_counter() - start}


def main() -> None:
    args = parse_args()
    prompt = args.prompt
    if prompt is None:
        entry = json.loads(PROMPTS.read_text(encoding="utf-8").splitlines()[1])
        prompt = entry["prompt"]
        print(f"== prompt {entry['id']} from {entry['source']}, which the models never saw:")
    print(prompt + "\n" * args.chat + "\033[32m" * sys.stdout.isatty(), end="", flush=True)
    try:
        found = stream(prompt, args)
    except urllib.error.HTTPError as error:
        body = error.read().decode().removeprefix("data: ")
        sys.exit(f"error: {json.loads(body)['error'] if body.startswith('{') else body}")
    except (OSError, ValueError) as error:
        sys.exit(f"error: --url = {args.url}: {error}")
    finally:
        print("\033[0m" * sys.stdout.isatty())
    tokens, drafted, accepted = (found[name] for name in COUNTS)
    if not tokens:
        sys.exit("error: the server answered without tokens")
    print(f"== {tokens} tokens in {found['seconds']:.2f} s = {tokens / found['seconds']:.0f} tokens/s, ", end="")
    print(f"first after {found['ttft_s'] * 1e3:.0f} ms; temperature {args.temperature:g}, seed {SEED}")
    print(f"== accepted {accepted} of {drafted} drafted tokens ({accepted / max(drafted, 1):.0%}): ", end="")
    print(f"{tokens / found['verifications']:.2f} tokens per verification")


if __name__ == "__main__":
    main()
