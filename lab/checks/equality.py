"""Do tokens depend on how they are decoded? Every policy, mode and exit against plain decoding, over held-out prompts.

Greedy and at temperature 1 with seeds; alone, and in continuous batches of 1-16 with random arrivals, cancellations and
forced preemptions. Early exit needs an engine with calibrated exits (`faser profile`). Float rounding depends on the
shape of a call, so two scores that are almost equal may change order: a difference is explained when the reference's
scores of the two tokens there are a near-tie. The rest of such an answer follows from another prefix: not compared.
`python -m lab.checks.equality` exits with 1 if a difference is not a near-tie.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from faser_backend.core.config import EngineConfig
from faser_backend.core.request import FinishReason, Request
from faser_backend.cpu.noise import GumbelNoise, seed_keys
from faser_backend.lab import environment
from faser_backend.lab.answers import jobs_of
from faser_backend.lab.checks.options import count, make_parser
from faser_backend.lab.checks.target import OpenTarget
from faser_backend.lab.drive import InProcess, write_all
from faser_backend.lab.prompts import DEMO_PROMPTS, interleaved
from faser_backend.lab.steps import StepLog, figures
from faser_backend.lab.tables import Column, markdown_table, write_results
from faser_backend.manifest import EngineManifest
from faser_backend.pipeline.engine import Engine
from faser_backend.serving.compose import build_engine
from faser_backend.serving.model_source import demo_engine_dir
from faser_backend.serving.profile_store import load_knowledge
from faser_backend.text.prompts import read_prompts

COLUMNS = (
    Column("way", "name"), Column("answers", "num_answers"), Column("cancelled", "num_cancelled"),
    Column("preemptions so far", "num_preemptions"), Column("overlapped time", "overlap_share", "{:.0%}"),
    Column("pruned rows", "num_pruned"), Column("tokens compared", "num_tokens"),
    Column("near-ties", "num_near_ties"), Column("largest margin", "largest_margin", "{:.1e}"),
    Column("unexplained", lambda row: len(row["unexplained"])),
)  # fmt: skip
SEED = 20
POLICIES = ("none", "fixed:2", "fixed:4", "fixed:8", "gp-lcb", "goodput", "survival", "faser")
NEAR_TIE = 1e-3  # in units of scaled logits; logits of two call shapes differ by about 1e-5


def ways(*, is_measured: bool, has_exits: bool) -> dict[str, dict[str, str]]:
    """Options of an EngineConfig by name: every policy as it decides by itself, then forced modes and exits."""
    found = {policy: {"policy": policy} for policy in POLICIES}
    for policy in ("fixed:4", "survival") if is_measured else ("fixed:4",):  # `survival` has to know what a mode takes
        for early_exit in ("off", "on") if has_exits else ("off",):
            for mode in ("serial", "run_ahead", "ping_pong"):
                if (early_exit, mode) != ("off", "serial"):
                    name = f"{policy}, {mode}{', early exit' if early_exit == 'on' else ''}"
                    found[name] = {"policy": policy, "pipeline": mode, "early_exit": early_exit}
    return found


@dataclass
class Comparison:
    """Outcome of one way of decoding against the reference. An equality of steps that never overlapped or pruned would
    prove little: overlap_share, num_pruned."""

    name: str
    num_answers: int = 0
    num_tokens: int = 0  # compared
    num_cancelled: int = 0
    num_preemptions: int = 0
    num_pruned: int = 0  # rows that left at an exit
    overlap_share: float = 0.0  # of the time of drafting and verifying, both ran
    num_near_ties: int = 0
    largest_margin: float = 0.0  # among the near-ties
    unexplained: list[str] = field(default_factory=list)


def run_alone(engine: Engine, requests: Iterable[Request]) -> dict[str, list[int]]:
    """Returns the tokens of each request, run alone, one after the other."""
    return {request.request_id: write_all(engine, [request])[request.request_id] for request in requests}


def run_mixed(
    engine: Engine, requests: list[Request], *, seed: int, max_concurrency: int, cancelled_share: float
) -> tuple[dict[str, list[int]], set[str]]:
    """Random arrivals, at most max_concurrency at once; a share is cancelled after a random token.

    Returns all tokens, and the ids that were cancelled.
    """
    rng = np.random.default_rng(seed)
    order = [requests[i] for i in rng.permutation(len(requests))]
    doomed = {r.request_id: int(rng.integers(r.max_tokens)) for r in order if rng.random() < cancelled_share}
    tokens: dict[str, list[int]] = {r.request_id: [] for r in order}
    cancelled: set[str] = set()
    num_open = 0
    while order or engine.has_work:
        while order and num_open < max_concurrency and (num_open == 0 or rng.random() < 0.3):
            engine.submit(order.pop())
            num_open += 1
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
            if output.is_final:
                num_open -= 1
                if output.finish_reason is FinishReason.CANCELLED:
                    cancelled.add(output.request_id)
            elif len(tokens[output.request_id]) > doomed.get(output.request_id, 10**9):
                engine.cancel(output.request_id)
        engine.check_integrity()
    return tokens, cancelled


class Reference:
    """Plain decoding's answers to requests, and a judge of how close any two tokens were."""

    def __init__(self, engine_dir: Path, requests: list[Request]) -> None:
        manifest = EngineManifest.load(engine_dir)
        self._requests = requests
        self._target = OpenTarget(engine_dir, manifest.target.spec.max_context)
        self._noise = GumbelNoise(manifest.target.spec.vocab_size)
        with closing(build_engine(engine_dir, EngineConfig(policy="none", enable_prefix_reuse=False))) as plain:
            self._expected = run_alone(plain, tqdm(requests, "reference", leave=False, disable=None))

    def compare(self, name: str, tokens: dict[str, list[int]], cancelled: set[str]) -> Comparison:
        """A cancelled answer must be a prefix of the expected one, every other answer equal to it."""
        result = Comparison(name, len(self._requests), num_cancelled=len(cancelled))
        for request in self._requests:
            got, wanted = tokens[request.request_id], self._expected[request.request_id]
            result.num_tokens += len(got)
            if request.request_id in cancelled:
                wanted = wanted[: len(got)]
            if got != wanted:
                self._explain(result, request, got, wanted)
        return result

    def _explain(self, result: Comparison, request: Request, got: list[int], wanted: list[int]) -> None:
        index = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), None)
        if index is None:
            result.unexplained.append(f"{request.request_id}: {len(got)} tokens instead of {len(wanted)}")
            return
        margin = self._margin(request, wanted[:index], got[index], wanted[index])
        if margin < NEAR_TIE:
            result.num_near_ties += 1
            result.largest_margin = max(result.largest_margin, margin)
        else:
            result.unexplained.append(f"{request.request_id}: token {index} differs, margin {margin:.2e}")

    def _margin(self, request: Request, prefix: list[int], token_a: int, token_b: int) -> float:
        """|score a - score b| after `prefix`, by the target in one plain call over the whole of it.

        A score is a logit / temperature + noise, or the logit if greedy.
        """
        token_ids = np.concatenate([request.prompt_ids, np.array(prefix, np.int64)])
        scores = self._target.logits(token_ids)[0].astype(np.float64)
        sampling = request.sampling
        if not sampling.is_greedy:
            keys, positions = seed_keys(np.array([sampling.seed], np.uint64)), np.array([token_ids.size])
            scores = scores / sampling.temperature - self._noise.log_exponentials(keys, positions)[0]
        return float(abs(scores[token_a] - scores[token_b]))


