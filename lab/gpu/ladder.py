"""The ladders of a GPU check: on the demo pair and on synthetic full-size pairs, the economics formula beside them.

On synthetic pairs acceptance is planted (planted.py): speed and the cost of every decision are real, texts are not.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from engines.build import build_engines
from faser_backend.config import EngineConfig
from faser_backend.device.partition import split_name
from faser_backend.device.runtime import ModelPair
from faser_backend.manifest import EngineManifest
from faser_backend.policy.cost_model import CostModel
from faser_backend.policy.speculation import Knowledge
from faser_backend.serving.runtimes import open_runtime
from lab.contestants import FIXED_REFERENCE, GPU_NAMES, GPU_RIVALS, ORACLE, Contestant, choose_contestants
from lab.gpu.calls import PairCalls
from lab.gpu.costs import CallCosts, with_overhead
from lab.gpu.economics import predicted_round, step_us, with_prediction
from lab.gpu.lent_runtime import LentRuntime
from lab.gpu.pairs import checked_device, opened_pair
from lab.gpu.planted import ACCEPTANCE, EXIT_AUC, planted_process, process_in_words
from lab.gpu.turns import Ladder, Setup, Sizes
from lab.gpu.worker import Context, Result
from lab.places import DEMO
from lab.prompts import DEMO_PROMPTS, read_prompts
from lab.shapes import PAIRS, TINY_PAIR, Pair
from lab.simulation.acceptance import CHAIN_SLACK, Outcomes, demo_process, knowledge_of

PAIR_SIZES = Sizes((64, 1, 8, 32), prompt_tokens=96, output_tokens=48, waves=1, repeats=2, bursty_s=7.0)
LARGE_SIZES = Sizes((24, 1), prompt_tokens=96, output_tokens=32, waves=1, repeats=1, bursty_s=5.0)
DEMO_SIZES = Sizes((32, 1, 8), prompt_tokens=64, output_tokens=64, waves=2, repeats=2, bursty_s=3.0)
TINY_SIZES = Sizes((3, 1), prompt_tokens=9, output_tokens=6, waves=1, repeats=1, bursty_s=0.3)
BEFORE_BURSTY = 2  # closed loads, at most


def named(names: Sequence[str]) -> list[Contestant]:
    """Contestants in this order, the reference first."""
    return choose_contestants(list(names))[0]


def pair_8b(context: Context) -> Result:
    return _synthetic(
        context, TINY_PAIR if context.is_tiny else PAIRS["qwen3-8b/0.6b"], PAIR_SIZES, (*GPU_NAMES, ORACLE)
    )


def pair_32b(context: Context) -> Result:
    return _synthetic(context, TINY_PAIR if context.is_tiny else PAIRS["qwen3-32b/0.6b"], LARGE_SIZES, GPU_RIVALS)


def _synthetic(context: Context, shape: Pair, sizes: Sizes, names: Sequence[str]) -> Result:
    sizes = TINY_SIZES if context.is_tiny else sizes
    process = planted_process(exit_auc=EXIT_AUC if shape.exit_layers else None)
    longest = max(4 * sizes.output_tokens, 24) + CHAIN_SLACK
    outcomes = Outcomes(process, context.seed, shape.max_num_seqs, longest, shape.target.vocab_size)
    planted = {"wanted_acceptance": ACCEPTANCE, "wanted_exit_auc": EXIT_AUC, **process_in_words(process)}
    found: Result = {"pair": shape.name, "is_synthetic": True, "planted": planted}
    with ExitStack() as stack:
        runtime = opened_pair(context, shape, stack, outcomes=outcomes)
        setup = Setup(runtime.models, shape.max_num_seqs, process, sizes, named(names))
        _run(context, runtime, setup, found, stack)
    return found


def demo(context: Context) -> Result:
    """The demo pair on runtime torch: real texts, real acceptance, a model far too small for a GPU."""
    checked_device(context)
    found: Result = {"pair": "demo", "is_synthetic": False}
    with tempfile.TemporaryDirectory(prefix="faser-demo-") as folder, ExitStack() as stack:
        engine_dir = Path(folder) / "torch"
        dtype = "bf16" if context.is_cuda else "fp32"
        build_engines(DEMO / "target", DEMO / "draft", engine_dir, runtime="torch", dtype=dtype)
        manifest = EngineManifest.load(engine_dir)
        real = stack.enter_context(closing(open_runtime(engine_dir, manifest, EngineConfig())))
        names = GPU_RIVALS if context.is_tiny else [name for name in GPU_NAMES if "exit" not in name]
        setup = Setup(
            ModelPair(manifest.target, manifest.draft),
            3 if context.is_tiny else 32,
            demo_process("sampled"),
            TINY_SIZES if context.is_tiny else DEMO_SIZES,
            named(names),
            _held_out_text(engine_dir),
        )
        _run(context, LentRuntime(real), setup, found, stack)
    return found


def _held_out_text(engine_dir: Path) -> np.ndarray:
    """Token ids of the demo pair's held-out prompts, one after the other."""
    from tokenizers import Tokenizer

    text = "\n".join(prompt.text for prompt in read_prompts(DEMO_PROMPTS))
    return np.array(Tokenizer.from_file(str(engine_dir / "tokenizer.json")).encode(text).ids, np.int64)


