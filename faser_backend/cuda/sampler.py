"""`TorchSampler`: draws tokens on the device; a few numbers per row reach the host, in one copy.

Rows with rules (penalties, bias, min_tokens, bad words, grammars), which need earlier tokens, are NumpySampler's, on
copies of their logits, which arrive with the others' tokens: a batch waits once. Every call uploads its rows'
parameters (6 words), so the device has no state per slot that the streams of two lanes would have to synchronise.
"""

from __future__ import annotations

import numpy as np
import torch

from faser_backend.core.batch import SamplingRows
from faser_backend.core.ports import NO_TOKEN, Behind, DraftTokens
from faser_backend.cpu.sampler import NumpySampler
from faser_backend.cuda.choice import (
    HostDraws,
    RowParameters,
    TorchNoise,
    draw,
    draw_draft,
    packed_parameters,
    perturbed,
    unpacked,
    unpacked_draws,
)
from faser_backend.cuda.transfer import to_device, to_host


class TorchSampler(NumpySampler):
    """The core.ports.Sampler for logits on a device, for up to max_num_seqs slots, whose state is NumpySampler's.

    Everything is queued on the calling thread's current stream, which must have computed the logits. Its rules for
    threads are NumpySampler's.
    """

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device, behind: Behind | None = None) -> None:
        """behind: see to_host."""
        super().__init__(vocab_size, max_num_seqs)
        self.device, self.behind = device, behind
        self.noise = TorchNoise(vocab_size, device)

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> np.ndarray:
        """Draws token ids [R] int64 from logits [R, V] float32, which stay unchanged."""
        scores, _ = self._device_scores(logits, rows)
        drawn, ruled, ruled_logits = self._fetch(draw(scores), logits, rows)
        token_ids = np.where(np.isfinite(drawn.best), drawn.ids[:, 0], NO_TOKEN)
        if ruled.size:
            token_ids[ruled] = super().sample(ruled_logits, _taken(rows, ruled))
        return token_ids

    def sample_draft(self, logits: torch.Tensor, rows: SamplingRows, num_candidates: int) -> DraftTokens:
        """See NumpySampler.sample_draft."""
        self.check_num_candidates(num_candidates)
        scores, parameters = self._device_scores(logits, rows)
        inverse_temperature = None if parameters is None else parameters.inverse_temperature
        packed = draw_draft(scores, inverse_temperature, num_candidates)
        drawn, ruled, ruled_logits = self._fetch(packed, logits, rows)
        drawn.neutralise()
        if ruled.size:
            by_host = super().sample_draft(ruled_logits, _taken(rows, ruled), num_candidates)
            drawn.margins[ruled] = by_host.margins
            drawn.ids[ruled] = by_host.tokens[:, None] if by_host.candidates is None else by_host.candidates
        return DraftTokens(drawn.ids[:, 0], drawn.margins, drawn.ids if num_candidates else None)

    def candidate_margins(
        self, scores: torch.Tensor, candidates: np.ndarray, rows: SamplingRows, *, with_noise: bool
    ) -> np.ndarray:
        """See core.ports.Sampler. Computes on the host, because the result would need one copy as well."""
        return super().candidate_margins(to_host(scores)[0], candidates, rows, with_noise=with_noise)

    def probabilities(self, logits: torch.Tensor, rows: SamplingRows) -> np.ndarray:
        """See core.ports.Sampler. Copies all of logits [R, V], because rejection sampling draws on the host."""
        return super().probabilities(to_host(logits)[0], rows)

    def log_probs(self, logits: torch.Tensor, token_ids: np.ndarray) -> np.ndarray:
        """See core.ports.Sampler; float32 [R]. Computed on the device, one wait per call."""
        chosen = logits.gather(1, to_device(token_ids, self.device)[:, None])[:, 0]
        return to_host(chosen - logits.logsumexp(dim=1))[0]

    def to_host(self, logits: torch.Tensor) -> np.ndarray:
        """See core.ports.Sampler. One wait per call."""
        return to_host(logits.float())[0]

    def _device_scores(self, logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, RowParameters | None]:
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
        copies = to_host(*wanted, behind=self.behind)
        return unpacked_draws(copies[0]), ruled, copies[-1]


def _taken(rows: SamplingRows, index: np.ndarray) -> SamplingRows:
    """Returns the rows index [n] of a batch."""
    return SamplingRows(
        rows.slots[index], rows.positions[index], rows.sequence[index], rows.num_drafted[index], rows.drafted
    )
