"""Ablations: a policy whose early exit and pipeline mode are set by configuration instead of by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from faser_backend.core.decision import WHOLE, Decision, PipelineMode
from faser_backend.core.record import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.policy.beliefs import Beliefs
from faser_backend.policy.early_exit import EarlyExit
from faser_backend.policy.knowledge import Knowledge
from faser_backend.policy.speculation import MAX_DRAFT_TOKENS, SpeculationPolicy


class ForcedMode:
    """The policy's lengths, always in one mode. partition: where the overlapped modes run."""

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
    """The policy with every calibrated exit, or none, in every verification."""

    def __init__(self, policy: SpeculationPolicy, knowledge: Knowledge, *, is_on: bool) -> None:
        self._policy = policy
        self._beliefs = Beliefs(knowledge.margins, MAX_DRAFT_TOKENS)
        self._pruner = EarlyExit(knowledge.exits, self._beliefs.chances) if is_on else None
        self.is_drafting = policy.is_drafting
        self.partitions = policy.partitions

    def decide(self, sequences: Sequence[RunningSequence], num_coming: int = 0) -> Decision:
        self._beliefs.look_at(sequences)
        return replace(self._policy.decide(sequences, num_coming), pruner=self._pruner)

    def observe(self, record: StepRecord) -> None:
        self._beliefs.observe(record)
        self._policy.observe(record)
