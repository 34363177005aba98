"""The policies that can be asked for by name (`--policy`), fixed lengths among them, and how arguments are read."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from faser_backend.core.config import EngineConfig
from faser_backend.core.decision import WHOLE, Decision, PipelineMode
from faser_backend.core.errors import ConfigError, blaming
from faser_backend.core.plan import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.policy.calibration import AcceptanceModel
from faser_backend.policy.early_exit import EarlyExit
from faser_backend.policy.gp_lcb import GpLcb
from faser_backend.policy.speculation import MAX_DRAFT_TOKENS, Knowledge, SpeculationPolicy
from faser_backend.policy.throughput_policy import ThroughputPolicy


class FixedLength(SpeculationPolicy):
    """The same number of draft tokens for every request and step (vLLM's num_speculative_tokens); 0: plain decoding."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.is_drafting = num_draft_tokens > 0

    def decide(self, sequences: Sequence[RunningSequence], num_prefilling: int = 0) -> Decision:
        return Decision([self.num_draft_tokens] * len(sequences))


LoadKnowledge = Callable[[], Knowledge]
FIXED, FILE = "fixed", "file"  # file:PATH is a policy of the user's own

POLICIES: dict[str, Callable[[LoadKnowledge], SpeculationPolicy]] = {
    "none": lambda load: FixedLength(0),
    "goodput": lambda load: ThroughputPolicy(load(), with_modes=False, with_trimming=False),
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
    if not path.endswith(".py"):
        raise ConfigError(f"policy = {spec!r}: file:PATH needs the path of a Python file")
    try:
        policy = runpy.run_path(path, run_name="faser_user_policy")["make_policy"](load_knowledge)
        for name in ("decide", "observe"):
            setattr(policy, name, partial(blaming, f"policy = {spec!r}", getattr(policy, name)))
        return policy
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
