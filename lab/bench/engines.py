"""Engine directories beside one another, and llama.cpp beside them: one model on several runtimes or formats.

    python scripts/bench_engines.py ENGINE_DIR... [--llama FILE.gguf]... [--policies none,fixed:4]

Every directory is served through Triton under every policy, every GGUF file by llama.cpp's own server without a draft
(`scripts/anchors/build_llama.sh` makes it). They take turns over the same prompts; the first one named is the
reference. Writes NAME.json and NAME.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import ExitStack
from pathlib import Path

from faser_backend.manifest import EngineManifest
from lab.bench import environment
from lab.bench.peers import LlamaServer
from lab.bench.servers import OverTriton
from lab.bench.side_by_side import add_prompt_options, asked_prompts, markdown, measure_loads
from lab.bench.workload import Job, Trace
from lab.places import ANCHORS, RESULTS

PLACE = "own servers"
LLAMA_SERVER = ANCHORS / "llama-server"
NO_REUSE = "--no-prefix-reuse"


class Contestants:
    """By name: a server each, all up; those whose turn it is not wait."""

    def __init__(self, args: argparse.Namespace, longest: int, stack: ExitStack) -> None:
        """longest: tokens of the longest request, prompt and answer."""
        self._servers: dict[str, tuple[OverTriton | LlamaServer, str]] = {}
        num_slots = max(int(count) for count in args.clients.split(","))
        for path in args.llama:
            server = LlamaServer(
                LLAMA_SERVER, path, None, 0, num_slots=num_slots, slot_context=longest, threads=args.threads
            )
            stack.callback(server.close)
            self._servers[f"llama.cpp {path.stem}"] = server, ""
        policies = args.policies.split(",")
        options = [NO_REUSE, "--num-threads", str(args.threads), *args.serve_options.split()]
        for engine_dir in args.engine_dirs:
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faser-bench-")))
            over = OverTriton(engine_dir, policies, logs, options)
            stack.callback(over.close)
            self._servers |= {f"{engine_dir.name} {policy}": (over, policy) for policy in policies}

    def names(self) -> list[str]:
        return list(self._servers)

    def run(self, policy: str, jobs: list[Job], num_clients: int) -> tuple[list[Trace], float]:
        """policy: a contestant's name."""
        server, own_policy = self._servers[policy]
        if isinstance(server, LlamaServer):
            return server.run(jobs, num_clients)
        return server.run(own_policy, jobs, num_clients)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine_dirs", type=Path, nargs="+")
    parser.add_argument("--llama", type=Path, action="append", default=[], help="a GGUF file for llama.cpp")
    add_prompt_options(parser)
    parser.add_argument("--policies", default="none")
    parser.add_argument("--clients", default="1,4,16")
    parser.add_argument("--temperatures", default="0")
    parser.add_argument("--threads", type=int, default=2, help="of each server")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--jobs-per-client", type=int, default=4, help="jobs of a loop, at least 16 in all")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve-options", default="", help="more options for `faser serve`, separated by blanks")
    parser.add_argument("--name", default="engines")
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser.parse_args()


def described(engine_dir: Path) -> str:
    manifest = EngineManifest.load(engine_dir)
    return f"`{engine_dir.name}`: runtime {manifest.runtime}, weights {manifest.target.weight_format.title}"


def main() -> None:
    args = parse_args()
    asked = asked_prompts(args, args.engine_dirs[0])
    longest = max(len(prompt.token_ids) for prompt in asked.prompts) + args.max_tokens
    meta = environment.describe(args.seed) | {"repeats": args.repeats, "max_tokens": args.max_tokens}
    meta |= {"prompts": asked.as_dict(), "threads": args.threads, "serve_options": args.serve_options}
    meta["engines"] = [described(engine_dir) for engine_dir in args.engine_dirs]
    with ExitStack() as stack:
        contestants = Contestants(args, longest, stack)
        rows = measure_loads(contestants, PLACE, args, asked.prompts, lambda _: contestants.names())
    notes = [f"Through Triton, {args.threads} threads, prefix reuse off: {'; '.join(meta['engines'])}."]
    if args.llama:
        version = LLAMA_SERVER.with_name("llama-version").read_text().strip()
        notes.append(f"llama.cpp ({version}) through its own HTTP server, prompt cache off, given our token ids.")
    notes += [f"{asked.left_out}."] * bool(asked.left_out)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / f"{args.name}.json").write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    (args.output / f"{args.name}.md").write_text(markdown("Engines side by side", meta, notes, rows))
    print(f"wrote {args.output / args.name}.json and .md")


if __name__ == "__main__":
    main()
