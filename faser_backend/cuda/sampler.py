"""`TorchSampler`: draws tokens on the device; a few numbers per row reach the host, in one copy.

Rows with rules (penalties, bias, min_tokens, bad words, grammars), which need earlier tokens, are NumpySampler's, on
copies of their logits, which arrive with the others' tokens: a batch waits once. Every call uploads its rows'
parameters (6 words), so the device has no state per slot that the streams of two lanes would have to synchronise.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from faser_backend.core.batch import SamplingRows
from faser_backend.core.ports import NO_TOKEN, Behind, DraftTokens
from faser_backend.cpu.noise import GumbelNoise, noise_table
from faser_backend.cpu.sampler import MAX_MARGIN, NumpySampler, SlotParameters
from faser_backend.cuda.buffers import to_device, to_host
from faser_backend.cuda.call_shapes import FILTER_ROWS
from faser_backend.plugins.perturb_logits import perturb_logits

NUM_WORDS = 6  # of a row's parameters
_LOWEST = torch.finfo(torch.float32).min


@lru_cache(maxsize=4)
def _device_table(vocab_size: int, device: torch.device) -> torch.Tensor:
    table, _ = noise_table(vocab_size)
    return torch.tensor(table.view(np.int32), device=device)  # a copy, because the table is read-only


class TorchNoise:
    """Noise rows over a vocabulary on one device. Immutable; all instances of a process share the table."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """Raises ValueError for a vocabulary of more than 2^20 tokens."""
        self._log2_size = noise_table(vocab_size)[1]
        self._table = _device_table(vocab_size, device)
        self._on_host = GumbelNoise(vocab_size)

    def perturbed(
        self,
        logits: torch.Tensor,
        keys: torch.Tensor,
        positions: torch.Tensor,
        scale: torch.Tensor,
        weight: torch.Tensor,
    ) -> torch.Tensor:
        """Returns logits [R, V] float32 * scale [R] - log_exponentials * weight [R], where weight is 1 or 0.

        keys [R] int64 are the bits of cpu.noise.seed_keys; positions [R] int64. A row of weight 0 has no noise, because
        noise is finite.
        """
        if logits.is_cuda:
            out = torch.empty_like(logits)
            perturb_logits(logits, self._table, self._log2_size, keys, positions, scale, weight, out)
            return out
        noise = torch.from_numpy(self._on_host.log_exponentials(keys.numpy().view(np.uint64), positions.numpy()))
        return (logits * scale[:, None]).addcmul_(noise, weight[:, None], value=-1.0)


class RowParameters(NamedTuple):
    """Sampling parameters of R rows, on the device."""

    keys: torch.Tensor  # [R] int64, the bits of cpu.noise.seed_keys
    positions: torch.Tensor  # [R] int64
    inverse_temperature: torch.Tensor  # [R] float32, 1 where greedy
    noise_weight: torch.Tensor  # [R] float32, 1 or, where greedy, 0
    top_k: torch.Tensor  # [R] int64 in [1, V]
    top_p: torch.Tensor  # [R] float64, 1 = off
    min_p_margin: torch.Tensor  # [R] float32, log of min-p; -inf = off

    def take(self, index: torch.Tensor) -> RowParameters:
        """Returns the parameters of rows index [n] int64."""
        return RowParameters(*(column.index_select(0, index) for column in self))


class HostDraws(NamedTuple):
    """Draws of R rows on the host."""

    best: np.ndarray  # [R] float32, the token's score; not finite if the row's logits are unusable
    margins: np.ndarray  # [R] float32; 0 if no runner-up was requested
    ids: np.ndarray  # [R, C] int64, the token first

    def neutralise(self) -> None:
        """Replaces draft tokens of unusable logits by token 0 of margin 0."""
        is_unusable = ~np.isfinite(self.best)
        self.margins[is_unusable], self.ids[is_unusable] = 0, 0


def packed_parameters(known: SlotParameters, slots: np.ndarray, positions: np.ndarray, num_rows: int) -> np.ndarray:
    """Packs rows' parameters for `unpacked`, [NUM_WORDS, num_rows] int64; rows past slots [R] are greedy."""
    words = np.zeros((NUM_WORDS, num_rows), np.int64)
    count = slots.shape[0]
    words[0, :count] = known.keys[slots].view(np.int64)
    words[1, :count] = positions
    inverse_temperature, noise_weight = words[2].view(np.float32).reshape(2, num_rows)
    inverse_temperature[:] = 1.0
    inverse_temperature[:count] = known.inverse_temperature[slots]
    noise_weight[:count] = known.is_random[slots]
    words[3] = 1
    words[3, :count] = known.top_k[slots]
    shares = words[4].view(np.float64)
    shares[:] = 1.0
    shares[:count] = known.top_p[slots]
    margins = words[5].view(np.float32)
    margins[:] = -np.inf
    with np.errstate(divide="ignore"):
        margins[:count] = np.log(known.min_p[slots].astype(np.float32))
    return words


