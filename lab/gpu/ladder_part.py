"""The ladder on the demo pair and on synthetic full-size pairs, and the economics formula beside it.

On synthetic pairs acceptance is planted (planted.py): speed and the cost of every decision are real, texts are not.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engines.build import build_engines
from faser_backend.config import EngineConfig
from faser_backend.device.partition import split_name
from faser_backend.device.runtime import ModelPair
from faser_backend.manifest import EngineManifest
from faser_backend.policy.speculation import Knowledge
from faser_backend.serving.demo_engine import DEMO_PAIR
from faser_backend.serving.runtimes import open_runtime
from lab.gpu.calls import PairCalls
from lab.gpu.contestants import CONTESTANTS, Contestant, Sizes
from lab.gpu.ladder import Ladder
from lab.gpu.ladder_setup import CallCosts, knowledge
from lab.gpu.lent_runtime import LentRuntime
from lab.gpu.open_pair import checked_device, opened_pair
from lab.gpu.pairs import PAIRS, PairShape
from lab.gpu.planted import ACCEPTANCE, CHAIN_SLACK, EXIT_AUC, Outcomes, planted_process, process_in_words
from lab.gpu.predictions import predicted_round, with_prediction
from lab.gpu.worker import Context, Result
from lab.simulation.acceptance import AcceptanceProcess, demo_process

# Clients in the order of what matters most; the bursty load comes before the last of them.
PAIR_SIZES = Sizes((64, 1, 8, 32), prompt_tokens=96, output_tokens=48, waves=1, repeats=2, bursty_s=7.0)
LARGE_SIZES = Sizes((24, 1), prompt_tokens=96, output_tokens=32, waves=1, repeats=1, bursty_s=5.0)
DEMO_SIZES = Sizes((32, 1, 8), prompt_tokens=64, output_tokens=64, waves=2, repeats=2, bursty_s=3.0)
TINY_SIZES = Sizes((3, 1), prompt_tokens=9, output_tokens=6, waves=1, repeats=1, bursty_s=0.3)
BEFORE_BURSTY = 2  # closed loads, at most
PREFILL_TOKENS = 2048  # of a step: on a GPU a chunk of 256 rows is hardly dearer than one of 32


@dataclass(frozen=True, slots=True)
class Setup:
    """What one ladder is run with."""

    models: ModelPair
    max_num_seqs: int
    process: AcceptanceProcess
    sizes: Sizes
    contestants: Sequence[Contestant]
    text: np.ndarray | None = None  # that prompts are cut from


def pair_8b(context: Context) -> Result:
    return _synthetic(context, PAIRS["tiny" if context.is_tiny else "qwen3-8b/0.6b"], PAIR_SIZES, CONTESTANTS)


def pair_32b(context: Context) -> Result:
    chosen = [each for each in CONTESTANTS if each.is_rival]
    return _synthetic(context, PAIRS["tiny" if context.is_tiny else "qwen3-32b/0.6b"], LARGE_SIZES, chosen)


def _synthetic(context: Context, shape: PairShape, sizes: Sizes, contestants: Sequence[Contestant]) -> Result:
    sizes = TINY_SIZES if context.is_tiny else sizes
    process = planted_process(exit_auc=EXIT_AUC if shape.exit_layer else None)
    longest = max(4 * sizes.output_tokens, 24) + CHAIN_SLACK
    outcomes = Outcomes(process, shape.target.vocab_size, shape.max_num_seqs, longest, context.seed)
    planted = {"wanted_acceptance": ACCEPTANCE, "wanted_exit_auc": EXIT_AUC, **process_in_words(process)}
    found: Result = {"pair": shape.name, "is_synthetic": True, "planted": planted}
    with ExitStack() as stack:
        runtime = opened_pair(context, shape, stack, outcomes=outcomes)
        setup = Setup(runtime.models, shape.max_num_seqs, process, sizes, contestants)
        _run(context, runtime, setup, found, stack)
    return found


def demo(context: Context) -> Result:
    """The demo pair on runtime torch: real texts, real acceptance, a model far too small for a GPU."""
    checked_device(context)
    found: Result = {"pair": "demo", "is_synthetic": False}
    with tempfile.TemporaryDirectory(prefix="faser-demo-") as folder, ExitStack() as stack:
        engine_dir = Path(folder) / "torch"
        dtype = "bf16" if context.is_cuda else "fp32"
        build_engines(DEMO_PAIR / "target", DEMO_PAIR / "draft", engine_dir, runtime="torch", dtype=dtype)
        manifest = EngineManifest.load(engine_dir)
        real = stack.enter_context(closing(open_runtime(engine_dir, manifest, EngineConfig())))
        setup = Setup(
            ModelPair(manifest.target, manifest.draft),
            3 if context.is_tiny else 32,
            demo_process("sampled"),
            TINY_SIZES if context.is_tiny else DEMO_SIZES,
            [each for each in CONTESTANTS if "exit" not in each.note and (each.is_rival or not context.is_tiny)],
            _held_out_text(engine_dir),
        )
        _run(context, LentRuntime(real), setup, found, stack)
    return found


def _held_out_text(engine_dir: Path) -> np.ndarray:
    """Token ids of the demo pair's held-out prompts, one after the other."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(engine_dir / "tokenizer.json"))
    lines = (DEMO_PAIR / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    text = "\n".join(json.loads(line)["prompt"] for line in lines)
    return np.array(tokenizer.encode(text).ids, np.int64)


def _run(context: Context, runtime: LentRuntime, setup: Setup, found: Result, stack: ExitStack) -> None:
    """Costs, then the overhead of a step, then every load; `found` grows and is saved on the way."""
    found["menu"] = runtime.menu.note
    calls = PairCalls.open(runtime, setup.models, setup.max_num_seqs, stack, context.seed)
    costs = CallCosts(context, calls, found["pair"])
    calls.release_slots()
    known: list[Knowledge] = []
    ladder = Ladder(
        context,
        runtime,
        setup.models,
        max_num_seqs=setup.max_num_seqs,
        num_prefill_tokens=PREFILL_TOKENS,
        load_knowledge=lambda: known[0],
        text=setup.text,
    )
    stack.callback(ladder.close)
    known.append(knowledge(costs, ladder, setup.max_num_seqs, setup.process))
    overhead = known[0].costs.overhead
    found["overhead"] = {name: getattr(overhead, name) for name in overhead.__slots__}
    found["rows"], found["missing"] = [], ladder.missing
    _all_loads(context, ladder, setup, known[0], found)


def _all_loads(context: Context, ladder: Ladder, setup: Setup, known: Knowledge, found: Result) -> None:
    sizes, split = setup.sizes, next((split_name(*each) for each in ladder.runtime.splits), None)
    matches = setup.process.sample(200, 128)[1]
    length = sizes.prompt_tokens + sizes.output_tokens / 2
    for index, num_clients in enumerate(sizes.clients):
        if index == min(BEFORE_BURSTY, len(sizes.clients) - 1):
            rivals = [each for each in setup.contestants if each.is_rival]
            rows, found["bursty"] = ladder.bursty(rivals, sizes)
            found["rows"] += rows
            context.save(found)
        for row in ladder.closed(setup.contestants, sizes, num_clients):
            predicted = predicted_round(
                row["policy"], known.costs, split, size=num_clients, context=length, matches=matches
            )
            found["rows"].append(with_prediction(row, predicted))
        context.save(found)
