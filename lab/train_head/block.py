"""A block drafter in torch (DFlash, arXiv 2602.06036), in the layout that engines/dflash.py reads.

Parameters have the published names, so a state dict is a checkpoint. Embedding and output head are the target's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from faser_backend.core.model import ModelSpec, rotary_tables
from faser_backend.lab.train_head.head import Mlp, Norm, Projections, rotated

Tables = tuple[Tensor, Tensor]  # cos and sin of some positions


class View(NamedTuple):
    """Sight of the rows of A blocks of each conversation."""

    size: int  # of a block
    own: Tables  # of the rows' positions, [B, 1, A * size, head_dim / 2]
    context: Tensor  # [B, n, d]: joined features of every position
    before: Tables  # of every position, [n, head_dim / 2]
    is_hidden: Tensor  # [B, 1, A * size, n]: positions that a row must not see


class BlockAttention(Projections):
    """Attention of many blocks of a conversation at once: a row sees the features before its block, and its block."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, spec.hidden_size)
        self.q_norm, self.k_norm = Norm(spec.head_dim, spec.rms_eps), Norm(spec.head_dim, spec.rms_eps)

    def forward(self, x: Tensor, view: View) -> Tensor:
        """Maps the rows x [B, A * size, d] of A blocks each to [B, A * size, d]."""
        q = rotated(self.q_norm(self.split(self.q_proj(x))) * self._head_dim**-0.5, *view.own)
        own_k, own_v = self._keys_and_values(x, view.own)
        k, v = self._keys_and_values(view.context, view.before)
        of_block = (2, (-1, view.size))
        seen = (q @ k.transpose(2, 3)).float().masked_fill_(view.is_hidden, float("-inf"))  # [B, H, A * size, n]
        beside = q.unflatten(*of_block) @ own_k.unflatten(*of_block).transpose(3, 4)  # [B, H, A, size, size]
        shares = torch.cat([seen, beside.flatten(2, 3).float()], dim=-1).softmax(-1).to(v.dtype)
        of_context, of_own = shares.split([k.shape[2], view.size], dim=-1)
        mixed = of_context @ v + (of_own.unflatten(*of_block) @ own_v.unflatten(*of_block)).flatten(2, 3)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _keys_and_values(self, x: Tensor, tables: Tables) -> tuple[Tensor, ...]:
        """Returns keys and values of rows x, repeated for each query head."""
        return self.repeated(rotated(self.k_norm(self.split(self.k_proj(x))), *tables), self.split(self.v_proj(x)))


class BlockLayer(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.input_layernorm = Norm(spec.hidden_size, spec.rms_eps)
        self.post_attention_layernorm = Norm(spec.hidden_size, spec.rms_eps)
        self.self_attn, self.mlp = BlockAttention(spec), Mlp(spec)

    def forward(self, x: Tensor, view: View) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), view)
        return x + self.mlp(self.post_attention_layernorm(x))


class Block(nn.Module):
    """The whole drafter. num_features: layers of the target whose hidden states are concatenated."""

    cos: Tensor  # [max_context, head_dim / 2]
    sin: Tensor

    def __init__(self, spec: ModelSpec, num_features: int) -> None:
        super().__init__()
        self.fc = nn.Linear(num_features * spec.hidden_size, spec.hidden_size, bias=False)
        self.hidden_norm = Norm(spec.hidden_size, spec.rms_eps)
        self.layers = nn.ModuleList(BlockLayer(spec) for _ in range(spec.num_layers))
        self.norm = Norm(spec.hidden_size, spec.rms_eps)
        for name, table in zip(("cos", "sin"), rotary_tables(spec), strict=True):
            self.register_buffer(name, torch.from_numpy(table), persistent=False)

    def forward(self, embedded: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """Returns the hidden states [B, A, size, d] of A blocks a conversation, normed for the logits.

        embedded [B, A, size, d] of an anchor and masks each, features [B, n, num_features * d] of the target at all
        positions, anchors [B, A] the anchors' positions. A block's row reads the features before its anchor.
        """
        (n, size), last = (features.shape[1], embedded.shape[2]), self.cos.shape[0] - 1
        positions = (anchors[..., None] + torch.arange(size, device=anchors.device)).clamp(max=last).flatten(1)
        own = self.cos[positions][:, None], self.sin[positions][:, None]
        first = anchors.repeat_interleave(size, dim=1)[:, None, :, None]
        is_hidden = torch.arange(n, device=anchors.device) >= first
        context, before = self.hidden_norm(self.fc(features)), (self.cos[:n], self.sin[:n])
        x, view = embedded.flatten(1, 2), View(size, own, context, before, is_hidden)
        for layer in self.layers:
            x = layer(x, view)
        return self.norm(x).unflatten(1, (-1, size))