def main() -> int:
    parser = make_parser(__doc__, "engine-dir", "output", max_tokens=64, name="equality")
    parser.add_argument("--num-prompts", type=count, default=64)
    parser.add_argument("--ways", default="", help="only ways whose name contains this")
    args = parser.parse_args()
    engine_dir = args.engine_dir or demo_engine_dir()
    knowledge = load_knowledge(engine_dir, EngineManifest.load(engine_dir))
    known = {"is_measured": knowledge.costs.is_measured, "has_exits": bool(knowledge.exits)}
    print(f"of {engine_dir}: {known}; what needs more is left out: run `faser profile`", file=sys.stderr)
    chosen = {name: options for name, options in ways(**known).items() if args.ways in name}
    if not chosen:
        parser.error(f"--ways {args.ways}: no way's name contains this; known are {', '.join(ways(**known))}")
    results = []
    for temperature in (0.0, 1.0):
        requests = make_requests(engine_dir, args.num_prompts, args.max_tokens, temperature)
        reference = Reference(engine_dir, requests)
        for name, options in chosen.items():
            results += check(engine_dir, reference, requests, f"T={temperature:g} {name}", options)
    meta = environment.describe(SEED) | {"num_prompts": args.num_prompts, "max_tokens": args.max_tokens}
    lines = [f"{args.num_prompts} held-out prompts x {args.max_tokens} tokens.", ""]
    lines += markdown_table(COLUMNS, rows := [asdict(result) for result in results])
    write_results(args.output / args.name, "Equality with plain decoding", meta, lines, rows)
    print("\n".join(lines))
    for result in results:
        for line in result.unexplained:
            print(f"{result.name}: {line}")
    return 1 if any(result.unexplained for result in results) else 0


def make_requests(engine_dir: Path, num_prompts: int, max_tokens: int, temperature: float) -> list[Request]:
    jobs = jobs_of(interleaved(read_prompts(DEMO_PROMPTS)), num_prompts, max_tokens, temperature, SEED)
    engines = InProcess(engine_dir)
    return [engines.request(index, job) for index, job in enumerate(jobs)]


def check(
    engine_dir: Path, reference: Reference, requests: list[Request], label: str, options: dict[str, str]
) -> list[Comparison]:
    """Runs one configuration alone, mixed, and mixed with a pool so small that it must preempt."""
    manifest = EngineManifest.load(engine_dir)
    results: list[Comparison] = []
    size = manifest.kv_block_size
    # Room for about two requests: more than one context, far less than 16 of these requests need.
    longest = max(-(-(r.prompt_ids.size + r.max_tokens) // size) for r in requests)
    small_pool = max(-(-manifest.target.spec.max_context // size), 2 * longest + 2)
    for pool, num_blocks in (("", None), (", preempting", small_pool)):
        config = EngineConfig.from_options(max_num_seqs=16, num_kv_blocks=num_blocks, **options)
        with closing(build_engine(engine_dir, config)) as engine:
            log = StepLog(engine, with_laps=False)
            for concurrency in (0, 1, 4, 16):
                if not concurrency and (pool or config.policy == "none"):
                    continue
                log.start()
                if concurrency:
                    name = f"{label} mixed{pool} <= {concurrency}"
                    found = run_mixed(
                        engine, requests, seed=concurrency, max_concurrency=concurrency, cancelled_share=0.15
                    )
                else:
                    name = f"{label} alone"
                    found = run_alone(engine, tqdm(requests, name, leave=False, disable=None)), set()
                steps, result = figures(log, manifest.target.spec.num_layers), reference.compare(name, *found)
                result.num_preemptions = engine.metrics().num_preemptions
                result.num_pruned, result.overlap_share = int(steps["rows_pruned"]), steps["overlap_share"]
                results.append(result)
            metrics = engine.metrics()
            assert metrics.num_free_blocks == metrics.num_blocks, "blocks leaked"
    return results


if __name__ == "__main__":
    sys.exit(main())
