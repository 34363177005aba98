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
from faser_backend.places import DEMO_PAIR
from faser_backend.text.prompts import read_prompts

ACCEPTANCE = 0.75
CYCLE = 2048  # tokens that text consists of: the demo tokenizer's
PROFILE_S = 25
CONTESTANTS = {  # name: policy, options
    "none": ("none",),
    "fixed:4": ("fixed:4",),
    "faser": ("faser",),
    "run ahead": ("fixed:4", "--pipeline", "run_ahead"),
    "ping-pong": ("fixed:4", "--pipeline", "ping_pong"),
}
FIGURES = ("tokens_per_s", "ttft_ms_p50", "tpot_ms_p50", "itl_ms_p99", "mean_accepted", "acceptance_rate")


def run(context: Context) -> Result:
    """Returns seconds by phase, and a row for each contestant and number of clients."""
    device = checked_device(context)
    found: Result = {"acceptance": ACCEPTANCE, "seconds": {}, "rows": []}
    shape = TINY_PAIR if context.is_tiny else PAIRS["qwen3-8b/0.6b"]
    loads, max_tokens, budget_s = ((1, 2), 8, 5) if context.is_tiny else ((1, 8, 32), 128, PROFILE_S)
    with tempfile.TemporaryDirectory(prefix="faser-serve-") as folder, ExitStack() as stack:
        root, last_s = Path(folder), time.monotonic()

        def lap(phase: str) -> None:
            nonlocal last_s
            found["seconds"][phase] = round(time.monotonic() - last_s, 2)
            last_s = time.monotonic()
            context.save(found)

        target, draft = (Path(context.checkpoint), None) if context.checkpoint else (root / "target", root / "draft")
        if draft is not None:
            write_planted(target, shape.target, 0.0, device, context.seed)
            write_planted(draft, shape.draft, 1.0 - ACCEPTANCE, device, context.seed)
            torch.cuda.empty_cache()  # servers need the memory
        lap("checkpoints written")
        build_engines(target, draft, root / "engine", runtime="torch", dtype=DTYPE[context.device])
        lap("engines built")
        faser = [sys.executable, "-m", "faser_backend.cli"]
        subprocess.run([*faser, "profile", "--quick", f"--budget-s={budget_s}", str(root / "engine")], check=True)
        lap("profiled")
        # The demo pair's prompts end alike, and a text depends on the token before it: cut, they give many texts.
        prompts = [replace(each, text=each.text[: -2 - i % 60]) for i, each in enumerate(read_prompts(DEMO_PROMPTS))]
        client, expected = LoadClient(stack), {}
        for name, (policy, *pipeline) in CONTESTANTS.items():
            if pipeline and (context.is_tiny or draft is None):
                continue
            options = ["--engine-dir", str(root / "engine"), "--no-prefix-reuse", "--policy", policy, *pipeline]
            server = Server([*options, "--max-num-seqs", str(max(loads))], root / f"{name}.log")
            stack.callback(server.stop)
            server.wait_ready()
            lap(f"server ready, {name}")
            for clients in loads:
                jobs = jobs_of(prompts, 2 * clients, max_tokens, 0.0, context.seed)
                client.run(server.url, jobs[:clients], clients)  # warm-up
                answers, seconds = client.run(server.url, jobs, clients)
                figures = summarise(answers, seconds)
                row = {"policy": name, "clients": clients, **{key: figures[key] for key in FIGURES}}
                row["num_different"] = count_different(answers, expected.setdefault(clients, answers))
                found["rows"].append(row)
            server.stop()
            lap(f"served and stopped, {name}")
    return found


def write_planted(directory: Path, spec: ModelSpec, share_wrong: float | None, device: torch.device, seed: int) -> Path:
    """Writes a checkpoint whose greedy text goes around a cycle of tokens, and errs after share_wrong of them.

    share_wrong: None for text that layers and head draw at random, among logits that lie close. seed: of the cycle and
    all weights, equal for target and draft. The demo pair's tokenizer goes with it. Returns the directory.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(np.arange(1, CYCLE))  # id 0 ends texts
    is_wrong, is_random = rng.random(order.size) < (share_wrong or 0.0), share_wrong is None
    followers = np.where(is_wrong, np.roll(order, -2), np.roll(order, -1))  # a wrong one is on the cycle too
    generator = torch.Generator(device).manual_seed(seed)
    hidden, inner, vocab_size = spec.hidden_size, spec.intermediate_size, max(spec.vocab_size, CYCLE)
    heads, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim

    def drawn(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(rows, columns, generator=generator, device=device)).bfloat16().cpu()

    embedding = drawn(vocab_size, hidden)
    head = drawn(vocab_size, hidden) if is_random else torch.zeros_like(embedding)
    if not is_random:  # two may share a wrong follower
        head.index_add_(0, torch.as_tensor(followers), embedding[torch.as_tensor(order)])
    layer = {
        f"self_attn.{name}_proj": drawn(rows, hidden, hidden**-0.5)
        for name, rows in zip("qkv", (heads, kv, kv), strict=True)
    }
    layer |= {f"mlp.{name}_proj": drawn(inner, hidden, hidden**-0.5) for name in ("gate", "up")}
    layer |= {
        "self_attn.o_proj": drawn(hidden, heads, is_random * heads**-0.5),
        "mlp.down_proj": drawn(hidden, inner, is_random * inner**-0.5),
    }
    layer |= {f"self_attn.{name}_norm": torch.ones(spec.head_dim) for name in "qk"}
    layer |= {name: torch.ones(hidden) for name in ("input_layernorm", "post_attention_layernorm")}
    tensors = {"model.embed_tokens": embedding, "lm_head": head, "model.norm": torch.ones(hidden)}
    for index in range(spec.num_layers):
        tensors |= {f"model.layers.{index}.{name}": tensor.clone() for name, tensor in layer.items()}
    directory.mkdir()
    stored = {f"{name}.weight": tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(stored, directory / "model.safetensors")
    config = {"model_type": "qwen3", "hidden_act": "silu", "eos_token_id": 0, "vocab_size": vocab_size}
    config |= {
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "tie_word_embeddings": False,
    }
    config |= {"num_key_value_heads": spec.num_kv_heads, "max_position_embeddings": spec.max_context}
    config |= {name: getattr(spec, name) for name in ("hidden_size", "head_dim", "intermediate_size", "rope_theta")}
    (directory / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((DEMO_PAIR / "target" / name).read_bytes())
    return directory
