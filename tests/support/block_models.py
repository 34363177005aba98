"""Random DFlash drafters in the published format, engines with them, and a torch reference of such a drafter.

The reference follows arXiv 2602.06036 and the published checkpoints, one sequence at a time and without a cache.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, silu

from faser_backend.engines.build import build_engines
from tests.support.tiny_models import DEFAULTS, VOCAB_SIZE, reference_model, write_checkpoint, write_tokenizer

NUM_TARGET_LAYERS = 6
PADDED_SIZE = 104  # rows of an embedding of VOCAB_SIZE tokens
MASK_ID = 100
BLOCK_SIZE = 6
LAYERS = [0, 2, 3, 4]  # their outputs are read
DRAFTER: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": DEFAULTS["hidden_size"],
    "intermediate_size": 40,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": PADDED_SIZE,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "layer_types": ["full_attention"] * 2,
    "block_size": BLOCK_SIZE,
    "num_target_layers": NUM_TARGET_LAYERS,
    "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": LAYERS},
}


def drafter_tensors(config: dict[str, Any], *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Returns random weights under the published names."""
    rng = torch.Generator().manual_seed(seed)
    d, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    num_q, num_kv = (config[f"num_{kind}_heads"] * size for kind in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {"fc": (d, len(LAYERS) * d), "hidden_norm": (d,), "norm": (d,)}
    for layer in range(config["num_hidden_layers"]):
        own = {"input_layernorm": (d,), "post_attention_layernorm": (d,), "mlp.down_proj": (d, inner)}
        own |= {"mlp.gate_proj": (inner, d), "mlp.up_proj": (inner, d), "self_attn.o_proj": (d, num_q)}
        own |= {"self_attn.q_proj": (num_q, d), "self_attn.k_proj": (num_kv, d), "self_attn.v_proj": (num_kv, d)}
        own |= {"self_attn.q_norm": (size,), "self_attn.k_norm": (size,)}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    return {
        f"{name}.weight": torch.randn(shape, generator=rng) * 0.25 + (len(shape) == 1) for name, shape in shapes.items()
    }


def write_drafter(directory: Path, **changes: Any) -> Path:
    config = {name: value for name, value in {**DRAFTER, **changes}.items() if value is not None}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(drafter_tensors(config), directory / "model.safetensors")
    return directory


class BuiltBlocks:
    """A target and a block drafter that were built together, with references of both."""

    def __init__(self, root: Path, *, is_tied: bool = False, options: dict[str, Any] | None = None, **config: Any):
        self.source = write_checkpoint(
            root / "target",
            num_hidden_layers=NUM_TARGET_LAYERS,
            vocab_size=PADDED_SIZE,
            tie_word_embeddings=is_tied,
        )
        write_tokenizer(self.source, VOCAB_SIZE)
        self.directory = root / "engine"
        drafter = write_drafter(root / "drafter", **config)
        self.manifest = build_engines(self.source, drafter, self.directory, **{"kv_block_size": 4, **(options or {})})
        self.target_reference = reference_model(self.source)
        parameters = dict(self.target_reference.named_parameters(remove_duplicate=False))
        ends = [parameters[name].detach() for name in ("model.embed_tokens.weight", "lm_head.weight")]
        self.reference = ReferenceDrafter(drafter, *ends)

    def features(self, token_ids: np.ndarray) -> torch.Tensor:
        """Returns the target's hidden states for the drafter, side by side: [n, len(LAYERS) * hidden_size]."""
        with torch.no_grad():
            run = self.target_reference(torch.from_numpy(token_ids)[None], output_hidden_states=True)
        return torch.cat([run.hidden_states[layer + 1][0] for layer in LAYERS], dim=-1)

    def block_of(self, token_ids: np.ndarray, num_masks: int) -> np.ndarray:
        """Returns the logits [num_masks, VOCAB_SIZE] of a block behind token_ids, whose last one is the anchor."""
        return self.reference.run(self.features(token_ids[:-1]), int(token_ids[-1]), num_masks)

    def chain_behind(self, tokens: np.ndarray, num_draft_tokens: int) -> list[int]:
        """Drafts greedily behind `tokens`, none of it from a cache."""
        return self.block_of(tokens, num_draft_tokens).argmax(axis=1).tolist()


class ReferenceDrafter:
    """A published drafter with its target's embedding and head [rows, d]."""

    is_causal = False  # a fault for tests, as is normalises_context
    normalises_context = True

    def __init__(self, directory: Path, embedding: torch.Tensor, head: torch.Tensor) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        self.tensors = load_file(directory / "model.safetensors")
        self.embedding, self.head = embedding, head

    def run(self, features: torch.Tensor, anchor: int, num_masks: int) -> np.ndarray:
        """Returns logits of the masks of a block behind positions with features [n, ...]."""
        context = linear(features, self.tensors["fc.weight"])
        if self.normalises_context:
            context = self._norm(context, "hidden_norm")
        x = self.embedding[[anchor] + [self.config["dflash_config"]["mask_token_id"]] * num_masks]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"layers.{layer}."
            x = x + self._attention(name, self._norm(x, f"{name}input_layernorm"), context)
            normed = self._norm(x, f"{name}post_attention_layernorm")
            gate, up = (linear(normed, self.tensors[f"{name}mlp.{part}_proj.weight"]) for part in ("gate", "up"))
            x = x + linear(silu(gate) * up, self.tensors[f"{name}mlp.down_proj.weight"])
        return linear(self._norm(x[1:], "norm"), self.head)[:, :VOCAB_SIZE].numpy()

    def _attention(self, name: str, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        head_dim, num_seen = self.config["head_dim"], context.shape[0]
        both = torch.cat([context, x])
        q, k, v = (
            linear(rows, self.tensors[f"{name}self_attn.{part}_proj.weight"]).view(rows.shape[0], -1, head_dim)
            for part, rows in (("q", x), ("k", both), ("v", both))
        )
        q, k = self._norm(q, f"{name}self_attn.q_norm"), self._norm(k, f"{name}self_attn.k_norm")
        q, k = self._rotated(q, num_seen), self._rotated(k, 0)
        k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], dim=1) for y in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / head_dim**0.5
        if self.is_causal:
            hidden = torch.ones(q.shape[0], k.shape[0]).triu(1 + num_seen).bool()
            scores = scores.masked_fill(hidden, float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        return linear(mixed.reshape(q.shape[0], -1), self.tensors[f"{name}self_attn.o_proj.weight"])

    def _rotated(self, x: torch.Tensor, first: int) -> torch.Tensor:
        half = x.shape[-1] // 2
        frequencies = self.config["rope_theta"] ** (-torch.arange(half).double() / half)
        angles = torch.arange(first, first + x.shape[0])[:, None].double() * frequencies
        cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]
        one, two = x[..., :half], x[..., half:]
        return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.tensors[f"{name}.weight"]
