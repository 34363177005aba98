"""A cost model from published figures: every call takes the time of its bytes and its arithmetic, plus a floor.

    rows(T) = floor + ((weight bytes / bandwidth)^p + (2 weights T / arithmetic)^p)^(1/p)      p = SHARPNESS

so a call is bound by memory while it has few rows, by arithmetic when it has many, and bends in between. Keys and
values are read once per call; attention's arithmetic and the head's logits are added. ASSUMPTIONS lists what no data
sheet says; change a figure there, and report and predictions change with it.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from faser_backend.core.decision import WHOLE
from faser_backend.core.errors import ConfigError
from faser_backend.policy.cost_model import DRAFT, TARGET, CallCost, CostModel, Curve, OverheadCost
from lab.simulation.hardware import Machine, Model, Pair

BANDWIDTH_EFFICIENCY = 0.80  # of the memory's peak, streaming weights or KV
MATMUL_EFFICIENCY = 0.65  # of peak arithmetic, activations and norms included
ATTENTION_EFFICIENCY = 0.40  # of peak arithmetic
SHARPNESS = 4.0  # of the bend between memory- and arithmetic-bound
LAYER_FLOOR_US = 12.0  # launches and small kernels of a layer, in a CUDA graph
ALL_REDUCE_US = 8.0  # latency of one all-reduce; two per layer
MEMORY_SHARE = 0.90  # of a GPU, for weights and KV
ACTIVATION_BYTES = 2e9  # per GPU
OVERHEAD = OverheadCost(
    step_us=60.0,
    step_sequence_us=0.5,
    step_row_us=0.1,
    draft_us=15.0,
    draft_sequence_us=0.1,
    exit_us=40.0,
    exit_row_us=0.05,
    lanes_us=20.0,
)
DRAFT_SMS = (32, 48, 64)  # SMs that a split leaves to the draft
# Time of a small drafter's step on a share of the SMs (batch 16, H200): 32, 48, 64 of 132, all.
_DRAFT_SLOWDOWN = np.array([[0.242, 0.364, 0.485, 1.0], [1.33, 1.21, 1.09, 1.0]])
# Bandwidth that a share of the SMs can draw, from the same figures with the floor taken off.
_DRAWN_BANDWIDTH = np.array([[0.0, 0.242, 0.364, 0.485, 0.75, 1.0], [0.0, 0.61, 0.71, 0.85, 1.0, 1.0]])
COMPANY_CALLS, COMPANY_SEQUENCES = 4, 16  # the draft's work beside a verification, on a split
_ROW_KNOTS = np.unique(np.concatenate([[0, 1], 2.0 ** np.arange(3, 14), 1.5 * 2.0 ** np.arange(4, 12)]))

ASSUMPTIONS = (
    f"Memory streams at {BANDWIDTH_EFFICIENCY:.0%} of its peak, matrix products run at {MATMUL_EFFICIENCY:.0%} and "
    f"attention at {ATTENTION_EFFICIENCY:.0%} of peak bf16 arithmetic; the bend between has sharpness {SHARPNESS:g}.",
    f"A layer costs at least {LAYER_FLOOR_US:g} us of launches inside a CUDA graph. Weights and KV are bf16.",
    f"Tensor parallelism adds two all-reduces a layer: {ALL_REDUCE_US:g} us each and the bytes over NVLink. The draft "
    "is not split: every GPU runs all of it.",
    f"Weights, KV and {ACTIVATION_BYTES / 1e9:g} GB of activations fill {MEMORY_SHARE:.0%} of a GPU's memory.",
    f"Around the calls: {OVERHEAD.step_us:g} us a step, {OVERHEAD.step_sequence_us:g} us a sequence, "
    f"{OVERHEAD.step_row_us:g} us a row; {OVERHEAD.draft_us:g} us and {OVERHEAD.draft_sequence_us:g} us a sequence per "
    f"draft call; {OVERHEAD.exit_us:g} us and {OVERHEAD.exit_row_us:g} us a row per exit that looks at scores; "
    f"{OVERHEAD.lanes_us:g} us per overlapped step. Deciding by confidence which chains go on is free. "
    "Prompt chunks run as calls of their own.",
    f"Splits leave {', '.join(map(str, DRAFT_SMS))} SMs to the draft, which then takes 1.33, 1.21, 1.09 times as long "
    "(published for one small drafter on an H200 at batch 16). The target loses arithmetic in proportion, and of "
    "bandwidth what its SMs cannot draw, or what the draft draws beside it when it makes "
    f"{COMPANY_CALLS} calls of {COMPANY_SEQUENCES} sequences per verification.",
)


def roofline(machine: Machine, pair: Pair) -> CostModel:
    """Costs of both models on the whole machine and on splits named "draft SMs/target SMs"."""
    cuts = pair.exit_layers
    segments = {
        (TARGET, WHOLE): _segments(pair.target, machine, cuts, num_ways=machine.num_gpus),
        (DRAFT, WHOLE): _segments(pair.draft, machine, ()),
    }
    for num_sms in DRAFT_SMS:
        draft_share = num_sms / machine.num_sms
        slowdown = float(np.interp(draft_share, *_DRAFT_SLOWDOWN))
        target_share = 1.0 - draft_share
        bandwidth = min(
            float(np.interp(target_share, *_DRAWN_BANDWIDTH)),
            1.0 - _bandwidth_taken(segments, pair.draft, machine, slowdown),
        )
        name = f"{num_sms}/{machine.num_sms - num_sms}"
        segments[TARGET, name] = _segments(
            pair.target, machine, cuts, num_ways=machine.num_gpus, bandwidth=bandwidth, arithmetic=target_share
        )
        segments[DRAFT, name] = _slowed(segments[DRAFT, WHOLE], slowdown)
    return CostModel(segments, OVERHEAD, np.zeros(1), is_measured=True, is_padded=False)


def kv_capacity_tokens(machine: Machine, pair: Pair) -> int:
    """Tokens whose KV, of target and draft, fits beside the weights. Raises ConfigError where the weights do not."""
    ways = machine.num_gpus
    free = ways * (MEMORY_SHARE * machine.memory_bytes - ACTIVATION_BYTES - pair.draft.weight_bytes)
    free -= pair.target.weight_bytes
    if free <= 0:
        raise ConfigError(
            f"hardware = {machine.name!r}: {pair.target.name} and {pair.draft.name} need "
            f"{(pair.target.weight_bytes + ways * pair.draft.weight_bytes) / 1e9:.0f} GB of weights, "
            f"{-free / 1e9:.0f} GB more than {ways} x {machine.memory_bytes / 1e9:.0f} GB have room for"
        )
    return int(free / (pair.target.kv_bytes_per_token + ways * pair.draft.kv_bytes_per_token))


def _segments(
    model: Model,
    machine: Machine,
    cuts: tuple[int, ...],
    *,
    num_ways: int = 1,
    bandwidth: float = 1.0,  # shares of the machine's
    arithmetic: float = 1.0,
) -> tuple[CallCost, ...]:
    bytes_per_us = num_ways * machine.bytes_per_s * BANDWIDTH_EFFICIENCY * bandwidth / 1e6
    peak_per_us = num_ways * machine.flops_per_s * arithmetic / 1e6
    edges = (0, *cuts, model.num_layers)
    costs = []
    for first, last in pairwise(edges):
        layers, is_last = last - first, last == model.num_layers
        head = model.head_weights if is_last else 0
        weights = layers * model.layer_weights
        floor_us, row_us = layers * LAYER_FLOOR_US, 0.0
        if num_ways > 1:
            floor_us += 2 * layers * ALL_REDUCE_US
            row_us = 2 * layers * 2 * model.hidden_size * 2 * (num_ways - 1) / num_ways / machine.link_bytes_per_s * 1e6
        memory_us = 2 * (weights + head) / bytes_per_us
        product_us = _ROW_KNOTS * 2 * weights / (peak_per_us * MATMUL_EFFICIENCY)
        bent = (memory_us**SHARPNESS + product_us**SHARPNESS) ** (1 / SHARPNESS)
        values = floor_us + row_us * _ROW_KNOTS + bent
        slopes = np.diff(values) / np.diff(_ROW_KNOTS)
        kv_width = model.num_kv_heads * model.head_dim
        key_us = layers * 2 * 2 * kv_width / bytes_per_us
        costs.append(
            CallCost(
                Curve.from_slopes(_ROW_KNOTS[:-1], float(values[0]), slopes),
                Curve.from_slopes(np.zeros(1), 0.0, np.array([key_us])),
                cell_key_us=layers * 4 * model.num_heads * model.head_dim / (peak_per_us * ATTENTION_EFFICIENCY),
                # Logits are written once and read twice, in fp32.
                logit_row_us=(2 * head / (peak_per_us * MATMUL_EFFICIENCY) + 12 * model.vocab_size / bytes_per_us)
                * is_last,
            )
        )
    return tuple(costs)


def _bandwidth_taken(
    segments: dict[tuple[str, str], tuple[CallCost, ...]], draft: Model, machine: Machine, slowdown: float
) -> float:
    """Share of the machine's usable bandwidth that the draft's calls take from a verification, on average over it."""
    size = COMPANY_SEQUENCES
    weights_us = 2 * (draft.num_layers * draft.layer_weights + draft.head_weights)
    weights_us /= machine.bytes_per_s * BANDWIDTH_EFFICIENCY / 1e6
    draft_us = slowdown * sum(float(cost.rows(np.array(size))) for cost in segments[DRAFT, WHOLE])
    rows = size * (COMPANY_CALLS + 1)
    verify_us = sum(float(cost.rows(np.array(rows))) for cost in segments[TARGET, WHOLE])
    return weights_us / draft_us * min(1.0, COMPANY_CALLS * draft_us / verify_us)


def _slowed(costs: tuple[CallCost, ...], factor: float) -> tuple[CallCost, ...]:
    def slow(curve: Curve) -> Curve:
        return Curve(curve.knots, curve.values_us * factor)

    return tuple(
        CallCost(
            slow(cost.rows),
            slow(cost.keys),
            cost.sequence_us * factor,
            cost.cell_us * factor,
            cost.cell_key_us * factor,
            cost.logit_row_us * factor,
        )
        for cost in costs
    )
