"""This server beside other people's programs: same pair, prompts, lengths and machine, taking turns.

llama.cpp's server with and without its own draft at every load, transformers' generate, plain and
assisted, with one client. Ours is measured end to end through Triton. `scripts/anchors/build_llama.sh`
makes the binary and the GGUF files. Peers that are not installed are named in the report.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from faser_backend.serving.demo_engine import demo_engine_dir
from lab.bench import environment
from lab.bench.peers import LlamaServer, TransformersPeer
from lab.bench.servers import OverTriton
from lab.bench.side_by_side import add_prompt_options, asked_prompts, markdown, measure_loads
from lab.bench.workload import Job, Trace
from lab.places import ANCHORS, DEMO, RESULTS

PLACE = "own servers"
BUILD = ANCHORS


class Contestants:
    """Ours by policy, peers by name; each is asked by `run` and sleeps while the others have their turn."""

    def __init__(
        self, args: argparse.Namespace, engine_dir: Path, num_slots: int, slot_context: int, stack: ExitStack
    ) -> None:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faser-peers-")))
        self._ours = OverTriton(
            engine_dir, args.policies.split(","), logs, ["--no-prefix-reuse", *args.serve_options.split()]
        )
        stack.callback(self._ours.close)
        self._peers: dict[str, LlamaServer | TransformersPeer] = {}
        self.missing = []
        binary, target, draft = (BUILD / name for name in ("llama-server", "target.gguf", "draft.gguf"))
        if binary.exists():
            for name, model in (("llama.cpp plain", None), (f"llama.cpp draft {args.llama_draft}", draft)):
                slots = {"num_slots": num_slots, "slot_context": slot_context}
                server = LlamaServer(binary, target, model, args.llama_draft, threads=args.threads, **slots)
                stack.callback(server.close)
                self._peers[name] = server
        else:
            self.missing.append("llama.cpp (scripts/anchors/build_llama.sh)")
        if find_spec("transformers") and find_spec("torch"):
            self._peers["transformers plain"] = TransformersPeer(args.pair / "target", None, args.threads)
            self._peers["transformers assisted"] = TransformersPeer(
                args.pair / "target", args.pair / "draft", args.threads
            )
        else:
            self.missing.append("transformers (pip install -e .[dev])")
        self.missing += ["vLLM, TensorRT-LLM (they need a GPU)"]

    def names(self, args: argparse.Namespace, num_clients: int) -> list[str]:
        """Who takes part at this load. The first is the reference."""
        peers = [n for n, peer in self._peers.items() if num_clients == 1 or isinstance(peer, LlamaServer)]
        return peers + [f"faser {policy}" for policy in args.policies.split(",")]

    def run(self, policy: str, jobs: list[Job], num_clients: int) -> tuple[list[Trace], float]:
        if policy in self._peers:
            return self._peers[policy].run(jobs, num_clients)
        return self._ours.run(policy.removeprefix("faser "), jobs, num_clients)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="This server beside other people's programs.")
    parser.add_argument("--pair", type=Path, default=DEMO)
    parser.add_argument("--engine-dir", type=Path, help="default: the demo pair's")
    add_prompt_options(parser)
    parser.add_argument("--policies", default="none,fixed:4")
    parser.add_argument("--llama-draft", type=int, default=3, help="draft tokens of llama.cpp")
    parser.add_argument("--clients", default="1,4,16")
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--threads", type=int, default=2, help="of each peer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--jobs-per-client", type=int, default=4, help="jobs of a loop, at least 16 in all")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve-options", default="", help="more options for `faser serve`, separated by blanks")
    parser.add_argument("--name", default="peers")
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    meta = environment.describe(args.seed) | {"repeats": args.repeats, "max_tokens": args.max_tokens}
    meta["serve_options"] = args.serve_options
    meta["peers"] = {name: environment.installed_version(name) for name in ("transformers", "torch")}
    engine_dir = args.engine_dir or demo_engine_dir()
    asked = asked_prompts(args, engine_dir)
    meta["prompts"] = asked.as_dict()
    longest = max(len(prompt.token_ids) for prompt in asked.prompts) + args.max_tokens
    clients = [int(count) for count in args.clients.split(",")]
    with ExitStack() as stack:
        contest = Contestants(args, engine_dir, max(clients), longest, stack)
        rows = measure_loads(contest, PLACE, args, asked.prompts, lambda count: contest.names(args, count))
    version_file = BUILD / "llama-version"
    llama = version_file.read_text().strip() if version_file.exists() else "not built"
    served = f" (`faser serve {args.serve_options}`)" if args.serve_options else ""
    notes = [
        f"Peers: llama.cpp ({llama}) through its own HTTP server, transformers {meta['peers']['transformers']} on "
        f"torch {meta['peers']['torch']} in process, {args.threads} threads each; ours through Triton{served}. "
        "fp32 weights everywhere, prompt caches off. Peers are sent the token ids that our text models make of the "
        "same prompts or messages. "
        "When sampling, answers of peers differ by right: they draw other noise.",
        f"Not measured: {', '.join(contest.missing)}.",
        *[f"{asked.left_out}."] * bool(asked.left_out),
    ]
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / f"{args.name}.json").write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    (args.output / f"{args.name}.md").write_text(markdown("Beside other programs", meta, notes, rows))
    print(f"wrote {args.output / args.name}.json and .md")


if __name__ == "__main__":
    main()
