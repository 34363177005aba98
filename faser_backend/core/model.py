"""Description of a decoder: its dimensions, its variants and its rotary tables.

Plain values that engines are built from and run by. Knows no tensors, files or runtimes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

ROPE_SCALINGS = ("linear", "llama3")
EAGLE3, DFLASH, DSPARK = "eagle3", "dflash", "dspark"  # the families of drafts that read hidden states of their target

# What is built and served at most: beyond, a field is damaged or meant to harm.
MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20  # of hidden states, MLPs and the heads together
MAX_HEADS = 1024
MAX_VOCABULARY = 1 << 22
MAX_CONTEXT = 1 << 22
MAX_EXPERTS = 1024
MAX_BLOCK = 64

# Limits of numbers that a file describes; a manifest is checked against them when it is loaded.
Width = Annotated[int, Field(ge=1, le=MAX_WIDTH)]
NumHeads = Annotated[int, Field(ge=1, le=MAX_HEADS)]
NumExperts = Annotated[int, Field(ge=0, le=MAX_EXPERTS)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
WEIGHT_FORMATS = ("fp32", "fp16", "bf16", "int8", "int4")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are slowed down for contexts longer than those of pretraining.

    linear: every frequency is divided by `factor`. llama3: those that turn fewer than `low_freq_factor` times
    in `original_max_context` tokens are, those that turn more than `high_freq_factor` times are kept, and
    between the two the divided and the kept frequency are blended in proportion to the turns.
    """

    kind: Literal["linear", "llama3"]  # as in ROPE_SCALINGS
    factor: Positive
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_max_context: int = 8192

    def scaled(self, frequencies: np.ndarray) -> np.ndarray:
        """frequencies [head_dim / 2] in radians per token -> the same, slowed down."""
        slow = frequencies / self.factor
        if self.kind == "linear":
            return slow
        turns = self.original_max_context * frequencies / (2 * np.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return slow + np.clip(kept, 0.0, 1.0) * (frequencies - slow)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Dimensions and variants of a decoder. `max_context` counts prompt + output tokens.

    vocab_size counts the ids that can be read and sampled; padded_vocab_size the rows that the checkpoint's
    embedding had, 0 where nobody recorded it. With experts, intermediate_size is that of each of them.
    """

    num_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    hidden_size: Width
    num_heads: NumHeads
    num_kv_heads: NumHeads
    head_dim: Width
    intermediate_size: Width
    vocab_size: Annotated[int, Field(ge=1, le=MAX_VOCABULARY)]
    max_context: Annotated[int, Field(ge=1, le=MAX_CONTEXT)]
    rope_theta: Positive
    rms_eps: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    tie_word_embeddings: bool
    family: str = "llama"
    rope_scaling: RopeScaling | None = None
    has_qkv_bias: bool = False
    has_attention_out_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False  # queries and keys are normalised per head before they are rotated
    num_experts: NumExperts = 0  # 0: every layer has one MLP for all rows
    num_experts_per_token: NumExperts = 0
    has_normalized_routing: bool = True  # the chosen experts' weights sum to 1
    feature_layers: tuple[int, ...] = ()  # layers whose inputs a draft head reads, rising
    block_size: Annotated[int, Field(ge=0, le=MAX_BLOCK)] = 0  # rows of a block drafter's call, its anchor's included
    mask_id: Annotated[int, Field(ge=0, le=MAX_VOCABULARY)] = 0  # read by the other rows: a row of the embedding
    padded_vocab_size: int = 0
    checkpoint_dtype: str = ""  # of the weights on disk, before they were converted to the engine's

    @property
    def reads_target(self) -> bool:
        """Whether this is a draft that reads hidden states of its target."""
        return self.family in (EAGLE3, DFLASH, DSPARK)

    @property
    def num_idle(self) -> int | None:
        """Rows of a block without logits: 1 if masks predict their own positions. None: it drafts no blocks."""
        return int(self.family == DFLASH) if self.block_size else None


def rotary_tables(spec: ModelSpec) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [max_context, head_dim / 2] of position * frequency, float32 from float64.

    The frequencies are theta^(-2i / head_dim), scaled where the model says so.
    """
    half = spec.head_dim // 2
    frequencies = spec.rope_theta ** (-np.arange(half) / half)  # [half]
    if spec.rope_scaling is not None:
        frequencies = spec.rope_scaling.scaled(frequencies)
    cos, sin = (np.empty((spec.max_context, half), np.float32) for _ in range(2))
    for first in range(0, spec.max_context, 4096):  # a long context's angles are not held as float64
        angles = np.arange(first, min(first + 4096, spec.max_context))[:, None] * frequencies
        cos[first : first + 4096], sin[first : first + 4096] = np.cos(angles), np.sin(angles)
    return cos, sin


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How the matrices of a model that computes in float32 are stored. Raises ValueError for an unknown name."""

    name: str  # of the layers' matrices
    embedding: str = ""  # format of the embedding, if it differs from `name`
    head: str = ""  # the same for the head; a tied head has the embedding's
    rounded: str = ""  # which matrices were quantised in the checkpoint already, and are rounded once more here

    def __post_init__(self) -> None:
        for name in self.formats:
            if name not in WEIGHT_FORMATS:
                raise ValueError(f"weight_format = {name!r}: must be one of {', '.join(WEIGHT_FORMATS)}")

    @property
    def formats(self) -> tuple[str, str, str]:
        """Formats of the layers' matrices, of the embedding and of the head."""
        return self.name, self.embedding or self.name, self.head or self.name

    @property
    def title(self) -> str:
        """The formats as people read them."""
        _, embedding, head = self.formats
        if embedding == head == self.name:
            return self.name
        ends = f"embedding and head {head}" if embedding == head else f"embedding {embedding}, head {head}"
        return f"{self.name} ({ends})"


FLOAT32_WEIGHTS = WeightFormat("fp32")
# Products where a CPU has units of bfloat16: inputs in two such numbers, or exact; or rounded to one.
COMPUTES = (TWO_PARTS, ONE_PART) = ("bf16x2", "bf16")
