"""`TorchSampler`: tokens are picked where the logits are; a few numbers per row reach the host, in one copy.

Greedy rows, temperature, top-k, top-p and min-p run on the device. Rows with rules (penalties, bias, min_tokens,
bad words, grammars), which need the tokens so far, are processed by NumpySampler on copies of their logits: these
come along with the others' tokens, so that a batch waits once in any case and plain rows never for rules.
What one row needs of its slot's parameters (6 words) is uploaded with its position in each call. So the device
holds no state of slots, which the streams of two lanes would have to agree on.
"""

from __future__ import annotations

import numpy as np
import torch

from faser_backend.core.batch import SamplingRows
from faser_backend.core.errors import Failure
from faser_backend.core.ports import DraftTokens
from faser_backend.core.request import Sampling
from faser_backend.cpu.sampler import NumpySampler, SlotParameters, check_finite
from faser_backend.cuda.choice import (
    HostDraws,
    RowParameters,
    draw,
    draw_draft,
    packed_parameters,
    perturbed,
    unpacked,
    unpacked_draws,
)
from faser_backend.cuda.noise import TorchNoise
from faser_backend.cuda.transfer import to_device, to_host


class TorchSampler:
    """core.ports.Sampler for logits on a device; up to max_num_seqs slots.

    Everything is queued on the calling thread's current stream, on which the logits have been made. Calls on
    different threads are as safe as NumpySampler's.
    """

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        self.device = device
        self.noise = TorchNoise(vocab_size, device)
        self._host = NumpySampler(vocab_size, max_num_seqs)
        self._vocab_size = vocab_size

    @property
    def parameters(self) -> SlotParameters:
        """For reading."""
        return self._host.parameters

    @property
    def failures(self) -> dict[int, Failure]:
        """See core.ports.Sampler."""
        return self._host.failures

    def add(
        self,
        slot: int,
        sampling: Sampling,
        token_ids: np.ndarray,
        num_prompt_tokens: int,
        end_ids: tuple[int, ...],
    ) -> None:
        self._host.add(slot, sampling, token_ids, num_prompt_tokens, end_ids)

    def remove(self, slot: int) -> None:
        self._host.remove(slot)

    def append(self, slot: int, tokens: list[int]) -> None:
        self._host.append(slot, tokens)

    def forced(self, slot: int) -> list[int]:
        return self._host.forced(slot)

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> np.ndarray:
        """logits [R, V] float32 (unchanged) -> token ids [R] int64.

        Raises FaserError naming a row whose logits hold NaN or +inf, or nothing but -inf.
        """
        scores, _ = self._scores(logits, rows)
        drawn, ruled, ruled_logits = self._fetch(draw(scores), logits, rows)
        token_ids = drawn.ids[:, 0]
        if ruled.size:
            token_ids[ruled] = self._host.sample(ruled_logits, _taken(rows, ruled))
        return token_ids

    def sample_draft(self, logits: torch.Tensor, rows: SamplingRows, num_candidates: int) -> DraftTokens:
        """As NumpySampler.sample_draft; raises as `sample` does."""
        self.check_num_candidates(num_candidates)
        scores, parameters = self._scores(logits, rows)
        inverse_temperature = None if parameters is None else parameters.inverse_temperature
        packed = draw_draft(scores, inverse_temperature, num_candidates)
        drawn, ruled, ruled_logits = self._fetch(packed, logits, rows)
        if ruled.size:
            by_host = self._host.sample_draft(ruled_logits, _taken(rows, ruled), num_candidates)
            drawn.margins[ruled] = by_host.margins
            drawn.ids[ruled] = by_host.tokens[:, None] if by_host.candidates is None else by_host.candidates
        return DraftTokens(drawn.ids[:, 0], drawn.margins, drawn.ids if num_candidates else None)

    def candidate_margins(
        self, scores: torch.Tensor, candidates: np.ndarray, rows: SamplingRows, *, with_noise: bool
    ) -> np.ndarray:
        """See core.ports.Sampler. A pruner on the host needs the answer, and C numbers a row are few: they are
        fetched as they are, in the one copy that the answer would take."""
        return self._host.candidate_margins(to_host(scores)[0], candidates, rows, with_noise=with_noise)

    def probabilities(self, logits: torch.Tensor, rows: SamplingRows) -> np.ndarray:
        """See core.ports.Sampler. Rejection sampling draws on the host: this copies all of logits [R, V]."""
        return self._host.probabilities(to_host(logits)[0], rows)

    def uniforms(self, rows: SamplingRows, purpose: int, num_steps: np.ndarray) -> np.ndarray:
        """See core.ports.Sampler; float64 [R]."""
        return self._host.uniforms(rows, purpose, num_steps)

    def log_probs(self, logits: torch.Tensor, token_ids: np.ndarray) -> np.ndarray:
        """See core.ports.Sampler; float32 [R]. Computed on the device, one wait per call."""
        chosen = logits.gather(1, to_device(token_ids, self.device)[:, None])[:, 0]
        return to_host(chosen - logits.logsumexp(dim=1))[0]

    def to_host(self, logits: torch.Tensor) -> np.ndarray:
        """See core.ports.Sampler. One wait per call."""
        return to_host(logits.float())[0]

    def check_num_candidates(self, num_candidates: int) -> None:
        if not 0 <= num_candidates <= self._vocab_size:
            raise ValueError(f"num_candidates = {num_candidates}: must be in [0, {self._vocab_size}]")

    def check_integrity(self) -> None:
        self._host.check_integrity()

    def _scores(self, logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, RowParameters | None]:
        """Scores [R, V] without rules, and the rows' parameters; logits themselves and None where all are greedy."""
        known, slots = self.parameters, rows.slots
        if not known.is_random[slots].any():
            return logits, None
        words = packed_parameters(known, slots, rows.positions, slots.size)
        parameters = unpacked(to_device(words, self.device))
        filtered = np.flatnonzero(known.has_filters[slots] & ~known.has_rules[slots])
        index = to_device(filtered, self.device) if filtered.size else None
        return perturbed(logits, parameters, self.noise, index), parameters

    def _fetch(
        self, packed: torch.Tensor, logits: torch.Tensor, rows: SamplingRows
    ) -> tuple[HostDraws, np.ndarray, np.ndarray]:
        """The draws, checked; which rows [n] have rules, and their logits [n, V]. The one wait of a call.

        Rows with rules are drawn like the others, in vain but for the check of their logits.
        """
        ruled = np.flatnonzero(self.parameters.has_rules[rows.slots])
        wanted = [packed]
        if ruled.size:
            wanted.append(logits.index_select(0, to_device(ruled, self.device)))
        copies = to_host(*wanted)
        drawn = unpacked_draws(copies[0])
        check_finite(drawn.best, rows, None)
        return drawn, ruled, copies[-1]


def _taken(rows: SamplingRows, index: np.ndarray) -> SamplingRows:
    """Rows index [n] of a batch."""
    return SamplingRows(
        rows.slots[index], rows.positions[index], rows.sequence[index], rows.num_drafted[index], rows.drafted
    )
