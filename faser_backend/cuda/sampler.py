"""`TorchSampler`: draws tokens on the device; a few numbers per row reach the host, in one copy.

Rows with rules (penalties, bias, min_tokens, bad words, grammars), which need earlier tokens, are NumpySampler's, on
copies of their logits, which arrive with the others' tokens: a batch waits once. Every call uploads its rows'
parameters (6 words), so the device has no state per slot that the streams of two lanes would have to synchronise.
"""

from __future__ import annotations

import numpy as np
import torch

from faser_backend.core.batch import SamplingRows
from faser_backend.core.errors import Failure
from faser_backend.core.ports import NO_TOKEN, DraftTokens
from faser_backend.core.request import Sampling
from faser_backend.cpu.sampler import NumpySampler, SlotParameters
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
    """The core.ports.Sampler for logits on a device, for up to max_num_seqs slots.

    Everything is queued on the calling thread's current stream, which must have computed the logits. Its rules for
    threads are NumpySampler's.
    """

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        self.device = device
        self.noise = TorchNoise(vocab_size, device)
        self._host = NumpySampler(vocab_size, max_num_seqs)
        self._vocab_size = vocab_size

    @property
    def parameters(self) -> SlotParameters:
        """The slots' parameters; read-only."""
        return self._host.parameters

    @property
    def failures(self) -> dict[int, Failure]:
        """See core.ports.Sampler."""
        return self._host.failures

    def add(
        self, slot: int, sampling: Sampling, token_ids: np.ndarray, num_prompt_tokens: int, end_ids: tuple[int, ...]
    ) -> None:
        self._host.add(slot, sampling, token_ids, num_prompt_tokens, end_ids)

    def remove(self, slot: int) -> None:
        self._host.remove(slot)

    def append(self, slot: int, tokens: list[int]) -> None:
        self._host.append(slot, tokens)

    def forced(self, slot: int) -> list[int]:
        return self._host.forced(slot)

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> np.ndarray:
        """Draws token ids [R] int64 from logits [R, V] float32, which stay unchanged."""
        scores, _ = self._scores(logits, rows)
        drawn, ruled, ruled_logits = self._fetch(draw(scores), logits, rows)
        token_ids = np.where(np.isfinite(drawn.best), drawn.ids[:, 0], NO_TOKEN)
        if ruled.size:
            token_ids[ruled] = self._host.sample(ruled_logits, _taken(rows, ruled))
        return token_ids

    def sample_draft(self, logits: torch.Tensor, rows: SamplingRows, num_candidates: int) -> DraftTokens:
        """See NumpySampler.sample_draft."""
        self.check_num_candidates(num_candidates)
        scores, parameters = self._scores(logits, rows)
        inverse_temperature = None if parameters is None else parameters.inverse_temperature
        packed = draw_draft(scores, inverse_temperature, num_candidates)
        drawn, ruled, ruled_logits = self._fetch(packed, logits, rows)
        drawn.neutralise()
        if ruled.size:
            by_host = self._host.sample_draft(ruled_logits, _taken(rows, ruled), num_candidates)
            drawn.margins[ruled] = by_host.margins
            drawn.ids[ruled] = by_host.tokens[:, None] if by_host.candidates is None else by_host.candidates
        return DraftTokens(drawn.ids[:, 0], drawn.margins, drawn.ids if num_candidates else None)

    def candidate_margins(
        self, scores: torch.Tensor, candidates: np.ndarray, rows: SamplingRows, *, with_noise: bool
    ) -> np.ndarray:
        """See core.ports.Sampler. Computes on the host, because the result would need one copy as well."""
        return self._host.candidate_margins(to_host(scores)[0], candidates, rows, with_noise=with_noise)

    def probabilities(self, logits: torch.Tensor, rows: SamplingRows) -> np.ndarray:
        """See core.ports.Sampler. Copies all of logits [R, V], because rejection sampling draws on the host."""
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
        """Returns scores [R, V] without rules and the rows' parameters; if all are greedy, the logits and None."""
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
        """Returns the draws, the rows [n] with rules and their logits [n, V]. It is the one wait of a call."""
        ruled = np.flatnonzero(self.parameters.has_rules[rows.slots])
        wanted = [packed]
        if ruled.size:
            wanted.append(logits.index_select(0, to_device(ruled, self.device)))
        copies = to_host(*wanted)
        return unpacked_draws(copies[0]), ruled, copies[-1]


def _taken(rows: SamplingRows, index: np.ndarray) -> SamplingRows:
    """Returns the rows index [n] of a batch."""
    return SamplingRows(
        rows.slots[index], rows.positions[index], rows.sequence[index], rows.num_drafted[index], rows.drafted
    )
