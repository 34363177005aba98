"""The interfaces through which a step uses a device: runners, sampler, draft loop, clock, lanes; times of phases.

`cpu` and `cuda` implement them on hardware, lab/simulation in virtual time. Letters in shapes: B sequences, T rows of
one call, R rows with logits, V vocabulary, C candidates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from faser_backend.core.batch import RowBatch, SamplingRows
from faser_backend.core.errors import Failure
from faser_backend.core.request import Sampling

# An array on the runner's device: numpy on a CPU, a tensor on a GPU. Runners make them, runners and samplers read them,
# the pipeline passes them on.
DeviceArray: TypeAlias = Any
Verified = TypeVar("Verified")
Proposed = TypeVar("Proposed")


class ModelRunner(Protocol):
    """A compiled decoder with its paged KV pool. Calls are serial per runner."""

    num_segments: int
    num_layers: tuple[int, ...]  # of each segment
    exits: frozenset[int]  # segments that end at an exit layer
    vocab_size: int
    max_mixed_rows: int | None  # of a call that verifies and reads prompts; 0: makes none; None: any number
    max_logit_rows: int | None  # of each sequence of a call, however many there are; None: any number

    def run_segment(self, segment: int, rows: RowBatch, hidden: DeviceArray | None) -> DeviceArray:
        """Runs layers of one segment and writes the rows' K/V into the pool. A GPU's work is merely queued.

        hidden: [T, hidden_size] from the segment before, None for segment 0.
        Returns hidden [T, hidden_size], or logits [R, V] float32 from the last segment. The
        array may be reused by the segment's next call: copy what must live longer.
        """
        ...

    def run_segment_with_scores(
        self, segment: int, rows: RowBatch, hidden: DeviceArray | None, exit_candidates: np.ndarray
    ) -> tuple[DeviceArray, DeviceArray]:
        """As run_segment, for a segment of `exits`. Returns (hidden, scores [T, C]): the logits that the
        head would give exit_candidates [T, C] if the model ended here."""
        ...

    def take_rows(self, hidden: DeviceArray, kept: np.ndarray) -> DeviceArray:
        """Returns the rows `kept` [n] int64, rising, of hidden [T, hidden_size]: the rest of a batch after an exit."""
        ...


class HeadRunner(ModelRunner, Protocol):
    """A draft of one layer that reads hidden states of its target (EAGLE-3).

    Its row at position i holds token i + 1, beside what the target made of position i: that is what segment 0
    gives for rows of positions that the target has run. Further on it is what the head itself made of it.
    """

    def run_layer(self, rows: RowBatch, hidden: DeviceArray) -> tuple[DeviceArray, DeviceArray]:
        """rows beside hidden [T, hidden_size] -> logits [R, V] float32, and hidden [R, hidden_size] to go on from.

        Both may be reused by the next call of the same shape, which may be given this hidden.
        """
        ...


class BlockRunner(ModelRunner, Protocol):
    """A draft that guesses a block of tokens in one call, beside hidden states of its target (DFlash, DSpark).

    Segment 0 writes the draft's keys and values of positions that the target has run; its rows' tokens are not read,
    and what it returns has no meaning. Segment 1 runs blocks: an anchor and masks, which see each other.
    """

    block_size: int  # most rows of a block
    mask_id: int
    num_idle: int  # 0: every row has logits of the next token; 1: masks have those of their own, the anchor none
    has_bias: bool  # logits depend on the token before
    token_confidences: np.ndarray | None  # [V] float32: what the token before adds to a confidence

    def run_block(self, rows: RowBatch) -> tuple[DeviceArray, np.ndarray | None]:
        """Runs segment 1. Returns logits [R, V] float32 without bias, as run_segment does, and what the rows add to
        confidences [R], the log odds of acceptance; None: the draft has none."""
        ...

    def biased(self, logits: DeviceArray, index: np.ndarray, previous: np.ndarray) -> DeviceArray:
        """Returns a copy of rows index [n] of logits [R, V], with the bias of the tokens before, previous [n]."""
        ...


NO_TOKEN = -1  # drawn from unusable logits; it equals no drafted token, so a verification ends with it


class DraftTokens(NamedTuple):
    """One draft token per row, with the draft's confidence."""

    tokens: np.ndarray  # [R] int64
    margins: np.ndarray  # [R] float32 >= 0: lead over the second best, noise included, in logits (times temperature)
    candidates: np.ndarray | None  # [R, C] int64: the best tokens, the chosen one first; None if not asked for


