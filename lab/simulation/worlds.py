"""Worlds by name: a machine and a pair from the tables, with every assumption in words."""

from __future__ import annotations

from itertools import pairwise

from lab.simulation.acceptance import demo_process
from lab.simulation.engine import World
from lab.simulation.hardware import find_machine, find_pair
from lab.simulation.knowledge import RETENTION
from lab.simulation.roofline import ASSUMPTIONS, kv_capacity_tokens, roofline

ACCEPTANCE = 0.75  # share of positions at which draft and target agree, of pairs that nobody has traced here
EXIT_AUC = 0.75  # of an exit at a fifth of the depth, given the draft's margin


def roofline_world(
    hardware: str, pair_name: str, *, max_context: int, acceptance: float = ACCEPTANCE, exit_auc: float = EXIT_AUC
) -> World:
    """Raises ConfigError for unknown names and for a pair that does not fit the machine's memory."""
    machine, pair = find_machine(hardware), find_pair(pair_name)
    edges = (0, *pair.exit_layers, pair.target.num_layers)
    num_kv_tokens = kv_capacity_tokens(machine, pair)
    process = demo_process("sampled").at_level(acceptance).with_exits((exit_auc,) * len(pair.exit_layers))
    return World(
        name=f"{hardware} + {pair_name}",
        costs=roofline(machine, pair),
        process=process,
        target_layers=tuple(last - first for first, last in pairwise(edges)),
        draft_layers=(pair.draft.num_layers,),
        exits=tuple(enumerate(pair.exit_layers)),
        num_kv_tokens=num_kv_tokens,
        max_context=max_context,
        assumptions=(
            f"{machine.num_gpus} x {machine.flops_per_s / 1e12:.0f} TFLOP/s bf16 dense, "
            f"{machine.bytes_per_s / 1e12:g} TB/s, {machine.memory_bytes / 1e9:.0f} GB (data sheet); "
            f"room for the KV of {num_kv_tokens} tokens of both models.",
            *ASSUMPTIONS,
            f"Draft and target agree at {acceptance:.0%} of positions; margins, memory along a text and differences "
            "between requests are those of the demo pair at temperature 0.8.",
            f"Exit after layer {', '.join(map(str, pair.exit_layers))} of {pair.target.num_layers}: its margin tells "
            f"accepted from rejected tokens with AUC {exit_auc:g} beyond what the draft's margin tells; its threshold "
            f"keeps {RETENTION:.0%} of the tokens that would be accepted.",
            "Sample-and-match; every request decodes to the trace's length; no prompts are shared; clients take no "
            "time.",
        ),
    )
