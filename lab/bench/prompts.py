"""Prompts of wanted lengths, and made-up lengths of requests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from faser_backend.core.errors import ConfigError
from lab.simulation.trace import Trace as RequestTrace

# Made-up lengths are log-normal, on the scale of a small model's context.
MEDIAN_PROMPT_TOKENS, MEDIAN_OUTPUT_TOKENS, LENGTH_SIGMA = 90, 48, 0.7
WINDOW_STRIDE = 977  # tokens between two prompts; a prime, so that wrapped windows begin elsewhere


def make_lengths(count: int, rng: np.random.Generator) -> RequestTrace:
    """Made-up lengths; all arrive at once."""
    prompts, outputs = (
        np.clip(rng.lognormal(math.log(median), LENGTH_SIGMA, count), 4, 4 * median).astype(np.int64)
        for median in (MEDIAN_PROMPT_TOKENS, MEDIAN_OUTPUT_TOKENS)
    )
    return RequestTrace(np.zeros(count), prompts, outputs, "synthetic lengths")


def picked(lengths: RequestTrace, count: int, rng: np.random.Generator) -> RequestTrace:
    """`count` requests of a trace in random order, some of them again where it has fewer; all arrive at once."""
    index = rng.permutation(np.resize(np.arange(len(lengths)), max(count, len(lengths))))[:count]
    return RequestTrace(
        np.zeros(count), lengths.num_prompt_tokens[index], lengths.num_output_tokens[index], lengths.description
    )


class PromptMaker:
    """Prompts of wanted lengths: windows of a text's tokens, turned back into text.

    Tokenised again, a window may differ from its length by a few tokens.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._ids = np.array(tokenizer.encode("\n".join(texts), add_special_tokens=False).ids, np.int64)
        if not self._ids.size:
            raise ConfigError("prompts: no text to cut prompts from")

    def prompt(self, num_tokens: int, index: int) -> str:
        """Window number `index`; windows wrap around."""
        start = index * WINDOW_STRIDE
        return self._tokenizer.decode(self._ids.take(range(start, start + num_tokens), mode="wrap").tolist())
