"""The policies that can be asked for by name (`--policy`), and how their arguments are read.

Those to compare with are here too: fixed lengths, none among them, and the best common length by prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import numpy as np

from faser_backend.core.config import EngineConfig
from faser_backend.core.decision import WHOLE, Decision, PipelineMode
from faser_backend.core.errors import ConfigError
from faser_backend.core.record import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.policy.calibration import AcceptanceModel
from faser_backend.policy.cost_model import BatchTimesCache, CostModel
from faser_backend.policy.early_exit import EarlyExit
from faser_backend.policy.gp_lcb import GpLcb
from faser_backend.policy.speculation import MAX_ADAPTIVE_TOKENS, MAX_DRAFT_TOKENS, Knowledge, SpeculationPolicy
from faser_backend.policy.throughput_policy import ThroughputPolicy

PRIOR_ACCEPTANCE = 0.6  # until there is evidence
PRIOR_TESTS = 8.0  # how many tests of its own outweigh what a request inherits from the batch
MAX_ACCEPTANCE = 0.98


class WithoutLearning:
    """A policy that learns nothing and never asks for a part of the device."""

    is_drafting = True
    partitions = (WHOLE,)

    def observe(self, record: StepRecord) -> None:
        """Nothing to learn."""


class FixedLength(WithoutLearning):
    """The same number of draft tokens for every request and step (vLLM's num_speculative_tokens); 0: plain decoding."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.is_drafting = num_draft_tokens > 0

    def decide(self, sequences: Sequence[RunningSequence], num_prefilling: int = 0) -> Decision:
        return Decision([self.num_draft_tokens] * len(sequences))


class Goodput(WithoutLearning):
    """The one length for the whole batch that promises most tokens per time, after SmartSpec (arXiv 2406.14066).

    With a_b the chance that a drafted token of request b is kept, read from the counts that sequences carry, a round
    of K drafted tokens emits (1 - a_b^(K+1)) / (1 - a_b) tokens of b (2211.17192, eq. 1) in a predicted time.
    Length 0 is a candidate like any other, so a batch that does not gain does not speculate.
    """

    def __init__(self, costs: CostModel, max_draft_tokens: int) -> None:
        self._costs, self._times = costs, BatchTimesCache(costs, max_draft_tokens)
        self._lengths = np.arange(max_draft_tokens + 1)  # [K + 1] candidates

    def decide(self, sequences: Sequence[RunningSequence], num_prefilling: int = 0) -> Decision:
        rates = acceptance_rates(sequences)[:, None]
        emitted = ((1.0 - rates ** (self._lengths + 1)) / (1.0 - rates)).sum(axis=0)  # [K + 1] tokens
        size, lengths = len(sequences), self._lengths
        times = self._times.of(size, self._costs.batch_context([each.num_tokens for each in sequences]), WHOLE)
        draft_us = lengths * times.draft_us[size] + (lengths > 0) * times.draft_round_us
        best = int((emitted / (draft_us + times.verify_us[size * lengths])).argmax())
        return Decision([best] * size)


def acceptance_rates(sequences: Sequence[RunningSequence]) -> np.ndarray:
    """Returns the chance [B] that a tested draft token is kept: a request's own counts, shrunk to the batch's."""
    accepted, tested = np.array([sequence.server_acceptance for sequence in sequences], np.float64).T  # [B] each
    shared = (accepted.sum() + PRIOR_ACCEPTANCE * PRIOR_TESTS) / (tested.sum() + PRIOR_TESTS)
    return np.minimum((accepted + shared * PRIOR_TESTS) / (tested + PRIOR_TESTS), MAX_ACCEPTANCE)


LoadKnowledge = Callable[[], Knowledge]
FIXED, FILE = "fixed", "file"  # file:PATH is a policy of the user's own

POLICIES: dict[str, Callable[[LoadKnowledge], SpeculationPolicy]] = {
    "none": lambda load: FixedLength(0),
    "goodput": lambda load: Goodput(load().costs, MAX_ADAPTIVE_TOKENS),
    "survival": lambda load: ThroughputPolicy(load(), with_modes=False),
    "gp-lcb": lambda load: GpLcb(load()),
    "faser": lambda load: ThroughputPolicy(load(), with_modes=True),
}
USAGES = {"none": "none", FIXED: f"{FIXED}:K"} | {name: name for name in POLICIES}
KNOWN_POLICIES = ", ".join([*USAGES.values(), f"{FILE}:PATH"])


def parse_policy(spec: str, load_knowledge: LoadKnowledge) -> SpeculationPolicy:
    """Builds the policy that `spec` names. Raises ConfigError.

    load_knowledge is called only by policies that weigh time: a missing or stale profile matters to no other.
    """
    name, _, argument = spec.partition(":")
    if name == FILE:
        return _load_file(spec, argument, load_knowledge)
    if name == FIXED:
        if not argument.isascii() or not argument.isdigit() or not 1 <= int(argument) <= MAX_DRAFT_TOKENS:
            raise ConfigError(f"policy = {spec!r}: fixed:K needs an integer K in [1, {MAX_DRAFT_TOKENS}]")
        return FixedLength(int(argument))
    if name not in POLICIES:
        raise ConfigError(f"policy = {spec!r}: unknown; known are {KNOWN_POLICIES}")
    if argument:
        raise ConfigError(f"policy = {spec!r}: takes no argument")
    return POLICIES[name](load_knowledge)


def _load_file(spec: str, path: str, load_knowledge: LoadKnowledge) -> SpeculationPolicy:
    """Loads a user's policy: a Python file that defines make_policy(load_knowledge)."""
    module_spec = spec_from_file_location("faser_user_policy", path) if path.endswith(".py") else None
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"policy = {spec!r}: file:PATH needs the path of a Python file")
    module = module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
        return module.make_policy(load_knowledge)
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(f"policy = {spec!r}: {type(error).__name__}: {error}") from error