def _run(context: Context, runtime: LentRuntime, setup: Setup, found: Result, stack: ExitStack) -> None:
    """Costs, then the overhead of a step, then every load; `found` grows and is saved on the way."""
    found["menu"] = runtime.menu.note
    calls = PairCalls.open(runtime, setup.models, setup.max_num_seqs, stack, context.seed)
    costs = CallCosts(context, calls, found["pair"])
    calls.release_slots()
    known: list[Knowledge] = []
    ladder = Ladder(context, runtime, setup, lambda: known[0])
    stack.callback(ladder.close)
    steps = measured_steps(costs.model, ladder, setup.max_num_seqs)
    model = with_overhead(costs.model, steps, costs.exit_us, costs.lanes_us)
    known.append(knowledge_of(setup.process, model, costs.exits))
    found["overhead"] = {name: getattr(model.overhead, name) for name in model.overhead.__slots__}
    found["rows"], found["missing"] = [], ladder.missing
    sizes, split = setup.sizes, next((split_name(*each) for each in runtime.splits), None)
    matches = setup.process.sample(200, 128)[1]
    length = sizes.prompt_tokens + sizes.output_tokens / 2
    for index, num_clients in enumerate(sizes.clients):
        if index == min(BEFORE_BURSTY, len(sizes.clients) - 1):
            rows, found["bursty"] = ladder.bursty(
                [each for each in setup.contestants if each.name in (*GPU_RIVALS, ORACLE)]
            )
            found["rows"] += rows
            context.save(found)
        for row in ladder.closed(setup.contestants, sizes, num_clients):
            name = row["policy"]
            predicted = predicted_round(name, model, split, size=num_clients, context=length, matches=matches)
            found["rows"].append(with_prediction(row, predicted))
        context.save(found)


def measured_steps(costs: CostModel, ladder: Ladder, max_num_seqs: int) -> np.ndarray:
    """[n, 3]: sequences, rows and microseconds beyond the calls, of steps of a fixed length in which every sequence
    drafts."""
    fixed = Contestant(FIXED_REFERENCE, "overhead")
    steps = []
    for num_clients in sorted({1, max(2, max_num_seqs // 4), max_num_seqs}):
        ladder.closed([fixed], Sizes((num_clients,), 16, 24, 1, 1, 0.0), num_clients)
        if fixed.name not in ladder.logs:
            break
        for note in ladder.logs[fixed.name].notes:
            if len(note.sequences) == num_clients and note.num_drafted.min() > 0:
                calls_us = step_us(costs, num_clients, int(note.num_drafted.max()), float(note.num_tokens.mean()))
                spent_us = (note.end_ns - note.start_ns) / 1e3
                steps.append((num_clients, int(note.num_rows.sum()), spent_us - calls_us))
    if not steps:
        raise RuntimeError(f"no step of {fixed.name} could be timed: {'; '.join(ladder.missing) or 'none drafted'}")
    return np.array(steps, np.float64)
