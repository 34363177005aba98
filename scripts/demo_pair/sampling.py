"""Text from a model, in batches: the target's own outputs, on which the draft is trained and measured.

All rows of a batch have prompts of one length, so that a plain key/value cache is enough.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .corpus import WindowSampler
from .model import TARGET_SHAPE, Llama
from .training import AUTOCAST, load_model

SAMPLE_LEN = 512


@dataclass(frozen=True)
class SampleGroup:
    """A kind of samples: `share` of all rows, a corpus prefix of `prefix_len` tokens, then the target's own."""

    temperature: float  # 0 is greedy
    prefix_len: int
    share: float


# Greedy rows get long prefixes: small models soon loop, and loops teach the draft little.
GROUPS = (
    SampleGroup(temperature=1.0, prefix_len=96, share=0.5),
    SampleGroup(temperature=0.7, prefix_len=128, share=0.3),
    SampleGroup(temperature=0.0, prefix_len=384, share=0.2),
)


def pick(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """One token id per row of `logits` `[batch, vocab_size]`: `[batch]`, drawn through the cumulative sums."""
    if temperature == 0:
        return logits.argmax(-1)
    sums = torch.softmax(logits.float() / temperature, dim=-1).cumsum(-1)
    points = torch.rand(len(logits), 1, generator=generator) * sums[:, -1:]
    return torch.searchsorted(sums, points, right=True)[:, 0].clamp_max(logits.shape[-1] - 1)


@torch.no_grad()
def generate(model: Llama, prompts: Tensor, total_len: int, temperature: float, generator: torch.Generator) -> Tensor:
    """Continues `prompts` `[batch, prompt_len]` to `[batch, total_len]`; end-of-text does not stop a row."""
    batch, prompt_len = prompts.shape
    ids = torch.empty(batch, total_len, dtype=torch.long)
    ids[:, :prompt_len] = prompts
    caches = model.new_caches(batch, torch.bfloat16)
    with torch.autocast(**AUTOCAST):
        logits = model(prompts, caches)[:, -1]
        for position in range(prompt_len, total_len):
            ids[:, position] = pick(logits, temperature, generator)
            if position + 1 < total_len:
                logits = model(ids[:, position : position + 1], caches, position)[:, -1]
    return ids


def batch_plan(num_batches: int) -> list[SampleGroup]:
    """The group of each batch: shares are kept at every point of the run, not only at its end."""
    plan, counts = [], dict.fromkeys(GROUPS, 0)
    for done in range(num_batches):
        group = max(GROUPS, key=lambda g: g.share * (done + 1) - counts[g])
        counts[group] += 1
        plan.append(group)
    return plan


def sample_target(build_dir: Path, num_batches: int, batch_size: int, seed: int) -> None:
    """The sample stage: writes samples.npy `[num_batches * batch_size, SAMPLE_LEN]` uint16, batch by batch."""
    target = load_model(TARGET_SHAPE, build_dir / "target.safetensors")
    path = build_dir / "samples.npy"
    done = np.load(path) if path.exists() else np.zeros((0, SAMPLE_LEN), np.uint16)
    stream = np.load(build_dir / "train.npy")
    for index, group in enumerate(batch_plan(num_batches)):
        if (index + 1) * batch_size <= len(done):
            continue
        started = time.monotonic()
        prompts = WindowSampler(stream, seed=(seed + 1) * 100_003 + index).next_batch(batch_size, group.prefix_len)
        generator = torch.Generator().manual_seed(seed * 100_003 + index)
        prompts = torch.from_numpy(prompts[:, : group.prefix_len])
        rows = generate(target, prompts, SAMPLE_LEN, group.temperature, generator)
        done = np.concatenate([done, rows.numpy().astype(np.uint16)])
        np.save(path, done)
        speed = batch_size * (SAMPLE_LEN - group.prefix_len) / (time.monotonic() - started)
        print(f"samples {index + 1}/{num_batches}: T={group.temperature}, {speed:.0f} tokens/s", flush=True)
