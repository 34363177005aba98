"""The sampling parameters of slots, in arrays by slot: the part of `add` and `remove` that all samplers share.

Here alone it is decided what counts as greedy and which filters are off. Knows nothing of logits.
"""

from __future__ import annotations

import numpy as np

from faser_backend.core.request import Sampling
from faser_backend.cpu.noise import seed_keys

MIN_TEMPERATURE = 1e-5  # below this a row decodes greedily: scaled logits would overflow float32


class SlotParameters:
    """Parameters of max_num_seqs slots; those of a free slot are greedy ones. Read by rows, written by `add`."""

    def __init__(self, vocab_size: int, max_num_seqs: int) -> None:
        self._vocab_size = vocab_size
        self.is_active = np.zeros(max_num_seqs, np.bool_)
        self.is_random = np.zeros(max_num_seqs, np.bool_)
        self.has_rules = np.zeros(max_num_seqs, np.bool_)  # see logit_rules.py
        self.has_filters = np.zeros(max_num_seqs, np.bool_)  # top-k, top-p or min-p: random slots alone
        self.is_special = np.zeros(max_num_seqs, np.bool_)  # rules or filters
        self.keys = np.zeros(max_num_seqs, np.uint64)
        self.inverse_temperature = np.ones(max_num_seqs, np.float32)  # 1 where greedy
        self.top_k = np.full(max_num_seqs, vocab_size, np.int64)  # V = off
        self.top_p = np.ones(max_num_seqs, np.float64)  # 1 = off
        self.min_p = np.zeros(max_num_seqs, np.float64)  # 0 = off

    def add(self, slot: int, sampling: Sampling, *, has_rules: bool) -> None:
        """Starts a free slot. The parameters are valid (Sampling.validate)."""
        is_random = sampling.temperature >= MIN_TEMPERATURE and sampling.top_k != 1
        top_k = min(sampling.top_k or self._vocab_size, self._vocab_size)
        has_filter = top_k < self._vocab_size or sampling.top_p < 1.0 or sampling.min_p > 0.0
        self.is_active[slot] = True
        self.is_random[slot] = is_random
        self.has_rules[slot] = has_rules
        # Filters keep the largest logit, so a greedy row needs none of them.
        self.has_filters[slot] = is_random and has_filter
        self.is_special[slot] = has_rules or self.has_filters[slot]
        self.keys[slot] = seed_keys(np.array([sampling.seed], np.uint64))[0]
        self.inverse_temperature[slot] = 1.0 / sampling.temperature if is_random else 1.0
        self.top_k[slot] = top_k if is_random else self._vocab_size
        self.top_p[slot] = sampling.top_p if is_random else 1.0
        self.min_p[slot] = sampling.min_p if is_random else 0.0

    def remove(self, slot: int) -> None:
        for flags in (self.is_active, self.is_random, self.has_rules, self.has_filters, self.is_special):
            flags[slot] = False

    def check_free(self, slot: int) -> None:
        if self.is_active[slot]:
            raise ValueError(f"slot {slot} is in use; remove it first")

    def check_active(self, slot: int) -> None:
        if not self.is_active[slot]:
            raise ValueError(f"slot {slot} is not in use")

    def check_integrity(self) -> None:
        for flags in (self.is_random, self.has_rules, self.has_filters, self.is_special):
            assert not (flags & ~self.is_active).any(), "a free slot keeps state"
        assert (self.is_special == (self.has_rules | self.has_filters)).all()
        assert not (self.has_filters & ~self.is_random).any(), "a greedy slot has filters"
