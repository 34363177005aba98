"""The policies that can be asked for by name (`--policy`), and how their arguments are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location

from faser_backend.config import EngineConfig
from faser_backend.core.decision import WHOLE, Decision, PipelineMode
from faser_backend.core.errors import ConfigError
from faser_backend.core.record import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.core.tree import MAX_TREE_TOKENS
from faser_backend.policy.acceptance_model import AcceptanceModel, sampled_share
from faser_backend.policy.baselines import BestTree, FixedLength, Goodput, NoSpeculation
from faser_backend.policy.early_exit import EarlyExit
from faser_backend.policy.gp_lcb import GpLcb
from faser_backend.policy.price_rule import PriceRule
from faser_backend.policy.speculation import (
    MAX_ADAPTIVE_TOKENS,
    MAX_DRAFT_TOKENS,
    Knowledge,
    SpeculationPolicy,
    drafts_trees,
)

LoadKnowledge = Callable[[], Knowledge]
FILE = "file"  # file:PATH is a policy of the user's own


def parse_policy(spec: str, load_knowledge: LoadKnowledge) -> SpeculationPolicy:
    """Builds the policy that `spec` names. Raises ConfigError.

    load_knowledge is called only by policies that weigh time: a missing or stale profile matters to no other.
    """
    name, _, argument = spec.partition(":")
    if name == FILE:
        return _parse_file(spec, argument, load_knowledge)
    if name not in _POLICIES:
        raise ConfigError(f"policy = {spec!r}: unknown; known are {known_policies()}")
    _, parse = _POLICIES[name]
    return parse(spec, argument, load_knowledge)


def make_policy(config: EngineConfig, load_knowledge: LoadKnowledge, split: str | None) -> SpeculationPolicy:
    """The policy that a configuration asks for, with its ablations. Raises ConfigError.

    split: a partition whose lanes can overlap draft and target; None where the device offers none.
    """
    knowledge = cache(load_knowledge)
    policy = parse_policy(config.policy, knowledge)
    if drafts_trees(policy):
        return _checked_trees(policy, config)
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
    if not policy.is_drafting:
        return policy
    if config.early_exit != "auto":
        policy = ForcedExit(policy, knowledge(), is_on=config.early_exit == "on")
    if config.pipeline != "auto":
        mode = PipelineMode(config.pipeline) if split is not None else PipelineMode.SERIAL
        policy = ForcedMode(policy, mode, split or WHOLE)
    return policy


def _is_measured(knowledge: Knowledge, split: str) -> bool:
    return knowledge.costs.is_measured and split in knowledge.costs.partitions


def _checked_trees(policy: SpeculationPolicy, config: EngineConfig) -> SpeculationPolicy:
    """The policy, or ConfigError for what trees do not go together with."""
    for field, value, is_off, reason in (
        ("acceptance", config.acceptance, "match", "rejection sampling tests chains of draft tokens"),
        ("early_exit", config.early_exit, "auto off", "exits are calibrated for chains of draft tokens"),
        ("pipeline", config.pipeline, "auto serial", "trees are drafted and verified in turn"),
    ):
        if value not in is_off.split():
            allowed = is_off.replace(" ", "' or '")
            raise ConfigError(f"policy = {config.policy!r} with {field} = {value!r}: {reason}; use '{allowed}'")
    return policy


def known_policies() -> str:
    return ", ".join([*policy_usages().values(), f"{FILE}:PATH"])


def policy_usages() -> dict[str, str]:
    """How each policy is asked for, by its name; "name:..." where it takes an argument."""
    return {name: usage for name, (usage, _) in _POLICIES.items()}


def _parse_none(spec: str, argument: str, _: LoadKnowledge) -> SpeculationPolicy:
    _refuse_argument(spec, argument)
    return NoSpeculation()


def _parse_fixed(spec: str, argument: str, _: LoadKnowledge) -> SpeculationPolicy:
    return FixedLength(_checked_count(spec, argument, "fixed:K", MAX_DRAFT_TOKENS))


def _parse_tree(spec: str, argument: str, _: LoadKnowledge) -> SpeculationPolicy:
    return BestTree(_checked_count(spec, argument, "tree:N", MAX_TREE_TOKENS))


def _checked_count(spec: str, argument: str, usage: str, most: int) -> int:
    if not argument.isascii() or not argument.isdigit() or not 1 <= int(argument) <= most:
        raise ConfigError(f"policy = {spec!r}: {usage} needs an integer {usage[-1]} in [1, {most}]")
    return int(argument)


def _parse_goodput(spec: str, argument: str, load_knowledge: LoadKnowledge) -> SpeculationPolicy:
    _refuse_argument(spec, argument)
    return Goodput(load_knowledge().costs, MAX_ADAPTIVE_TOKENS)


def _parse_survival(spec: str, argument: str, load_knowledge: LoadKnowledge) -> SpeculationPolicy:
    _refuse_argument(spec, argument)
    return PriceRule(load_knowledge(), MAX_ADAPTIVE_TOKENS, with_modes=False)


def _parse_faser(spec: str, argument: str, load_knowledge: LoadKnowledge) -> SpeculationPolicy:
    _refuse_argument(spec, argument)
    return PriceRule(load_knowledge(), MAX_ADAPTIVE_TOKENS, with_modes=True)


def _parse_gp_lcb(spec: str, argument: str, load_knowledge: LoadKnowledge) -> SpeculationPolicy:
    _refuse_argument(spec, argument)
    return GpLcb(load_knowledge())


def _parse_file(spec: str, argument: str, load_knowledge: LoadKnowledge) -> SpeculationPolicy:
    """A policy of the user's own: a Python file that defines make_policy(load_knowledge)."""
    module_spec = spec_from_file_location("faser_user_policy", argument) if argument.endswith(".py") else None
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


