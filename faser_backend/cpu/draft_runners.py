"""Runners of drafts that read hidden states of their target: `LlvmHeadRunner` and `LlvmBlockRunner`.

They implement core.ports.HeadRunner and BlockRunner. The target's runner writes the hidden states to its pool, by block
and offset like keys and values; the draft's pool shares `features` with it. An embedding or a head that the draft does
not have is read from the target's file.
"""

from __future__ import annotations

import numpy as np

from faser_backend.core.batch import RowBatch
from faser_backend.core.errors import ConfigError
from faser_backend.cpu.kernels.layouts import stored_bytes
from faser_backend.cpu.kernels.products import code_of, packed_size, product_kernel
from faser_backend.cpu.runner import LlvmRunner, blocks_and_offsets, check_blocks
from faser_backend.manifest import ModelEngine

JOIN, LAYERS = 0, 1  # segments
SMALL_PRODUCT = 1 << 23  # multiplications; below, one thread: 5 million took 135 us there and 196 on two


class _FeatureRunner(LlvmRunner):
    """Reads features: the target's hidden states of a row's position, side by side."""

    def _open(self, target: ModelEngine | None, compute: str) -> None:
        assert target is not None, "a draft that reads its target needs it"
        self._multiply = product_kernel(code_of(self._formats[0], compute))
        num_features = len(target.spec.feature_layers) * target.spec.hidden_size
        self._most_inputs = max(self._most_inputs, 2 * self.spec.hidden_size, num_features)

    def _joined(self, rows: RowBatch) -> np.ndarray:
        """Returns the features of the rows, joined by `fc`: [T, hidden_size]."""
        blocks, offsets = blocks_and_offsets(rows, self.pool.kv_block_size)
        features = np.concatenate([of_layer[blocks, offsets] for of_layer in self.pool.features.values()], axis=1)
        return self._product(features, "fc", self.spec.hidden_size)

    def _product(self, rows: np.ndarray, name: str, num_outputs: int) -> np.ndarray:
        """Returns rows [T, in] @ a matrix of the file, [T, num_outputs], which the next product overwrites."""
        out = self._workspace.view("product", rows.shape[0], num_outputs)
        num_packed, matrix = packed_size(rows.shape[1], rows.shape[0]), self._weights.offset(name)
        num_threads = 1 if rows.size * num_outputs < SMALL_PRODUCT else self.num_threads
        calls = [
            (thread, num_threads, out, rows, own.view("packed", num_packed), self._weights.data, matrix,
             self._strip(thread))
            for thread, own in enumerate(self._own[:num_threads])
        ]  # fmt: skip
        self._on_all_threads(self._multiply, calls)
        return out


