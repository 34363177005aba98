"""Named GPUs, models and pairs: published figures only. What is assumed about their use is in roofline.py."""

from __future__ import annotations

from dataclasses import dataclass

from faser_backend.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Machine:
    """num_gpus alike, tensor-parallel. Peaks are per GPU."""

    name: str
    num_gpus: int
    flops_per_s: float  # bf16, dense
    bytes_per_s: float  # of memory
    memory_bytes: float
    num_sms: int
    link_bytes_per_s: float  # NVLink, one direction


@dataclass(frozen=True, slots=True)
class Model:
    """A dense decoder with grouped-query attention and a gated feed-forward network, in bf16."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    ties_embeddings: bool

    @property
    def layer_weights(self) -> int:
        """Numbers in the matrices of one layer."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def head_weights(self) -> int:
        return self.hidden_size * self.vocab_size

    @property
    def weight_bytes(self) -> int:
        """Of all weights in memory, embeddings included."""
        tables = self.head_weights * (1 if self.ties_embeddings else 2)
        return 2 * (self.num_layers * self.layer_weights + tables)

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Pair:
    target: Model
    draft: Model
    exit_layers: tuple[int, ...]  # target layers after which a verification may prune


# NVIDIA's data sheets: H100 SXM5 (in the 96 GB variant that the paper used) and H200 SXM.
_H100 = (989e12, 3.35e12, 96e9, 132, 450e9)
_H200 = (989e12, 4.8e12, 141e9, 132, 450e9)
MACHINES = {
    machine.name: machine
    for machine in (
        Machine("h100", 1, *_H100),
        Machine("h100x2", 2, *_H100),
        Machine("h200", 1, *_H200),
        Machine("h200x2", 2, *_H200),
    )
}

# The models' config.json files.
_QWEN3_32B = Model("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936, False)
_QWEN3_8B = Model("Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936, False)
_QWEN3_0_6B = Model("Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, 151936, True)
_LLAMA_70B = Model("Llama-3.3-70B", 80, 8192, 64, 8, 128, 28672, 128256, False)
_LLAMA_1B = Model("Llama-3.2-1B", 16, 2048, 32, 8, 64, 8192, 128256, True)

# One exit at a fifth of the depth, as in the study of Qwen3-4B that finds about 7 of 36 layers to break even.
PAIRS = {
    "qwen3-32b/0.6b": Pair(_QWEN3_32B, _QWEN3_0_6B, (13,)),
    "qwen3-8b/0.6b": Pair(_QWEN3_8B, _QWEN3_0_6B, (7,)),
    "llama3.3-70b/3.2-1b": Pair(_LLAMA_70B, _LLAMA_1B, (16,)),
}


def find_machine(name: str) -> Machine:
    """Raises ConfigError."""
    if name not in MACHINES:
        raise ConfigError(f"hardware = {name!r}: unknown; known are {', '.join(MACHINES)}")
    return MACHINES[name]


def find_pair(name: str) -> Pair:
    """Raises ConfigError."""
    if name not in PAIRS:
        raise ConfigError(f"pair = {name!r}: unknown; known are {', '.join(PAIRS)}")
    return PAIRS[name]