def _refuse_argument(spec: str, argument: str) -> None:
    if argument:
        raise ConfigError(f"policy = {spec!r}: takes no argument")


_POLICIES: dict[str, tuple[str, Callable[[str, str, LoadKnowledge], SpeculationPolicy]]] = {
    "none": ("none", _parse_none),
    "fixed": ("fixed:K", _parse_fixed),
    "tree": ("tree:N", _parse_tree),
    "goodput": ("goodput", _parse_goodput),
    "survival": ("survival", _parse_survival),
    "gp-lcb": ("gp-lcb", _parse_gp_lcb),
    "faser": ("faser", _parse_faser),
}


class ForcedMode:
    """An ablation: the policy's lengths, always in one mode. partition: where the overlapped modes run."""

    def __init__(self, policy: SpeculationPolicy, mode: PipelineMode, partition: str) -> None:
        self._policy = policy
        self._mode = mode
        self._partition = WHOLE if mode is PipelineMode.SERIAL else partition
        self.is_drafting = policy.is_drafting
        self.partitions = (WHOLE, self._partition)

    def decide(self, sequences: Sequence[RunningSequence], num_coming: int = 0) -> Decision:
        return replace(self._policy.decide(sequences, num_coming), mode=self._mode, partition=self._partition)

    def observe(self, record: StepRecord) -> None:
        self._policy.observe(record)


class ForcedExit:
    """An ablation: the policy with every calibrated exit, or none, in every verification."""

    def __init__(self, policy: SpeculationPolicy, knowledge: Knowledge, *, is_on: bool) -> None:
        self._policy = policy
        self._acceptance = AcceptanceModel(knowledge.margins)
        self._exits = knowledge.exits if is_on else ()
        self.is_drafting = policy.is_drafting
        self.partitions = policy.partitions

    def decide(self, sequences: Sequence[RunningSequence], num_coming: int = 0) -> Decision:
        decision = self._policy.decide(sequences, num_coming)
        if not self._exits:
            return replace(decision, pruner=None)
        return replace(decision, pruner=EarlyExit(self._exits, self._acceptance.curve(sampled_share(sequences))))

    def observe(self, record: StepRecord) -> None:
        self._acceptance.observe(record)
        self._policy.observe(record)