class LlvmHeadRunner(_FeatureRunner):
    """Runs an EAGLE-3 head: a core.ports.HeadRunner."""

    def _open(self, target: ModelEngine | None, compute: str) -> None:
        super()._open(target, compute)
        token_ids = self._weights.tensor("token_ids")
        is_known = token_ids < self.vocab_size  # padding rows of the vocabulary have been cut
        self._token_ids, self._known = token_ids[is_known], slice(None) if is_known.all() else np.flatnonzero(is_known)
        self._is_whole = np.array_equal(token_ids, np.arange(self.vocab_size))
        self._num_logits, self._every = token_ids.size, np.zeros((0, self.vocab_size), np.float32)

    def run_segment(self, segment: int, rows: RowBatch, hidden: np.ndarray | None) -> np.ndarray:
        """Segment 0 joins the features that lie at the rows' positions, [T, hidden_size]; segment 1 gives logits."""
        if segment == JOIN:
            return self._joined(rows)
        assert hidden is not None
        return self.run_layer(rows, hidden)[0]

    def run_layer(self, rows: RowBatch, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        results = self._run(LAYERS, rows, hidden, None)
        return self._over_all_ids(results.logits), results.hidden[: rows.logit_rows.size]

    def _over_all_ids(self, logits: np.ndarray) -> np.ndarray:
        """Expands logits [R, num_logits] to [R, vocab_size], with -inf at ids outside the head's vocabulary."""
        if self._is_whole:
            return logits
        if len(self._every) < len(logits):  # other ids stay -inf from call to call
            self._every = np.full((len(logits), self.vocab_size), -np.inf, np.float32)
        for every, of_row in zip(self._every, logits, strict=False):
            every[self._token_ids] = of_row[self._known]
        return self._every[: len(logits)]

    def _extras(self, thread: int, num_rows: int) -> tuple[np.ndarray, ...]:
        width = self.spec.hidden_size
        embedded = self._workspace.view("embedded", num_rows, width)
        return embedded, self._view_of_rows(thread, num_rows)("both", num_rows, 2 * width)


class LlvmBlockRunner(_FeatureRunner):
    """Runs a block drafter: a core.ports.BlockRunner."""

    def _open(self, target: ModelEngine | None, compute: str) -> None:
        super()._open(target, compute)
        self.block_size, self.mask_id = self.spec.block_size, self.spec.mask_id
        rows = self._embedding_file.tensor("embedding")
        if rows.size < stored_bytes(self.spec.hidden_size, self.mask_id + 1, self._formats[1]):
            raise ConfigError(f"mask_id = {self.mask_id}: behind the last row of the embedding")
        self.num_idle, self.has_bias = self.spec.num_idle, "markov_w1" in self._weights
        if self.has_bias:
            self._of_tokens = self._weights.tensor("markov_w1")  # [V, rank]
        self._confidence = self.token_confidences = None
        if "confidence_weight" in self._weights:
            both = self._weights.tensor("confidence_weight")[0].astype(np.float32)
            self._confidence, weight = np.split(both, [self.spec.hidden_size])
            parts = np.array_split(self._of_tokens, 64)  # only one is in float32 at a time
            self.token_confidences = np.concatenate([part.astype(np.float32) @ weight for part in parts])
            self.token_confidences += self._weights.tensor("confidence_bias")

    def run_block(self, rows: RowBatch) -> tuple[np.ndarray, np.ndarray | None]:
        results = self._run(LAYERS, rows, None, None)
        if self._confidence is None:
            return results.logits, None
        return results.logits, self._normed(results.hidden[: rows.logit_rows.size], "norm") @ self._confidence

    def biased(self, logits: np.ndarray, index: np.ndarray, previous: np.ndarray) -> np.ndarray:
        logits = logits[index]
        if self.has_bias:
            of_tokens = self._of_tokens[previous].astype(np.float32)
            logits += self._product(of_tokens, "markov_w2", self.vocab_size)
        return logits

    def run_segment(self, segment: int, rows: RowBatch, hidden: np.ndarray | None) -> np.ndarray:
        if segment == LAYERS:
            return super().run_segment(LAYERS, rows, None)
        check_blocks(self.pool, rows.block_tables, int((rows.context_lens + rows.rows_per_sequence).max()))
        blocks, offsets = blocks_and_offsets(rows, self.pool.kv_block_size)
        context, width = self._normed(self._joined(rows), "hidden_norm"), self.spec.num_kv_heads * self.spec.head_dim
        for layer in range(self.spec.num_layers):
            for name, pool in (("k", self.pool.keys(layer)), ("v", self.pool.values(layer))):
                heads = self._product(context, f"layers.{layer}.{name}", width)
                if self.spec.has_qkv_bias:
                    heads = heads + self._weights.tensor(f"layers.{layer}.{name}_bias")
                heads = heads.reshape(rows.num_rows, self.spec.num_kv_heads, self.spec.head_dim)
                if name == "k":
                    heads = self._rotated(self._normed(heads, f"layers.{layer}.k_norm"), rows.positions)
                pool[:, blocks, offsets] = heads.swapaxes(0, 1)
        return context

    def _normed(self, rows: np.ndarray, name: str) -> np.ndarray:
        """Returns the RMS norm of rows [..., n] with a weight [n] of the file."""
        scale = 1 / np.sqrt(np.square(rows).mean(axis=-1, keepdims=True) + self._eps)
        return rows * scale * self._weights.tensor(name)

    def _rotated(self, heads: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Applies the rotary embedding to heads [T, num_heads, head_dim] at positions [T]."""
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        low, high = np.split(heads, 2, axis=-1)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
