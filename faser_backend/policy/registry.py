"""The policies that can be asked for by name (`--policy`), and how their arguments are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any, NamedTuple

from faser_backend.core.config import EngineConfig
from faser_backend.core.decision import WHOLE, Decision, PipelineMode
from faser_backend.core.errors import ConfigError
from faser_backend.core.record import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.policy.baselines import FixedLength, Goodput
from faser_backend.policy.calibration import AcceptanceModel
from faser_backend.policy.early_exit import EarlyExit
from faser_backend.policy.gp_lcb import GpLcb
from faser_backend.policy.speculation import MAX_ADAPTIVE_TOKENS, MAX_DRAFT_TOKENS, Knowledge, SpeculationPolicy
from faser_backend.policy.throughput_policy import ThroughputPolicy

LoadKnowledge = Callable[[], Knowledge]
FILE = "file"  # file:PATH is a policy of the user's own


class NamedPolicy(NamedTuple):
    """How a policy is named and made: from its argument, or from the function that loads the profile."""

    usage: str
    make: Callable[[Any], SpeculationPolicy]
    most: int = 0  # argument, a whole number from 1 on; 0: none


POLICIES = {
    "none": NamedPolicy("none", lambda _: FixedLength(0)),
    "fixed": NamedPolicy("fixed:K", FixedLength, MAX_DRAFT_TOKENS),
    "goodput": NamedPolicy("goodput", lambda load: Goodput(load().costs, MAX_ADAPTIVE_TOKENS)),
    "survival": NamedPolicy("survival", lambda load: ThroughputPolicy(load(), with_modes=False)),
    "gp-lcb": NamedPolicy("gp-lcb", lambda load: GpLcb(load())),
    "faser": NamedPolicy("faser", lambda load: ThroughputPolicy(load(), with_modes=True)),
}


def policy_usages() -> dict[str, str]:
    """Returns the usage of each policy, by name."""
    return {name: policy.usage for name, policy in POLICIES.items()}


def known_policies() -> str:
    return ", ".join([*policy_usages().values(), f"{FILE}:PATH"])


def parse_policy(spec: str, load_knowledge: LoadKnowledge) -> SpeculationPolicy:
    """Builds the policy that `spec` names. Raises ConfigError.

    load_knowledge is called only by policies that weigh time: a missing or stale profile matters to no other.
    """
    name, _, argument = spec.partition(":")
    if name == FILE:
        return _load_file(spec, argument, load_knowledge)
    if name not in POLICIES:
        raise ConfigError(f"policy = {spec!r}: unknown; known are {known_policies()}")
    usage, make, most = POLICIES[name]
    if not most:
        if argument:
            raise ConfigError(f"policy = {spec!r}: takes no argument")
        return make(load_knowledge)
    if not argument.isascii() or not argument.isdigit() or not 1 <= int(argument) <= most:
        raise ConfigError(f"policy = {spec!r}: {usage} needs an integer {usage[-1]} in [1, {most}]")
    return make(int(argument))


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
    is_overlapped = config.pipeline not in {"auto", PipelineMode.SERIAL.value}
    if is_overlapped and split is not None and knowledge.cache_info().currsize and not _is_measured(knowledge(), split):
        raise ConfigError(
            f"pipeline = {config.pipeline!r} with policy = {config.policy!r}: the policy has to know what calls take "
            "on a part of the device; run `faser profile`, or use 'fixed:K'"
        )
    if config.early_exit == "on" and policy.is_drafting and not knowledge().exits:
        missing = "the engine has no profile, which calibrates its exits; run `faser profile`"
        if knowledge().costs.is_measured:
            missing = "its profile calibrated no exit: too few draft tokens were accepted, or too few rejected"
        raise ConfigError(f"early_exit = 'on': {missing}")
    if not policy.is_drafting or (config.early_exit == "auto" and config.pipeline == "auto"):
        return policy
    return ForcedPolicy(policy, config, knowledge, split)


def _is_measured(knowledge: Knowledge, split: str) -> bool:
    return knowledge.costs.is_measured and split in knowledge.costs.partitions


class ForcedPolicy:
    """An ablation: a policy in one mode (`--pipeline`), with every calibrated exit or none (`--early-exit`)."""

    is_drafting = True

    def __init__(
        self, policy: SpeculationPolicy, config: EngineConfig, load_knowledge: LoadKnowledge, split: str | None
    ) -> None:
        self._policy = policy
        self.partitions = policy.partitions
        self._fields: dict[str, Any] = {}  # of a decision, that are always alike
        self._exits = ()
        if config.early_exit == "on":
            self._exits = load_knowledge().exits
            self._acceptance = AcceptanceModel(load_knowledge().margins)
        elif config.early_exit == "off":
            self._fields["pruner"] = None
        if config.pipeline != "auto":
            mode = PipelineMode.SERIAL if split is None else PipelineMode(config.pipeline)
            partition = WHOLE if split is None or mode is PipelineMode.SERIAL else split
            self._fields |= {"mode": mode, "partition": partition}
            self.partitions = (WHOLE, partition)

    def decide(self, sequences: Sequence[RunningSequence], num_prefilling: int = 0) -> Decision:
        fields = self._fields
        if self._exits:
            fields = fields | {"pruner": EarlyExit(self._exits, self._acceptance.curve)}
        return replace(self._policy.decide(sequences, num_prefilling), **fields)

    def observe(self, record: StepRecord) -> None:
        if self._exits:
            self._acceptance.observe(record)
        self._policy.observe(record)
