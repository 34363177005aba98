"""Serves a pair with the shape of a real one through `faser serve`: seconds per phase of its start, then tokens/s.

Layers compute but add nothing, so a token's successor depends on the token alone. Both models know the same cycle of
tokens; the draft has it wrong for a planted share of them, so drafts are accepted with a known probability. The
checkpoint of `--checkpoint` is served instead, with n-grams, if one is named.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from faser_backend.core.model import ModelSpec
from faser_backend.engines.build import build_engines
from faser_backend.lab.answers import count_different, jobs_of, summarise
from faser_backend.lab.checks.servers import LoadClient, Server
from faser_backend.lab.gpu.harness import Context, Result
from faser_backend.lab.gpu.pairs import DTYPE, checked_device
from faser_backend.lab.prompts import DEMO_PROMPTS
from faser_backend.lab.shapes import PAIRS, TINY_PAIR
from faser_backend.serving.demo_engine import DEMO_PAIR
from faser_backend.text.prompts import read_prompts

ACCEPTANCE = 0.75
PROFILE_S = "25"
CYCLE = 2048  # tokens that text consists of: the demo tokenizer's
CONTESTANTS = {
    "none": (),
    "fixed:4": (),
    "faser": (),
    "fixed:4, run ahead": ("--pipeline", "run_ahead"),
    "fixed:4, ping-pong": ("--pipeline", "ping_pong"),
}
FIGURES = ("tokens_per_s", "ttft_ms_p50", "tpot_ms_p50", "itl_ms_p99", "mean_accepted", "acceptance_rate")


def run(context: Context) -> Result:
    """Returns seconds by phase, and a row for each policy and number of clients."""
    device = checked_device(context)
    found: Result = {"acceptance": ACCEPTANCE, "seconds": {}, "rows": []}
    shape = TINY_PAIR if context.is_tiny else PAIRS["qwen3-8b/0.6b"]
    with tempfile.TemporaryDirectory(prefix="faser-serve-") as folder, ExitStack() as stack:
        root, last_s = Path(folder), time.monotonic()

        def lap(phase: str) -> None:
            nonlocal last_s
            found["seconds"][phase] = round(time.monotonic() - last_s, 2)
            last_s = time.monotonic()
            context.save(found)

        target, draft = (Path(context.checkpoint), None) if context.checkpoint else (root / "target", root / "draft")
        if draft is not None:
            for directory, spec, wrong in ((target, shape.target, 0.0), (draft, shape.draft, 1.0 - ACCEPTANCE)):
                write_planted(directory, spec, wrong, device, context.seed)
        lap("checkpoints written")
        build_engines(target, draft, root / "engine", runtime="torch", dtype=DTYPE[context.device])
        lap("engines built")
        torch.cuda.empty_cache()  # servers need the memory
        budget = ["--quick", "--budget-s", "5" if context.is_tiny else PROFILE_S]
        subprocess.run([sys.executable, "-m", "faser_backend.cli", "profile", *budget, str(root / "engine")], check=True)
        lap("profiled")
        client, expected = LoadClient(stack), {}
        loads = (1, 2) if context.is_tiny else (1, 8, 32)
        for index, (name, more) in enumerate(CONTESTANTS.items()):
            if more and (context.is_tiny or draft is None):
                continue
            options = ["--engine-dir", str(root / "engine"), "--max-num-seqs", str(max(loads))]
            server = Server([*options, "--policy", name.partition(",")[0], *more], root / f"{index}.log")
            stack.callback(server.stop)
            server.wait_ready()
            lap(f"server ready, {name}")
            for clients in loads:
                jobs = jobs_of(read_prompts(DEMO_PROMPTS), 2 * clients, 8 if context.is_tiny else 64, 0.0, context.seed)
                client.run(server.url, jobs[:clients], clients)  # warm-up
                answers, seconds = client.run(server.url, jobs, clients)
                expected.setdefault(clients, answers)
                row = {key: figure for key, figure in summarise(answers, seconds).items() if key in FIGURES}
                different = count_different(answers, expected[clients])
                found["rows"].append({"policy": name, "clients": clients, **row, "num_different": different})
                context.save(found)
            server.stop()
            lap(f"served and stopped, {name}")
    return found


def write_planted(directory: Path, spec: ModelSpec, share_wrong: float, device: torch.device, seed: int) -> None:
    """Writes a checkpoint whose greedy text goes around a cycle of tokens, and errs after share_wrong of them.

    seed: of the cycle, equal for target and draft. The demo pair's tokenizer goes with it.
    """
    rng = np.random.default_rng(seed)
    spec = replace(spec, vocab_size=max(spec.vocab_size, CYCLE), tie_word_embeddings=False)
    order = rng.permutation(np.arange(1, CYCLE))  # id 0 ends texts
    is_wrong = rng.random(order.size) < share_wrong
    followers = np.where(is_wrong, np.roll(order, -2), np.roll(order, -1))  # a wrong one is on the cycle too
    generator = torch.Generator(device).manual_seed(seed)
    hidden, heads, kv = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim

    def drawn(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator, device=device, dtype=torch.float32).bfloat16()

    embedding = drawn(spec.vocab_size, hidden)
    head = torch.zeros_like(embedding)
    # Two tokens may share a wrong follower; it then answers to the sum of both.
    head.index_add_(0, torch.as_tensor(followers, device=device), embedding[torch.as_tensor(order, device=device)])
    layer = {
        "self_attn.q_proj": drawn(heads, hidden) * hidden**-0.5,
        "self_attn.k_proj": drawn(kv, hidden) * hidden**-0.5,
        "self_attn.v_proj": drawn(kv, hidden) * hidden**-0.5,
        "self_attn.o_proj": torch.zeros(hidden, heads),
        "mlp.gate_proj": drawn(spec.intermediate_size, hidden) * hidden**-0.5,
        "mlp.up_proj": drawn(spec.intermediate_size, hidden) * hidden**-0.5,
        "mlp.down_proj": torch.zeros(hidden, spec.intermediate_size),
        "input_layernorm": torch.ones(hidden),
        "post_attention_layernorm": torch.ones(hidden),
        "self_attn.q_norm": torch.ones(spec.head_dim),
        "self_attn.k_norm": torch.ones(spec.head_dim),
    }
    layer = {name: tensor.bfloat16().cpu() for name, tensor in layer.items()}
    tensors = {
        "model.embed_tokens": embedding.cpu(),
        "lm_head": head.cpu(),
        "model.norm": torch.ones(hidden).bfloat16(),
    }
    for index in range(spec.num_layers):
        tensors |= {f"model.layers.{index}.{name}": tensor.clone() for name, tensor in layer.items()}
    directory.mkdir()
    save_file({f"{name}.weight": tensor for name, tensor in tensors.items()}, directory / "model.safetensors")
    config = {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "max_position_embeddings": spec.max_context,
        "rms_norm_eps": spec.rms_eps,
        "eos_token_id": 0,
    }
    same = ("hidden_size", "head_dim", "intermediate_size", "vocab_size", "rope_theta", "tie_word_embeddings")
    (directory / "config.json").write_text(json.dumps(config | {name: getattr(spec, name) for name in same}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((DEMO_PAIR / "target" / name).read_bytes())
