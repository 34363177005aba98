"""Renders a sequence's answer as tensors: `Reply` collects the engine's outputs and renders responses.

`merge` joins the responses of several sequences. Ranks are TensorRT-LLM's: one dimension, [batch x beams], for text; a
batch and a beam dimension of 1 before all other dimensions. Only requested outputs are rendered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from faser_backend.core.request import NUM_CONTEXT_TOP, EngineOutput, RequestStats
from faser_backend.text.answer_stream import AnswerStream, AnswerToken
from faser_backend.text.tokenizer import TextTokenizer
from faser_backend.triton.contract import ParsedRequest

NamedArray = tuple[str, np.ndarray]
_TIMES = ("arrival", "first_scheduled", "first_token", "last_token")
_PAD_ID = -1  # pads output_ids where sequences of one response differ in length


class Reply:
    """The growing answer of one sequence: `add` takes the engine's outputs, `render` returns the next response."""

    def __init__(self, parsed: ParsedRequest, requested: Iterable[str], tokenizer: TextTokenizer) -> None:
        self.parsed = parsed
        self._requested = frozenset(requested)
        self.stream = AnswerStream(
            tokenizer if "text_output" in self._requested or parsed.stop_strings else None,
            parsed.request.prompt_ids,
            stop_strings=parsed.stop_strings,
            includes_stop=parsed.includes_stop,
        )
        self._tokenizer = tokenizer
        self._new: list[AnswerToken] = []
        self._rest = ""  # text after the last token
        self._sent_text = ""  # all text so far, if the stream accumulates
        self._context_logits: np.ndarray | None = None  # sent with the first and with the last response
        self._are_context_logits_new = False
        self._context_log_probs: np.ndarray | None = None
        self._generation_logits: list[np.ndarray] = []

    @property
    def has_new_output(self) -> bool:
        """Whether a streamed response would hold anything new."""
        if "output_ids" in self._requested:
            return bool(self._new)
        return bool(self._rest) or any(token.text for token in self._new)

    def add(self, output: EngineOutput) -> None:
        tokens, self._rest = self.stream.add(output)
        self._new += tokens
        if output.generation_logits is not None and tokens:
            self._generation_logits.append(output.generation_logits[: len(tokens)])
        if output.context_logits is not None:
            self._context_logits, self._are_context_logits_new = output.context_logits, True
        if output.context_log_probs is not None:
            self._context_log_probs = output.context_log_probs

    def render(self) -> list[NamedArray]:
        """Returns the tensors of the next response: what is new if the request streams, else everything.

        output_ids [1, 1, n] comes first if requested, because clients read tensors by position.
        """
        parsed, arrays = self.parsed, []
        if not self._requested.isdisjoint(("output_ids", "sequence_length")):
            arrays += self._render_ids()
        if "text_output" in self._requested:
            arrays.append(("text_output", np.array([self._next_text().encode()], dtype=object)))
        # Clients of TensorRT-LLM's backend up to v0.13 read these two without requesting them.
        arrays.append(("cum_log_probs", np.array([[self.stream.cum_log_prob]], np.float32)))
        arrays.append(("batch_index", _one(parsed.batch_index)))
        if parsed.request.wants_log_probs:
            arrays.append(("output_log_probs", np.array([[[token.log_prob for token in self._new]]], np.float32)))
        arrays += self._render_logits()
        if parsed.num_sequences > 1:
            arrays.append(("sequence_index", _one(parsed.sequence_index)))
        if parsed.wants_num_input_tokens:
            arrays.append(("num_input_tokens", _one(parsed.request.prompt_ids.size)))
        if parsed.wants_num_output_tokens:
            arrays.append(("num_output_tokens", _one(len(self._new))))  # of this response alone: clients add them up
        if parsed.request.wants_stats and self.stream.stats is not None:
            arrays += _render_stats(self.stream.stats)
            arrays.append(("draft_token_mask", np.array([[[token.is_drafted for token in self._new]]], np.bool_)))
        self._new, self._rest = [], ""
        return [(name, array) for name, array in arrays if name in self._requested]

    def _next_text(self) -> str:
        text = "".join(token.text for token in self._new) + self._rest
        if self.parsed.accumulates_text:
            self._sent_text += text
            text = self._sent_text
        if not (self.parsed.is_streaming or self.parsed.excludes_input):
            given, prompt_ids = self.parsed.prompt_text, self.parsed.request.prompt_ids
            text = (self._tokenizer.decode(prompt_ids.tolist()) if given is None else given) + text
        return text

    def _render_ids(self) -> list[NamedArray]:
        parsed, ids = self.parsed, [token.token_id for token in self._new]
        if not (parsed.is_streaming or parsed.excludes_input):
            ids = [*parsed.request.prompt_ids.tolist(), *ids]
        return [("output_ids", np.array([[ids]], np.int32)), ("sequence_length", _one(len(ids)))]

    def _render_logits(self) -> list[NamedArray]:
        """Renders context_logits [1, num_prompt_tokens, V], and generation_logits [1, 1, n, V] of the new tokens."""
        arrays = []
        if self._context_logits is not None and (self._are_context_logits_new or self.stream.finish_reason is not None):
            arrays.append(("context_logits", self._context_logits[None]))
        if self._context_log_probs is not None:
            own, ids, best = np.split(self._context_log_probs[None], [1, 1 + NUM_CONTEXT_TOP], axis=2)
            arrays.append(("context_log_probs", np.concatenate([own, best], axis=2)))
            arrays.append(("context_top_ids", ids.astype(np.int32)))
        if self._generation_logits:
            arrays.append(("generation_logits", np.concatenate(self._generation_logits)[None, None]))
        self._are_context_logits_new, self._context_log_probs, self._generation_logits = False, None, []
        return arrays


