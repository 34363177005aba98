"""Random block drafters in the published formats, engines with them, and a torch reference of such a drafter.

The reference follows arXiv 2602.06036 (DFlash) and 2607.05147 (DSpark) with the published checkpoints, one sequence at
a time and without a cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear

from faser_backend.engines.build import build_engines
from tests.support.eagle3_models import ReferenceHead, write_draft
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
DSPARK: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "tie_word_embeddings": False,
    "dflash_config": None,
    **DRAFTER["dflash_config"],
    "markov_rank": 16,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
RANK_0 = {**DSPARK, "markov_rank": 0, "enable_confidence_head": False, "has_ends": True}  # DeepSpec's DFlash
RANK_0 |= dict.fromkeys(("markov_head_type", "confidence_head_with_markov"))
KINDS: dict[str, dict[str, Any]] = {"dflash": {}, "dspark": DSPARK, "rank 0": RANK_0}


def drafter_tensors(config: dict[str, Any], *, has_ends: bool = False, seed: int = 0) -> dict[str, torch.Tensor]:
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
    if rank := config.get("markov_rank"):
        shapes |= {f"markov_head.markov_w{i}": (PADDED_SIZE, rank) for i in (1, 2)}
    if has_ends:
        shapes |= dict.fromkeys(("embed_tokens", "lm_head"), (PADDED_SIZE, d))
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=rng) * 0.25 + (len(shape) == 1) for name, shape in shapes.items()
    }
    if config.get("enable_confidence_head"):
        tensors["confidence_head.proj.weight"] = torch.randn((1, d + (rank or 0)), generator=rng)
        tensors["confidence_head.proj.bias"] = torch.ones(1)
    return tensors


def write_drafter(directory: Path, *, has_ends: bool = False, dtype: Any = torch.float32, **changes: Any) -> Path:
    config = {name: value for name, value in {**DRAFTER, **changes}.items() if value is not None}
    tensors = {name: tensor.to(dtype) for name, tensor in drafter_tensors(config, has_ends=has_ends).items()}
    return write_draft(tensors, config, directory)


class BuiltBlocks:
    """A target and a block drafter that were built together, with references of both."""

    def __init__(self, root: Path, *, is_tied: bool = False, options: dict[str, Any] | None = None, **drafter: Any):
        """drafter: see write_drafter."""
        self.source = write_checkpoint(
            root / "target", num_hidden_layers=NUM_TARGET_LAYERS, vocab_size=PADDED_SIZE, tie_word_embeddings=is_tied
        )
        write_tokenizer(self.source, VOCAB_SIZE)
        self.directory = root / "engine"
        drafts = write_drafter(root / "drafter", **drafter)
        self.manifest = build_engines(self.source, drafts, self.directory, **{"kv_block_size": 4, **(options or {})})
        self.target_reference = reference_model(self.source)
        parameters = dict(self.target_reference.named_parameters(remove_duplicate=False))
        ends = [parameters[name].detach() for name in ("model.embed_tokens.weight", "lm_head.weight")]
        self.reference = ReferenceDrafter(drafts, *ends)
        self.known: dict[bytes, torch.Tensor] = {}

    def features(self, token_ids: np.ndarray) -> torch.Tensor:
        """Returns the target's hidden states for the drafter, side by side: [n, len(LAYERS) * hidden_size]."""
        if (key := token_ids.tobytes()) not in self.known:
            with torch.no_grad():
                run = self.target_reference(torch.from_numpy(token_ids)[None], output_hidden_states=True)
            self.known[key] = torch.cat([run.hidden_states[layer + 1][0] for layer in LAYERS], dim=-1)
        return self.known[key]

    def block_of(self, token_ids: np.ndarray, drafted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns logits [n, VOCAB_SIZE] and confidences [n] of a block behind token_ids, whose last one is the anchor,
        if drafted [n] is drawn."""
        hidden = self.reference.block(self.features(token_ids[:-1]), int(token_ids[-1]), drafted.size)
        return self.reference.predict(hidden, np.append(token_ids[-1], drafted[:-1]))

    def chain_behind(self, tokens: np.ndarray, num_draft_tokens: int) -> list[int]:
        """Drafts greedily behind `tokens`, none of it from a cache."""
        chain = tokens[-1:]
        for row in self.reference.block(self.features(tokens[:-1]), int(tokens[-1]), num_draft_tokens):
            chain = np.append(chain, self.reference.predict(row[None], chain[-1:])[0].argmax())
        return chain[1:].tolist()


class ReferenceDrafter(ReferenceHead):
    """A published drafter; embedding and head [rows, d]: its target's, for a drafter without."""

    is_causal = False  # a fault for tests, as are the next three
    normalises_context = True
    num_idle = 0  # rows that DSpark skips
    bias_lag = 0  # tokens between a row and that of its bias

    def __init__(self, directory: Path, embedding: torch.Tensor, head: torch.Tensor) -> None:
        super().__init__(directory, embedding)
        self.ends = {"embed_tokens.weight": embedding, "lm_head.weight": head}
        self.is_dspark, self.has_bias = "markov_rank" in self.config, bool(self.config.get("markov_rank"))

    def block(self, features: torch.Tensor, anchor: int, num_tokens: int) -> torch.Tensor:
        """Returns hidden states [num_tokens, d] of a block behind positions with features [n, ...]."""
        ends, num_idle = {**self.ends, **self.tensors}, self.num_idle if self.is_dspark else 1
        mask = {**self.config, **self.config.get("dflash_config", {})}["mask_token_id"]
        context = linear(features, self.tensors["fc.weight"])
        if self.normalises_context:
            context = self._norm(context, "hidden_norm")
        x = ends["embed_tokens.weight"][[anchor] + [mask] * (num_tokens + num_idle - 1)]
        for layer in range(self.config["num_hidden_layers"]):
            self._prefix = f"layers.{layer}."
            normed = self._norm(x, f"{self._prefix}input_layernorm")
            attended = self._attended(normed, torch.cat([context, normed]), is_causal=self.is_causal)
            x = self._fed_forward(x + attended)
        return self._norm(x[num_idle:], "norm")

    def predict(self, hidden: torch.Tensor, previous: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns logits [n, VOCAB_SIZE] and confidences [n] of hidden states [n, d] behind tokens previous [n]."""
        logits, confidences = linear(hidden, {**self.ends, **self.tensors}["lm_head.weight"]), torch.zeros(len(hidden))
        if self.has_bias:
            of_token = self.tensors["markov_head.markov_w1.weight"][np.roll(previous, self.bias_lag)]
            logits = logits + linear(of_token, self.tensors["markov_head.markov_w2.weight"])
            weight, bias = (self.tensors[f"confidence_head.proj.{kind}"] for kind in ("weight", "bias"))
            confidences = linear(torch.cat([hidden, of_token], dim=-1), weight, bias)[:, 0]
        return logits[:, :VOCAB_SIZE].numpy(), confidences.numpy()
