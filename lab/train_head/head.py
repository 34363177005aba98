"""An EAGLE-3 head in torch (arXiv 2503.01840): one decoder layer over [embedding, states of the token before].

Parameters have the published names, so a state dict is a checkpoint.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from faser_backend.core.model import ModelSpec, rotary_tables


class Norm(nn.RMSNorm):
    """Root-mean-square norm, computed in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class Projections(nn.Module):
    """The matrices of attention over rows of `width` numbers."""

    def __init__(self, spec: ModelSpec, width: int) -> None:
        super().__init__()
        self._groups, self._head_dim = spec.num_heads // spec.num_kv_heads, spec.head_dim
        num_q, num_kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = nn.Linear(width, num_q, bias=False)
        self.k_proj = nn.Linear(width, num_kv, bias=False)
        self.v_proj = nn.Linear(width, num_kv, bias=False)
        self.o_proj = nn.Linear(num_q, spec.hidden_size, bias=False)

    def split(self, x: Tensor) -> Tensor:
        """Reshapes [B, n, heads * head_dim] to [B, heads, n, head_dim]."""
        return x.unflatten(2, (-1, self._head_dim)).transpose(1, 2)

    def repeated(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Repeats keys or values [B, kv_heads, n, head_dim] for each query head."""
        return tuple(x.repeat_interleave(self._groups, dim=1) for x in rows)


class Attention(Projections):
    """Attention of several steps at once: step k of a chain sees the target's states before the chain began, and the
    chain's own earlier steps."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, 2 * spec.hidden_size)

    def forward(self, both: Tensor, cos: Tensor, sin: Tensor, earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Maps both [B, n, 2 d] to [B, n, d]. Row i of step k belongs to the chain that begins after row i of step 1.

        earlier: keys and values of the steps before, [B, H, n, head_dim]; this step's are appended.
        """
        q, k = (rotated(self.split(project(both)), cos, sin) for project in (self.q_proj, self.k_proj))
        k, v = self.repeated(k, self.split(self.v_proj(both)))
        earlier.append((k, v))
        first_k, first_v = earlier[0]
        n, scale = both.shape[1], self._head_dim**-0.5
        future = torch.ones(n, n, dtype=torch.bool, device=both.device).triu(1)
        scores = (q @ first_k.transpose(2, 3)).float().masked_fill(future, float("-inf"))  # [B, H, n, n]
        own = [(q * k_j).sum(-1, keepdim=True).float() for k_j, _ in earlier[1:]]  # [B, H, n, 1] each
        shares = (torch.cat([scores, *own], dim=-1) * scale).softmax(-1).to(v.dtype)
        mixed = shares[..., :n] @ first_v
        for j, (_, v_j) in enumerate(earlier[1:]):
            mixed = mixed + shares[..., n + j, None] * v_j
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    """The head's layer. The embedding enters attention only; the residual is the hidden state's."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.input_layernorm = Norm(spec.hidden_size, spec.rms_eps)
        self.hidden_norm = Norm(spec.hidden_size, spec.rms_eps)
        self.post_attention_layernorm = Norm(spec.hidden_size, spec.rms_eps)
        self.self_attn, self.mlp = Attention(spec), Mlp(spec)

    def forward(
        self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, earlier: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)
        hidden = hidden + self.self_attn(both, cos, sin, earlier)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Head(nn.Module):
    """The whole head. spec: as a Llama of one layer; num_features: layers of the target that are concatenated."""

    cos: Tensor  # [max_context, head_dim / 2]
    sin: Tensor

    def __init__(self, spec: ModelSpec, num_features: int, num_ids: int) -> None:
        super().__init__()
        self.fc = nn.Linear(num_features * spec.hidden_size, spec.hidden_size, bias=False)
        self.midlayer = MidLayer(spec)
        self.norm = Norm(spec.hidden_size, spec.rms_eps)
        self.lm_head = nn.Linear(spec.hidden_size, num_ids, bias=False)
        for name, table in zip(("cos", "sin"), rotary_tables(spec), strict=True):
            self.register_buffer(name, torch.from_numpy(table), persistent=False)

    def chains(self, embedded: Tensor, features: Tensor, num_steps: int) -> list[Tensor]:
        """Returns the hidden states [B, n, d] of each step, normed for the logits.

        embedded [B, n, d] of tokens, features [B, n, num_features * d] of the target after them. Row i of step k reads
        token i + k and gives the logits of token i + k + 1; rows past the last token are meaningless. Step 1 reads
        features, later steps the output of the step before, as in drafting.
        """
        n = embedded.shape[1]
        hidden, earlier, results = self.fc(features), [], []
        for step in range(num_steps):
            shifted = pad(embedded[:, step + 1 :], (0, 0, 0, min(step + 1, n)))
            own = slice(step, step + n)
            hidden = self.midlayer(shifted, hidden, self.cos[own], self.sin[own], earlier)
            results.append(self.norm(hidden))
        return results


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies RoPE to x [B, heads, n, head_dim] by tables [n, head_dim / 2]; halves are paired, as in Llama."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