class Sampler(Protocol):
    """Turns logits into tokens; keeps sampling parameters and token counts per slot.

    An error in one slot's rules (penalties, bias, bad words, its grammar) is never raised but noted in `failures`: the
    slot's rows count as unconstrained, and the other rows do not notice. Logits that hold NaN or +inf, or only -inf,
    are unusable: `sample` returns NO_TOKEN for their row, `probabilities` zeros, `sample_draft` margin 0 and any token.
    """

    @property
    def failures(self) -> Mapping[int, Failure]:
        """Failures by slot, until it is removed."""
        ...

    def add(
        self, slot: int, sampling: Sampling, token_ids: np.ndarray, num_prompt_tokens: int, end_ids: tuple[int, ...]
    ) -> None:
        """Starts a slot. token_ids [num_tokens]: prompt and, after a preemption, output so far."""

    def remove(self, slot: int) -> None: ...

    def append(self, slot: int, tokens: list[int]) -> None:
        """Commits emitted tokens to the slot's rules."""

    def has_rules(self, slots: np.ndarray) -> bool:
        """Returns whether a draw for any of these slots [A] depends on the tokens before it."""
        ...

    def forced(self, slot: int) -> list[int]:
        """Returns the tokens that the slot's grammar forces next, free drafts; usually []."""
        ...

    def sample(self, logits: DeviceArray, rows: SamplingRows) -> np.ndarray:
        """logits [R, V] -> token ids [R]: argmax of processed logits + position-keyed Gumbel noise."""
        ...

    def sample_draft(self, logits: DeviceArray, rows: SamplingRows, num_candidates: int) -> DraftTokens:
        """Samples draft tokens with their confidence. num_candidates 0: none are returned."""
        ...

    def candidate_margins(
        self, scores: DeviceArray, candidates: np.ndarray, rows: SamplingRows, *, with_noise: bool
    ) -> np.ndarray:
        """scores [R, C] of token ids candidates [R, C] -> [R]: by how much the first candidate leads the best
        of the others; negative where it trails. In logits, as DraftTokens.margins. with_noise: after the row's
        noise is added, which rejection sampling must not see before it draws."""
        ...

    def probabilities(self, logits: DeviceArray, rows: SamplingRows) -> np.ndarray:
        """logits [R, V] -> processed probabilities [R, V] (one-hot where greedy)."""
        ...

    def uniforms(self, rows: SamplingRows, purpose: int, num_steps: np.ndarray) -> np.ndarray:
        """[R] in (0, 1), keyed by (seed, position, purpose, num_steps [R] = the round)."""
        ...

    def log_probs(self, logits: DeviceArray, token_ids: np.ndarray) -> np.ndarray:
        """Returns log-probabilities [R] of token_ids [R] under softmax(logits [R, V]), before processing."""
        ...

    def to_host(self, logits: DeviceArray) -> np.ndarray:
        """Returns a private copy of logits [R, V], float32."""
        ...


class DraftLoop(Protocol):
    """Drafts chains on a device that picks the tokens itself, without asking the host between."""

    def can_draft(self, slots: np.ndarray) -> bool:
        """Returns whether the device can sample the tokens of all slots [A]."""
        ...

    def draft(
        self, rows: RowBatch, slots: np.ndarray, num_draft_tokens: np.ndarray, num_candidates: int
    ) -> DraftTokens:
        """Extends A sequences by num_draft_tokens [A] >= 1 tokens each.

        rows: what the draft has not seen of each, logits wanted of each last row; the first new token has the position
        behind it, or behind its token where a head's row holds one further on. Tokens, noise and margins are those of
        calls of the runner and of Sampler.sample_draft in turn; K/V of a sequence is written for no position past its
        own num_draft_tokens. Returns tokens [A, K], margins [A, K], candidates [A, K, C] or None, K =
        max(num_draft_tokens); entries past a sequence's own length have no meaning.
        """
        ...


Behind = deque[Callable[[], None]]  # work of the host that waits until the device is busy with a step's calls


def run_behind(behind: Behind | None) -> None:
    """Runs and removes all of it, on any thread."""
    while behind:
        behind.popleft()()


@dataclass(slots=True)
class GraphCounts:
    """Totals of one runtime. Counted where graphs are captured, on one thread at a time."""

    num_graphs: int = 0
    num_failed_captures: int = 0


class Clock(Protocol):
    """Nanoseconds; real or virtual."""

    def now_ns(self) -> int: ...


class Lanes(Protocol):
    """Threads that run two phases at once, each on its own share of the device."""

    def run_both(self, verify: Callable[[], Verified], propose: Callable[[], Proposed]) -> tuple[Verified, Proposed]:
        """Returns both results when both have ended; then raises the first error if there was one."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """A way to share the device: runners of both models, and lanes if the two can run at once."""

    target: ModelRunner
    draft: ModelRunner | None
    lanes: Lanes | None
    draft_loop: DraftLoop | None = None  # of the draft, where the device drafts whole chains by itself


# An overlapped step waits for its lanes, which have their own laps.
MODEL_PHASES = frozenset({"draft_model", "target_model", "prefill_model", "wait"})


class PhaseEvent(NamedTuple):
    """One lap, in nanoseconds of the engine's clock."""

    phase: str
    start_ns: int
    end_ns: int


class PhaseTimes:
    """Nanoseconds per phase since the engine started. `lap` charges the time since the last lap.

    Each lane has its own object. `events`: if set to a list, it collects every lap, for a timeline.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_ns = 0
        self.total_ns: dict[str, int] = {}
        self.events: list[PhaseEvent] | None = None

    def start(self) -> None:
        self._last_ns = self._clock.now_ns()

    def lap(self, phase: str) -> None:
        now = self._clock.now_ns()
        self.total_ns[phase] = self.total_ns.get(phase, 0) + now - self._last_ns
        if self.events is not None:
            self.events.append(PhaseEvent(phase, self._last_ns, now))
        self._last_ns = now