def make_policy(config: EngineConfig, load_knowledge: LoadKnowledge, split: str | None) -> SpeculationPolicy:
    """Returns the policy of a configuration, with its ablations. Raises ConfigError.

    split: a partition whose lanes can overlap draft and target; None if the device offers none.
    """
    knowledge = cache(load_knowledge)
    policy = parse_policy(config.policy, knowledge)
    if not policy.is_drafting:
        return policy
    fields: dict[str, Any] = {}  # of every decision
    if config.pipeline != "auto":
        mode = PipelineMode.SERIAL if split is None else PipelineMode(config.pipeline)
        partition = WHOLE if split is None or mode is PipelineMode.SERIAL else split
        is_weighing = bool(knowledge.cache_info().currsize)
        if is_weighing and partition != WHOLE and partition not in knowledge().costs.partitions:
            raise ConfigError(
                f"pipeline = {config.pipeline!r} with policy = {config.policy!r}: the policy has to know what calls "
                "take on a part of the device; run `faser profile`, or use 'fixed:K'"
            )
        fields = {"mode": mode, "partition": partition}
    if config.early_exit == "on":
        if not knowledge().exits:
            missing = "the engine has no profile, which calibrates its exits; run `faser profile`"
            if knowledge().costs.is_measured:
                missing = "its profile calibrated no exit: too few draft tokens were accepted, or too few rejected"
            raise ConfigError(f"early_exit = 'on': {missing}")
        fields["pruner"] = EarlyExit(knowledge().exits, AcceptanceModel(knowledge().margins).curves[0])
    elif config.early_exit == "off":
        fields["pruner"] = None
    return ForcedPolicy(policy, fields) if fields else policy


class ForcedPolicy:
    """An ablation: a policy in one mode (`--pipeline`), with every calibrated exit or none (`--early-exit`)."""

    is_drafting = True

    def __init__(self, policy: SpeculationPolicy, fields: dict[str, Any]) -> None:
        """fields: of a decision, that are always alike."""
        self._policy, self._fields = policy, fields
        self.partitions = (WHOLE, fields["partition"]) if "partition" in fields else policy.partitions

    def decide(self, sequences: Sequence[RunningSequence], num_prefilling: int = 0) -> Decision:
        return replace(self._policy.decide(sequences, num_prefilling), **self._fields)

    def observe(self, record: StepRecord) -> None:
        self._policy.observe(record)
