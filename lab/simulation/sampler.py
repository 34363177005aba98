"""`SimSampler`: draws tokens from the acceptance process instead of from logits.

Which model a row of logits belongs to follows from the method that is called. Sample-and-match alone: under
rejection sampling an outcome depends on draws of both models, which no path of outcomes stands for.
"""

from __future__ import annotations

import numpy as np

from faser_backend.core.batch import SamplingRows
from faser_backend.core.errors import ConfigError
from faser_backend.core.ports import DraftTokens
from faser_backend.core.request import SamplingParams
from lab.simulation.acceptance import VOCAB_SIZE, AcceptanceProcess


class SimSampler:
    """core.ports.Sampler for up to max_num_seqs slots; a request's seed picks its text.

    max_output_tokens: of any request; outcomes of one slot are kept in a row of each table.
    """

    def __init__(self, process: AcceptanceProcess, seed: int, max_num_seqs: int, max_output_tokens: int) -> None:
        self._process = process
        self._seed = seed
        # Chains may be drafted behind the last token that a request can use.
        self._num_positions = max_output_tokens + 64
        shape = (max_num_seqs, self._num_positions)
        self._starts = np.zeros(max_num_seqs, np.int64)
        self._tokens = np.zeros(shape, np.int64)
        self._drafted = np.zeros(shape, np.int64)
        self._margins = np.zeros(shape, np.float32)
        self._exit_margins = np.zeros((len(process.exit_aucs), *shape), np.float32)

    def add(
        self,
        slot: int,
        sampling: SamplingParams,
        token_ids: np.ndarray,
        num_prompt_tokens: int,
        end_ids: tuple[int, ...],
    ) -> None:
        path = self._process.path((self._seed, sampling.seed), self._num_positions)
        self._starts[slot] = num_prompt_tokens
        self._tokens[slot], self._drafted[slot], self._margins[slot] = path.tokens, path.drafted, path.margins
        self._exit_margins[:, slot] = path.exit_margins

    def remove(self, slot: int) -> None:
        """Nothing to give back: the next request of the slot overwrites its rows."""

    def append(self, slot: int, tokens: list[int]) -> None:
        """Outcomes do not depend on what was emitted."""

    def sample(self, logits: np.ndarray, rows: SamplingRows) -> np.ndarray:
        return self._tokens[rows.slots, self._offsets(rows)]

    def sample_draft(self, logits: np.ndarray, rows: SamplingRows, num_candidates: int) -> DraftTokens:
        offsets = self._offsets(rows)
        tokens = self._drafted[rows.slots, offsets]
        candidates = None
        if num_candidates:
            candidates = (tokens[:, None] + np.arange(num_candidates)) % VOCAB_SIZE
        return DraftTokens(tokens, self._margins[rows.slots, offsets], candidates)

    def candidate_margins(
        self, scores: np.ndarray, candidates: np.ndarray, rows: SamplingRows, *, with_noise: bool
    ) -> np.ndarray:
        if not scores.size:
            return np.zeros(0, np.float32)
        return self._exit_margins[int(scores[0, 0]), rows.slots, self._offsets(rows)]

    def probabilities(self, logits: np.ndarray, rows: SamplingRows) -> np.ndarray:
        raise ConfigError("acceptance = 'rejection': is not simulated; use 'match'")

    def uniforms(self, rows: SamplingRows, purpose: int, num_steps: np.ndarray) -> np.ndarray:
        raise ConfigError("acceptance = 'rejection': is not simulated; use 'match'")

    def log_probs(self, logits: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        raise ConfigError("log probabilities: are not simulated")

    def to_host(self, logits: np.ndarray) -> np.ndarray:
        raise ConfigError("logits: are not simulated")

    def _offsets(self, rows: SamplingRows) -> np.ndarray:
        return np.minimum(rows.positions - self._starts[rows.slots], self._num_positions - 1)
