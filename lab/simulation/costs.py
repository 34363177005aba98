"""A cost model from published figures: every call takes the time of its bytes and its arithmetic, plus a floor.

    rows(T) = floor + ((weight bytes / bandwidth)^p + (2 weights T / arithmetic)^p)^(1/p)      p = SHARPNESS

so a call is bound by memory while it has few rows, by arithmetic when it has many, and bends in between. Keys and
values are read once per call; attention's arithmetic and the head's logits are added. ASSUMPTIONS lists what no data
sheet says; change a figure there, and report and predictions change with it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from faser_backend.core.decision import WHOLE
from faser_backend.core.errors import ConfigError
from faser_backend.core.model import ModelSpec
from faser_backend.lab.shapes import Machine, Pair, head_weights, kv_bytes_per_token, layer_weights, stored_count
from faser_backend.policy.cost_model import DRAFT, TARGET, CallCost, CostModel, Curve, OverheadCost

BANDWIDTH_EFFICIENCY = 0.85  # of the memory's peak, streaming weights or KV: of an 8B model on an H100
MATMUL_EFFICIENCY = 0.65  # of peak arithmetic, activations and norms included
ATTENTION_EFFICIENCY = 0.40  # of peak arithmetic
SHARPNESS = 4.0  # of the bend between memory- and arithmetic-bound
LAYER_FLOOR_US = 34.0  # launches and small kernels of a layer, in a CUDA graph: of a 0.6B model on an H100
ALL_REDUCE_US = 8.0  # latency of one all-reduce; two per layer
MEMORY_SHARE = 0.90  # of a GPU, for weights and KV
ACTIVATION_BYTES = 2e9  # per GPU
# step, its sequences, its rows; draft call, its sequences; exit, its rows; lanes
OVERHEAD = OverheadCost(60.0, 0.5, 0.1, 15.0, 0.1, exit_us=40.0, exit_row_us=0.05, lanes_us=20.0)
DRAFT_SMS = (8, 16, 24, 32, 48, 64)  # SMs that a split leaves to the draft
# Bandwidth that a share of the SMs can draw: from published times of a small drafter's step (batch 16, H200) on 32, 48
# and 64 of 132 SMs, 1.33, 1.21 and 1.09 times that on all, with the floor taken off; in proportion below.
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
    "A prompt's chunk shares the call of a verification if it can.",
    f"Splits leave {', '.join(map(str, DRAFT_SMS))} SMs to the draft. A share of the SMs loses arithmetic in "
    "proportion, and of bandwidth what it cannot draw (published for 32, 48 and 64 of 132 SMs, in proportion below); "
    f"the target also what the draft draws beside it when it makes {COMPANY_CALLS} calls of {COMPANY_SEQUENCES} "
    "sequences per verification.",
)


def roofline(machine: Machine, pair: Pair) -> CostModel:
    """Costs of both models on the whole machine and on splits named "draft SMs/target SMs"."""
    cuts, ways = pair.exit_layers, machine.num_gpus
    segments = {
        (TARGET, WHOLE): _segments(pair.target, machine, cuts, num_ways=ways),
        (DRAFT, WHOLE): _segments(pair.draft, machine, ()),
    }
    for num_sms in DRAFT_SMS:
        name, share = f"{num_sms}/{machine.num_sms - num_sms}", num_sms / machine.num_sms
        drawn = (float(np.interp(each, *_DRAWN_BANDWIDTH)) for each in (share, 1.0 - share))
        draft_bandwidth, target_bandwidth = drawn
        draft = segments[DRAFT, name] = _segments(pair.draft, machine, (), bandwidth=draft_bandwidth, arithmetic=share)
        taken = _bandwidth_taken(draft, segments[TARGET, WHOLE], pair.draft, machine)
        segments[TARGET, name] = _segments(
            pair.target,
            machine,
            cuts,
            num_ways=ways,
            bandwidth=min(target_bandwidth, 1.0 - taken),
            arithmetic=1.0 - share,
        )
    return CostModel(segments, OVERHEAD, np.zeros(1), is_measured=True, is_padded=False, drafts_at_once=True)


def kv_capacity_tokens(machine: Machine, pair: Pair) -> int:
    """Returns how many tokens' KV fits beside the weights. Raises ConfigError if the weights do not fit."""
    ways = machine.num_gpus
    target_bytes, draft_bytes = 2 * stored_count(pair.target), 2 * stored_count(pair.draft)
    free = ways * (MEMORY_SHARE * machine.memory_bytes - ACTIVATION_BYTES - draft_bytes) - target_bytes
    if free <= 0:
        raise ConfigError(
            f"hardware = {machine.name!r}: the models of {pair.name} need "
            f"{(target_bytes + ways * draft_bytes) / 1e9:.0f} GB of weights, "
            f"{-free / 1e9:.0f} GB more than {ways} x {machine.memory_bytes / 1e9:.0f} GB have room for"
        )
    return int(free / (kv_bytes_per_token(pair.target) + ways * kv_bytes_per_token(pair.draft)))


