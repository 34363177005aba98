"""A Llama decoder in plain PyTorch, with the parameter names of the Hugging Face layout.

Small enough to read, quick enough to train on one core; the export stage compares it
with `transformers`. Knows nothing of data or of training.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD_DIM = 64
ROPE_THETA = 10000.0
NORM_EPS = 1e-5
QUERY_BLOCK = 128
CACHE_BLOCK = 64


@dataclass(frozen=True)
class ModelShape:
    """What the demo models differ in; the rest is fixed (head dim 64, tied embeddings)."""

    num_layers: int
    hidden_size: int
    mlp_size: int
    vocab_size: int = 2048

    @property
    def num_heads(self) -> int:
        return self.hidden_size // HEAD_DIM

    @property
    def flops_per_token(self) -> int:
        """Multiply-adds x 2 of one token's forward pass with its head, without attention scores."""
        per_layer = 4 * self.hidden_size**2 + 3 * self.hidden_size * self.mlp_size
        return 2 * (self.num_layers * per_layer + self.vocab_size * self.hidden_size)


TARGET_SHAPE = ModelShape(num_layers=6, hidden_size=256, mlp_size=704)
DRAFT_SHAPE = ModelShape(num_layers=2, hidden_size=128, mlp_size=352)


def rope_table(num_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[num_positions, HEAD_DIM]`, the two halves alike (Llama's layout)."""
    inv_freq = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
    angles = torch.arange(num_positions).double()[:, None] * inv_freq
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `x` `[batch, heads, seq, HEAD_DIM]` by `cos`, `sin` `[seq, HEAD_DIM]`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of each place to itself and those before it; all `[batch, heads, seq, HEAD_DIM]`.

    Blocks of queries leave out most of the masked half. Compiled for a CPU, this is almost three
    times quicker than the fused kernel, forward and backward, which itself took half of a step.
    """
    seq, outputs = q.shape[2], []
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    for start in range(0, seq, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, seq)
        scores = torch.bmm(q[:, start:end], k[:, :end].mT).float() * HEAD_DIM**-0.5
        is_later = torch.arange(end)[None, :] > torch.arange(start, end)[:, None]
        weights = scores.masked_fill(is_later, float("-inf")).softmax(-1).to(v.dtype)
        outputs.append(torch.bmm(weights, v[:, :end]))
    return torch.cat(outputs, dim=1)


class RMSNorm(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, NORM_EPS)


class KVCache:
    """Keys and values of one layer `[batch, heads, capacity, HEAD_DIM]`, which grows by CACHE_BLOCK positions.

    `attend` reads the whole of it and masks what lies ahead: a CPU multiplies contiguous batches only,
    and would otherwise copy the cache at every token.
    """

    def __init__(self, batch: int, heads: int, dtype: torch.dtype):
        self.keys = torch.zeros(batch, heads, 0, HEAD_DIM, dtype=dtype)
        self.values = torch.zeros_like(self.keys)

    def store(self, k: Tensor, v: Tensor, position: int) -> None:
        """Keeps `k`, `v` `[batch, heads, seq, HEAD_DIM]` of the positions from `position` on."""
        end = position + k.shape[2]
        missing = end - self.keys.shape[2]
        if missing > 0:
            num_new = -(-missing // CACHE_BLOCK) * CACHE_BLOCK
            self.keys, self.values = (F.pad(t, (0, 0, 0, num_new)) for t in (self.keys, self.values))
        self.keys[:, :, position:end] = k
        self.values[:, :, position:end] = v

    def attend(self, q: Tensor, num_tokens: int) -> Tensor:
        """Attention of one query per row `[batch, heads, 1, HEAD_DIM]` to the first `num_tokens` positions."""
        k, v = self.keys.flatten(0, 1), self.values.flatten(0, 1)
        scores = torch.bmm(q.flatten(0, 1), k.mT).float() * HEAD_DIM**-0.5
        scores[:, :, num_tokens:] = float("-inf")
        return torch.bmm(scores.softmax(-1).to(v.dtype), v).view_as(q)


class Attention(nn.Module):
    def __init__(self, shape: ModelShape):
        super().__init__()
        self.num_heads = shape.num_heads
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(shape.hidden_size, shape.hidden_size, bias=False))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None, position: int) -> Tensor:
        batch, seq, size = x.shape
        split = (batch, seq, self.num_heads, HEAD_DIM)
        q, k, v = (p(x).view(split).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        if cache is not None:
            cache.store(k, v, position)
        is_next_token = cache is not None and seq == 1
        out = cache.attend(q, position + 1) if is_next_token else causal_attention(q, k, v).view_as(q)
        return self.o_proj(out.transpose(1, 2).reshape(batch, seq, size))


class MLP(nn.Module):
    def __init__(self, shape: ModelShape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.mlp_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.mlp_size, bias=False)
        self.down_proj = nn.Linear(shape.mlp_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, shape: ModelShape):
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None, position: int) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache, position)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, blocks and final norm: the `model.` part of the Hugging Face layout."""

    def __init__(self, shape: ModelShape, max_len: int):
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size)
        cos, sin = rope_table(max_len)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, ids: Tensor, caches: list[KVCache] | None = None, position: int = 0) -> Tensor:
        """Final hidden states `[batch, seq, hidden_size]` of `ids` `[batch, seq]`.

        With `caches`, `ids` are the tokens from `position` on; more than one only at position 0.
        """
        x = self.embed_tokens(ids)
        cos, sin = (t[position : position + ids.shape[1]] for t in (self.cos, self.sin))
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, caches[i] if caches else None, position)
        return self.norm(x)


class Llama(nn.Module):
    """A causal language model whose head is the embedding matrix."""

    def __init__(self, shape: ModelShape, max_len: int = 1024):
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape, max_len)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)

    def forward(self, ids: Tensor, caches: list[KVCache] | None = None, position: int = 0) -> Tensor:
        """Logits `[batch, seq, vocab_size]`."""
        return F.linear(self.model(ids, caches, position), self.model.embed_tokens.weight)

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy (nats per token) of `windows` `[batch, seq + 1]`."""
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())

    def new_caches(self, batch: int, dtype: torch.dtype) -> list[KVCache]:
        return [KVCache(batch, self.shape.num_heads, dtype) for _ in self.model.layers]
