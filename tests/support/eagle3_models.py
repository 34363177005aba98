"""Random EAGLE-3 heads in the published format, and a torch reference of such a head.

The reference follows the description of EAGLE-3 (arXiv 2503.01840) and its published checkpoints, one sequence at a
time and without a cache. It shares no code with the graphs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, silu

from tests.support.tiny_models import DEFAULTS, VOCAB_SIZE, reference_model, write_checkpoint, write_tokenizer

NUM_TARGET_LAYERS = 8
FEATURE_LAYERS = (2, 4, 5)  # the public default for 8 layers
DRAFT_VOCAB_SIZE = 40
PADDED_SIZE = 104  # rows of a vocabulary of VOCAB_SIZE tokens
HEAD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": DEFAULTS["hidden_size"],
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB_SIZE,
    "draft_vocab_size": DRAFT_VOCAB_SIZE,
    "max_position_embeddings": 32,  # heads are trained on short texts; this is no limit
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def head_tensors(config: dict[str, Any], *, seed: int = 0, prefix: str = "midlayer.") -> dict[str, torch.Tensor]:
    """Returns random weights and a token map under the published names."""
    rng = torch.Generator().manual_seed(seed)
    d, inner = config["hidden_size"], config["intermediate_size"]
    num_q, num_kv = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    shapes = {
        "fc": (d, 3 * config.get("target_hidden_size", d)),
        f"{prefix}self_attn.q_proj": (num_q, 2 * d),
        f"{prefix}self_attn.k_proj": (num_kv, 2 * d),
        f"{prefix}self_attn.v_proj": (num_kv, 2 * d),
        f"{prefix}self_attn.o_proj": (d, num_q),
        f"{prefix}mlp.gate_proj": (inner, d),
        f"{prefix}mlp.up_proj": (inner, d),
        f"{prefix}mlp.down_proj": (d, inner),
        "lm_head": (config.get("draft_vocab_size", config["vocab_size"]), d),
    }
    tensors = {f"{name}.weight": torch.randn(shape, generator=rng) * 0.25 for name, shape in shapes.items()}
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"{prefix}{norm}.weight"] = 1 + torch.randn(d, generator=rng) * 0.25
    tensors["norm.weight"] = 1 + torch.randn(d, generator=rng) * 0.25
    if "draft_vocab_size" in config:
        chosen = torch.randperm(config["vocab_size"], generator=rng)[: config["draft_vocab_size"]].sort().values
        tensors["d2t"] = chosen - torch.arange(chosen.numel())
        tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill(0, chosen, True)
    return tensors


def write_head(directory: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    """Writes a checkpoint directory as SpecForge does: no tokenizer, an embedding only if `tensors` has one."""
    config = {name: value for name, value in {**HEAD, **changes}.items() if value is not None}
    return write_draft(head_tensors(config) if tensors is None else tensors, config, directory)


def write_draft(tensors: dict[str, torch.Tensor], config: dict[str, Any], directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def write_published(root: Path, rng: np.random.Generator) -> tuple[Path, Path, ReferenceHead]:
    """Writes a target, and a head with vLLM's name of its layer, an embedding, half precision and explicit layers.

    Returns both directories and a reference of the head.
    """
    target = write_checkpoint(root / "target", num_hidden_layers=NUM_TARGET_LAYERS)
    own = torch.from_numpy(rng.normal(size=(VOCAB_SIZE, HEAD["hidden_size"])).astype(np.float32))
    tensors = head_tensors(HEAD, prefix="layers.0.") | {"embed_tokens.weight": own}
    tensors = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in tensors.items()}
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 3, 6], "use_aux_hidden_state": True}
    head = write_head(root / "head", tensors, eagle_config=layers, architectures=["Eagle3LlamaForCausalLM"])
    return target, head, ReferenceHead(head, own, prefix="layers.0.")


def write_padded(root: Path) -> tuple[Path, Path, ReferenceHead]:
    """Writes a target and a head with more rows than tokens. Returns both directories and a reference of the head."""
    target = write_checkpoint(root / "target", num_hidden_layers=NUM_TARGET_LAYERS, vocab_size=PADDED_SIZE)
    write_tokenizer(target, VOCAB_SIZE)
    head = write_head(root / "head", vocab_size=PADDED_SIZE)
    embedding = reference_model(target).get_parameter("model.embed_tokens.weight").detach()
    return target, head, ReferenceHead(head, embedding)


class ReferenceHead:
    """A published head over the embedding [V, d] that it shares."""

    def __init__(self, directory: Path, embedding: torch.Tensor, prefix: str = "midlayer.") -> None:
        self.config = json.loads((directory / "config.json").read_text())
        stored = load_file(directory / "model.safetensors")
        self.tensors = {name: t.float() if t.is_floating_point() else t for name, t in stored.items()}
        self.embedding = self.tensors.get("embed_tokens.weight", embedding)
        self._prefix = prefix

    def joined(self, features: torch.Tensor) -> torch.Tensor:
        """Joins the hidden states of three target layers: [n, 3 d] -> [n, d]."""
        return linear(features, self.tensors["fc.weight"])

    def run(self, token_ids: np.ndarray, hidden: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
        """Runs token_ids [n] with hidden [n, d] at positions 0 to n - 1. Returns logits of all ids [n, V], hidden [n,
        d]."""
        embedded = self._norm(self.embedding[torch.from_numpy(token_ids)], f"{self._prefix}input_layernorm")
        both = torch.cat([embedded, self._norm(hidden, f"{self._prefix}hidden_norm")], dim=-1)
        hidden = self._fed_forward(hidden + self._attended(both, both, is_causal=True))
        logits = linear(self._norm(hidden, "norm"), self.tensors["lm_head.weight"])
        return self._over_all_ids(logits).numpy(), hidden

    def _over_all_ids(self, logits: torch.Tensor) -> torch.Tensor:
        full = torch.full((logits.shape[0], self.config["vocab_size"]), float("-inf"))
        ids = torch.arange(logits.shape[1])
        full[:, ids + self.tensors.get("d2t", torch.zeros_like(ids))] = logits
        return full

    def _fed_forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self._norm(x, f"{self._prefix}post_attention_layernorm")
        gate, up = (self._linear(normed, f"mlp.{name}_proj") for name in ("gate", "up"))
        return x + self._linear(silu(gate) * up, "mlp.down_proj")

    def _attended(self, x: torch.Tensor, seen: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
        """Returns attention's output [n, d] of x [n, any], the last n of the rows seen [m, any]."""
        (n, _), (m, _), head_dim = x.shape, seen.shape, self.config["head_dim"]
        q, k, v = (
            self._linear(rows, f"self_attn.{name}_proj").unflatten(1, (-1, head_dim))
            for name, rows in (("q", x), ("k", seen), ("v", seen))
        )
        if f"{self._prefix}self_attn.q_norm.weight" in self.tensors:
            q, k = self._norm(q, f"{self._prefix}self_attn.q_norm"), self._norm(k, f"{self._prefix}self_attn.k_norm")
        q, k = self._rotated(q, m - n), self._rotated(k, 0)
        k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], dim=1) for y in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / head_dim**0.5
        if is_causal:
            scores = scores.masked_fill(torch.ones(n, m).triu(1 + m - n).bool(), float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        return self._linear(mixed.reshape(n, -1), "self_attn.o_proj")

    def _rotated(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """Applies RoPE to x [n, heads, head_dim] at positions from start on; halves are paired, as in Llama."""
        half = x.shape[-1] // 2
        frequencies = self.config.get("rope_theta", 10000.0) ** (-torch.arange(half).double() / half)
        angles = torch.arange(start, start + x.shape[0])[:, None].double() * frequencies
        cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return linear(x, self.tensors[f"{self._prefix}{name}.weight"])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.tensors[f"{name}.weight"]