def _segments(
    model: ModelSpec,
    machine: Machine,
    cuts: tuple[int, ...],
    *,
    num_ways: int = 1,
    bandwidth: float = 1.0,  # shares of the machine's
    arithmetic: float = 1.0,
) -> tuple[CallCost, ...]:
    bytes_per_us = num_ways * machine.bytes_per_s * BANDWIDTH_EFFICIENCY * bandwidth / 1e6
    peak_per_us = num_ways * machine.flops_per_s * arithmetic / 1e6
    costs = []
    for first, last in pairwise((0, *cuts, model.num_layers)):
        layers, is_last = last - first, last == model.num_layers
        head = head_weights(model) if is_last else 0
        weights = layers * layer_weights(model)
        floor_us, row_us = layers * LAYER_FLOOR_US, 0.0
        if num_ways > 1:
            floor_us += 2 * layers * ALL_REDUCE_US
            row_us = 2 * layers * 2 * model.hidden_size * 2 * (num_ways - 1) / num_ways / machine.link_bytes_per_s * 1e6
        memory_us = 2 * (weights + head) / bytes_per_us
        product_us = _ROW_KNOTS * 2 * weights / (peak_per_us * MATMUL_EFFICIENCY)
        values = floor_us + row_us * _ROW_KNOTS + (memory_us**SHARPNESS + product_us**SHARPNESS) ** (1 / SHARPNESS)
        slopes = np.diff(values) / np.diff(_ROW_KNOTS)
        key_us = layers * kv_bytes_per_token(replace(model, num_layers=1)) / bytes_per_us
        # Logits are written once and read twice, in fp32.
        logit_us = 2 * head / (peak_per_us * MATMUL_EFFICIENCY) + 12 * model.vocab_size / bytes_per_us
        costs.append(
            CallCost(
                Curve.from_slopes(_ROW_KNOTS[:-1], float(values[0]), slopes),
                Curve.from_slopes(np.zeros(1), 0.0, np.array([key_us])),
                cell_key_us=layers * 4 * model.num_heads * model.head_dim / (peak_per_us * ATTENTION_EFFICIENCY),
                logit_row_us=logit_us * is_last,
            )
        )
    return tuple(costs)


def _bandwidth_taken(
    draft_costs: tuple[CallCost, ...], target_costs: tuple[CallCost, ...], draft: ModelSpec, machine: Machine
) -> float:
    """Share of the machine's usable bandwidth that the draft's calls take from a verification, on average over it."""
    weights_us = 2 * (draft.num_layers * layer_weights(draft) + head_weights(draft))
    weights_us /= machine.bytes_per_s * BANDWIDTH_EFFICIENCY / 1e6
    draft_us = sum(float(cost.rows(np.array(COMPANY_SEQUENCES))) for cost in draft_costs)
    rows = COMPANY_SEQUENCES * (COMPANY_CALLS + 1)
    verify_us = sum(float(cost.rows(np.array(rows))) for cost in target_costs)
    return weights_us / draft_us * min(1.0, COMPANY_CALLS * draft_us / verify_us)