def merge(responses: Sequence[list[NamedArray]], batch_size: int) -> list[NamedArray]:
    """Joins the responses of a request's sequences, ordered by prompt, into one.

    With B prompts of n sequences each, text_output is [B * n], and everything else [B, n, ...], padded to the longest.
    The n sequences of a prompt share context_logits [B, num_prompt_tokens, V].
    """
    num_sequences = len(responses) // batch_size
    by_name = [dict(response) for response in responses]
    merged = []
    for name in by_name[0]:
        arrays = [tensors[name] for tensors in by_name if name in tensors]
        if len(arrays) < len(responses):  # a sequence that stopped before its first token has no logits
            continue
        if name == "text_output":
            merged.append((name, np.concatenate(arrays)))
        elif name in ("context_logits", "context_log_probs", "context_top_ids"):
            merged.append((name, _stack(arrays[::num_sequences], 0.0)))
        else:
            stacked = _stack(arrays, _PAD_ID if name == "output_ids" else 0)
            merged.append((name, stacked.reshape(batch_size, num_sequences, *stacked.shape[2:])))
    return merged


def _stack(arrays: list[np.ndarray], padding: float) -> np.ndarray:
    """Stacks arrays [1, ...] of one rank along the first dimension, each padded at its ends to the longest."""
    stacked = np.full(np.max([array.shape for array in arrays], axis=0), padding, arrays[0].dtype)
    stacked = np.repeat(stacked, len(arrays), axis=0)
    for row, array in zip(stacked, arrays, strict=True):
        row[tuple(slice(size) for size in array.shape[1:])] = array[0]
    return stacked


def _one(value: int, dtype: type = np.int32) -> np.ndarray:
    return np.array([[value]], dtype)


def _render_stats(stats: RequestStats) -> list[NamedArray]:
    arrays = [(f"{name}_time_ns", _one(getattr(stats, f"{name}_ns"), np.int64)) for name in _TIMES]
    rate = stats.num_accepted / stats.num_drafted if stats.num_drafted else 0.0
    return [
        *arrays,
        ("acceptance_rate", np.array([[rate]], np.float32)),
        ("total_accepted_draft_tokens", _one(stats.num_accepted)),
        ("total_draft_tokens", _one(stats.num_drafted)),
        ("total_verification_steps", _one(stats.num_steps)),
        ("kv_cache_alloc_new_blocks", _one(max(0, stats.num_allocated_blocks - stats.num_reused_blocks))),
        ("kv_cache_reused_blocks", _one(stats.num_reused_blocks)),
        ("kv_cache_alloc_total_blocks", _one(stats.num_allocated_blocks)),
    ]