def unpacked(words: torch.Tensor) -> RowParameters:
    """Returns the parameters as views of words [NUM_WORDS, R] int64."""
    inverse_temperature, noise_weight = words[2].view(torch.float32).view(2, -1)
    top_p, min_p_margin = words[4].view(torch.float64), words[5].view(torch.float32)[: words.shape[1]]
    return RowParameters(words[0], words[1], inverse_temperature, noise_weight, words[3], top_p, min_p_margin)


def keep_top(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Applies top-k, then top-p: returns scores [n, V] with -inf below each row's threshold. See cpu.logits.keep_top.

    Sums are in float64, which is exact in any order for float32 weights down to 2^-29 of the largest.
    """
    descending = scores.sort(dim=1, descending=True).values
    limits = descending.gather(1, top_k[:, None] - 1)
    weights = torch.exp(descending - descending[:, :1]).masked_fill(descending < limits, 0.0)
    cumulative = weights.cumsum(dim=1, dtype=torch.float64)
    targets = top_p[:, None] * weights.sum(dim=1, keepdim=True, dtype=torch.float64)
    num_before = (cumulative < targets).sum(dim=1, keepdim=True)
    nucleus = descending.gather(1, num_before.clamp(max=scores.shape[1] - 1))
    thresholds = torch.where(top_p[:, None] < 1.0, torch.maximum(limits, nucleus), limits)
    return scores.masked_fill(scores < thresholds, -torch.inf)


def keep_min_p(scores: torch.Tensor, margins: torch.Tensor) -> torch.Tensor:
    """Returns scores [n, V] with -inf below the row's largest plus margins [n], the log of min-p."""
    return scores.masked_fill(scores < scores.amax(dim=1, keepdim=True) + margins[:, None], -torch.inf)


def perturbed(
    logits: torch.Tensor, rows: RowParameters, noise: TorchNoise, filtered: torch.Tensor | None
) -> torch.Tensor:
    """Returns scores [R, V] whose argmax is each row's token. filtered: [n] int64, the rows with filters, or None."""
    scale = rows.inverse_temperature
    if filtered is not None:
        logits = logits * scale[:, None]
        for some in filtered.split(FILTER_ROWS):  # sorting needs many times the rows' own memory
            chosen = rows.take(some)
            kept = keep_top(logits.index_select(0, some), chosen.top_k, chosen.top_p)
            logits.index_copy_(0, some, keep_min_p(kept, chosen.min_p_margin))
        scale = torch.ones_like(scale)
    return noise.perturbed(logits, rows.keys, rows.positions, scale, rows.noise_weight)


def draw(scores: torch.Tensor) -> torch.Tensor:
    """Returns each row's token of scores [R, V], packed [R, 2] int64 for `unpacked_draws`."""
    best, token = scores.max(dim=1, keepdim=True)
    return _packed(best, torch.zeros_like(best), [token])


def draw_draft(scores: torch.Tensor, inverse_temperature: torch.Tensor | None, num_candidates: int) -> torch.Tensor:
    """Returns tokens, margins and the ids of the num_candidates largest scores, packed [R, 1 + max(C, 1)] int64.

    inverse_temperature: [R], None if all rows are greedy. -inf counts as the lowest number, so ids are distinct.
    """
    values, ids = _largest(scores, max(num_candidates, 2))
    best, second = values[0], values[1]
    leads = best - second if inverse_temperature is None else (best - second) / inverse_temperature[:, None]
    return _packed(best, leads.clamp(max=MAX_MARGIN), ids[: max(num_candidates, 1)])


def unpacked_draws(packed: np.ndarray) -> HostDraws:
    """Unpacks packed [R, 1 + C] int64 on the host."""
    numbers = packed[:, 0].copy().view(np.float32).reshape(-1, 2)
    return HostDraws(numbers[:, 0], numbers[:, 1], packed[:, 1:])


def _largest(scores: torch.Tensor, count: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns the `count` >= 2 largest scores of each row of [R, V], descending: lists of values and ids, [R, 1] each.

    After the first value, -inf counts as the lowest number. Repeated argmax defines where ties go; a sort does not.
    """
    value, token = scores.max(dim=1, keepdim=True)
    values, ids, rest = [value], [token], scores.clamp(min=_LOWEST)
    while len(ids) < count:
        rest.scatter_(1, ids[-1], -torch.inf)
        value, token = rest.max(dim=1, keepdim=True)
        values.append(value)
        ids.append(token)
    return values, ids


def _packed(best: torch.Tensor, margins: torch.Tensor, words: list[torch.Tensor]) -> torch.Tensor:
    """Packs both numbers of a row into one word, before words [R, any]: one tensor is one copy to the host."""
    numbers = torch.cat([best, margins], dim=1).view(torch.int64)
    return torch.cat([numbers, *words], dim=1)


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
