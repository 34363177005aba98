"""A Writer in torch, for machines whose bfloat16 products are fast: hundreds of rows per call, one call per token.

Conversations begin in cohorts and run one token a step, so that all of a cohort have the same length: attention needs
no masks, and one that ends is overwritten by the last of its cohort. All cohorts share the products of matrices.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from faser_backend.core.errors import ConfigError
from faser_backend.core.model import ModelSpec, rotary_tables
from lab.train_head.begin import TargetTensors
from lab.train_head.conversations import RAREST, Conversation, Opener, State, WritingOptions
from lab.train_head.model import rotated
from lab.train_head.shards import Dialogue

COHORT = 64  # conversations that begin together
CLOSE = 0.3  # logits within this much of the best are computed again in float32: bfloat16 has steps of 1/8 there


RAREST_LOG = math.log(RAREST)
BLOCK = 64  # logits that are compared by their largest one first


@dataclass(slots=True, eq=False)
class Cohort:
    """R conversations, all of which have run n tokens; L is the most that one can have."""

    conversations: list[Conversation]
    keys: Tensor  # [num_layers, COHORT, num_kv_heads, L, head_dim] of bfloat16
    values: Tensor
    states: Tensor  # [COHORT, L, (num_features + 1) * hidden_size] of float16: features, then the last layer's output
    num_run: int = 0

    def remove(self, index: int) -> None:
        """The last one takes the place of one that ended."""
        last = len(self.conversations) - 1
        if index < last:
            for cache in (self.keys, self.values):
                cache[:, index, :, : self.num_run] = cache[:, last, :, : self.num_run]
            self.states[index, : self.num_run] = self.states[last, : self.num_run]
            self.conversations[index] = self.conversations[last]
        self.conversations.pop()


class TorchWriter:
    """A Writer of `num_slots` conversations on the CPU, in bfloat16 with sums and norms in float32."""

    def __init__(
        self,
        target: TargetTensors,
        engine_dir: Path,
        feature_layers: tuple[int, ...],
        options: WritingOptions,
        *,
        seed: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """engine_dir: its tokenizer and chat template are read. Raises ConfigError, RequestError."""
        if (name := variant_of(target.spec)) is not None:
            raise ConfigError(f"target: {name} = {getattr(target.spec, name)}: writer torch runs plain Llamas alone")
        self._spec, self._feature_layers, self._dtype = target.spec, feature_layers, dtype
        self._rng = np.random.default_rng((options.seed, seed))
        self._opener, self._num_slots = Opener(engine_dir, options, self._rng), options.num_slots
        self._layers = [
            {name: w if w.ndim == 1 else w.to(dtype) for name, w in target.layer(index).items()}
            for index in range(target.spec.num_layers)
        ]
        self._embedding, self._norm, self._lm_head = target["embedding"], target["norm"], target.lm_head
        self._rows = self._lm_head.to(dtype)
        self._block = math.gcd(BLOCK, target.spec.vocab_size)
        cos, sin = rotary_tables(target.spec)
        self._cos, self._sin = torch.from_numpy(cos), torch.from_numpy(sin)
        self._cohorts: list[Cohort] = []
        self._logits = torch.empty(0)

    def step(self) -> list[Dialogue]:
        num_free = self._num_slots - sum(len(cohort.conversations) for cohort in self._cohorts)
        if num_free >= min(COHORT, self._num_slots):
            self._cohorts.append(self._open(min(COHORT, num_free)))
        with torch.inference_mode():
            logits, ids = self._run()
        done, first = [], 0
        for cohort in self._cohorts:
            ended = []
            for i, conversation in enumerate(cohort.conversations):
                state = conversation.advance(logits[first + i], ids[first + i], self._rng)
                if state is State.DONE:
                    done.append(self._whole(cohort, i))
                if state is not State.OPEN:
                    ended.append(i)
            first += len(cohort.conversations)
            for i in reversed(ended):
                cohort.remove(i)
        self._cohorts = [cohort for cohort in self._cohorts if cohort.conversations]
        return done

    def close(self) -> None:
        self._cohorts.clear()

    def _open(self, num_rows: int) -> Cohort:
        spec, longest = self._spec, self._opener.max_tokens
        shape = (spec.num_layers, num_rows, spec.num_kv_heads, longest, spec.head_dim)
        width = (len(self._feature_layers) + 1) * spec.hidden_size
        return Cohort(
            [self._opener.open() for _ in range(num_rows)],
            torch.empty(shape, dtype=self._dtype),
            torch.empty(shape, dtype=self._dtype),
            torch.empty(num_rows, longest, width, dtype=torch.float16),
        )

    def _whole(self, cohort: Cohort, index: int) -> Dialogue:
        states, split = cohort.states[index, : cohort.num_run].numpy(), -self._spec.hidden_size
        return cohort.conversations[index].dialogue(states[:, :split].copy(), states[:, split:].copy())

    def _run(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Runs the last token of each conversation. Returns logits and ids of those that may be drawn, by row."""
        counts = [len(cohort.conversations) for cohort in self._cohorts]
        last = [conversation.token_ids[-1] for cohort in self._cohorts for conversation in cohort.conversations]
        places = torch.tensor([cohort.num_run for cohort in self._cohorts]).repeat_interleave(torch.tensor(counts))
        x, made = self._embedding[torch.tensor(last)], []  # [R, d]
        cos, sin = self._cos[places, None], self._sin[places, None]  # [R, 1, head_dim / 2]
        for index, layer in enumerate(self._layers):
            if index in self._feature_layers:
                made.append(x)
            x = x + self._attention(index, self._normed(x, layer["input_norm"]), cos, sin)
            both = self._normed(x, layer["mlp_norm"])
            x = x + linear(silu(linear(both, layer["gate"])) * linear(both, layer["up"]), layer["down"])
        for cohort, states in zip(self._cohorts, torch.cat([*made, x], dim=-1).split(counts), strict=True):
            cohort.states[: len(states), cohort.num_run] = states
            cohort.num_run += 1
        return self._likely(x)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._norm_of(x, weight).to(self._dtype)

    def _norm_of(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, self._spec.rms_eps)

    def _attention(self, index: int, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [R, d] -> [R, d]; keys and values of the rows enter their cohorts."""
        spec, layer = self._spec, self._layers[index]
        num_kv, shared = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
        heads = linear(x, layer["qkv"]).unflatten(1, (-1, spec.head_dim))  # [R, heads, head_dim]
        turned = rotated(heads[:, : spec.num_heads + num_kv], cos, sin)
        mixed, first = torch.empty(x.shape[0], num_kv, shared, spec.head_dim, dtype=self._dtype), 0
        for cohort in self._cohorts:
            size, n = len(cohort.conversations), cohort.num_run + 1
            own = slice(first, first + size)
            keys, values = cohort.keys[index, :size, :, :n], cohort.values[index, :size, :, :n]
            keys[:, :, -1] = turned[own, spec.num_heads :]
            values[:, :, -1] = heads[own, spec.num_heads + num_kv :]
            q = turned[own, : spec.num_heads].unflatten(1, (num_kv, shared))
            mixed[own] = scaled_dot_product_attention(q, keys, values)
            first += size
        return linear(mixed.flatten(1), layer["attention_out"])

    def _likely(self, x: Tensor) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Logits and ids, by row, of all ids that are not too rare to be drawn at temperature 1; x [R, d]."""
        normed = self._norm_of(x, self._norm)
        if self._logits.shape[0] < x.shape[0]:  # fresh memory costs more than the product
            self._logits = torch.empty(x.shape[0], self._rows.shape[0], dtype=self._dtype)
        logits = torch.mm(normed.to(self._dtype), self._rows.T, out=self._logits[: x.shape[0]])
        blocks = logits.unflatten(1, (-1, self._block))  # [R, blocks, block]
        most = blocks.amax(-1)
        best = most.amax(-1)
        floor = best + RAREST_LOG
        rows, places = (most >= floor[:, None]).nonzero(as_tuple=True)  # a search of all logits would take longer
        own = blocks[rows, places]
        picked, columns = (own >= floor[rows, None]).nonzero(as_tuple=True)
        found, rows, ids = own[picked, columns].float(), rows[picked], places[picked] * self._block + columns
        near = (found >= best[rows].float() - CLOSE).nonzero()[:, 0]
        found[near] = (normed[rows[near]] * self._lm_head[ids[near]]).sum(-1)
        ends = np.cumsum(np.bincount(rows.numpy(), minlength=x.shape[0]))[:-1]
        return np.split(found.numpy(), ends), np.split(ids.numpy(), ends)


def variant_of(spec: ModelSpec) -> str | None:
    """What a target has that a plain Llama has not, None for a plain one: others are not run here."""
    variants = ("has_qkv_bias", "has_attention_out_bias", "has_mlp_bias", "has_qk_norm", "num_experts")
    return next((name for name in variants if getattr(spec, name)), None)


def has_fast_halves() -> bool:
    """Whether a product in bfloat16 takes less than half the time of one in float32, as it does with AMX."""
    x, matrix = torch.randn(256, 512), torch.randn(2048, 512)
    return 2 * _fastest(x.bfloat16(), matrix.bfloat16()) < _fastest(x, matrix)


def _fastest(x: Tensor, matrix: Tensor, num_tries: int = 8) -> float:
    times = [time.perf_counter()]
    for _ in range(num_tries):
        linear(x, matrix)
        times.append(time.perf_counter())
    return min(np.diff(times))
