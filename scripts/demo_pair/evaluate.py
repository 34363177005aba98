"""What the pair is worth on held-out files: bits per byte, agreement, overlap, loops, cost.

Everything is measured with weights rounded to fp16 (as they are shipped) and fp32 arithmetic.
"""

import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from .corpus import END_OF_TEXT_ID
from .model import DRAFT_SHAPE, TARGET_SHAPE, Llama, ModelShape
from .prompts import write_prompts
from .sampling import generate
from .training import load_model

NUM_NEW = 192
PROMPT_LEN = 64
NUM_DRAFT_TOKENS = 5
LONGEST_PERIOD = 48
LOOP_LEN = 48  # a loop: this many tokens, and at least three rounds, of one period


def load_rounded(shape: ModelShape, path: Path) -> Llama:
    """The model with fp16-rounded weights, as fp32 for arithmetic."""
    model = load_model(shape, path)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.half().float())
    return model.eval().requires_grad_(False)


def loop_start(ids: np.ndarray) -> int:
    """The first index at which a lasting loop begins in `ids` `[num_tokens]`; num_tokens if there is none.

    A loop is a stretch with one period of at most LONGEST_PERIOD tokens that goes on to the end.
    """
    best = len(ids)
    for period in range(1, LONGEST_PERIOD + 1):
        is_same = ids[period:] == ids[:-period]
        differing = np.flatnonzero(~is_same)
        start = int(differing[-1]) + 1 if len(differing) else 0
        if len(ids) - start >= max(LOOP_LEN, 3 * period):
            best = min(best, start)
    return best


def overlap(target_logits: Tensor, draft_logits: Tensor, temperature: float) -> Tensor:
    """1 - TV of the two distributions = the chance that a draft token is accepted, `[...]`."""
    p, q = ((t / temperature).softmax(-1) for t in (target_logits, draft_logits))
    return torch.minimum(p, q).sum(-1)


def compare(target: Llama, draft: Llama, windows: Tensor, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """(greedy agreement, 1 - TV) of the next-token predictions at each place of `windows` `[rows, len]`."""
    agreed, overlaps = [], []
    for part in windows.split(8):
        a, b = target(part), draft(part)
        agreed.append(a.argmax(-1) == b.argmax(-1))
        overlaps.append(overlap(a, b, temperature))
    return torch.cat(agreed).numpy(), torch.cat(overlaps).numpy()


def emitted_per_step(acceptance: np.ndarray, num_draft_tokens: int) -> float:
    """Mean tokens of a speculative step started at any place of a row, bonus or recovered token included.

    `acceptance` `[num_places]` are the chances along the row: 1 + a1 + a1 a2 + ... (Leviathan et al., 2023).
    """
    windows = np.lib.stride_tricks.sliding_window_view(acceptance, num_draft_tokens)
    return float(1 + np.cumprod(windows, axis=1).sum(1).mean())


def own_samples(target: Llama, draft: Llama, prompts: Tensor, temperature: float, seed: int) -> dict:
    """Continues held-out prompts by the target and compares the draft along the way, before loops.

    `temperature` 0 is greedy; the overlap is then the agreement.
    """
    ids = generate(target, prompts, PROMPT_LEN + NUM_NEW, temperature, torch.Generator().manual_seed(seed))
    starts = [loop_start(row) for row in ids[:, PROMPT_LEN:].numpy()]
    agreed, overlaps = compare(target, draft, ids, temperature or 1.0)
    chances = agreed.astype(float) if temperature == 0 else overlaps
    # The prediction of token i is made at place i - 1.
    kept = [slice(PROMPT_LEN - 1, PROMPT_LEN - 1 + start) for start in starts]
    rows = [chances[i, places] for i, places in enumerate(kept)]
    steps = [emitted_per_step(row, NUM_DRAFT_TOKENS) for row in rows if len(row) >= NUM_DRAFT_TOKENS]
    return {
        "num_rows": len(ids),
        "num_places_before_loops": int(sum(starts)),
        "greedy_agreement": float(np.concatenate([agreed[i, s] for i, s in enumerate(kept)]).mean()),
        "acceptance": float(np.concatenate(rows).mean()),
        "acceptance_with_loops": float(chances[:, PROMPT_LEN - 1 : -1].mean()),
        f"emitted_per_step_{NUM_DRAFT_TOKENS}_draft_tokens": float(np.mean(steps)),
        "loops_share": sum(start < NUM_NEW for start in starts) / len(starts),
    }


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """Bytes of text of each token `[vocab_size]`: in byte-level BPE a token's string has one letter per byte."""
    lengths = np.array([len(tokenizer.id_to_token(i)) for i in range(tokenizer.get_vocab_size())])
    lengths[END_OF_TEXT_ID] = 0
    return lengths


def label_nats(logits: Tensor, labels: Tensor) -> np.ndarray:
    """-log p(label) in nats, `[rows, len]`."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels).numpy()


def held_out_text(target: Llama, draft: Llama, held_out: np.ndarray, lengths: np.ndarray, window_len: int) -> dict:
    """Bits per byte of both, agreement and overlap, at every place of the held-out stream.

    The stream is cut into windows of `window_len` that know nothing of each other; the end-of-text
    tokens between files are bits to pay but no bytes. A rest shorter than a window is left out.
    """
    num_rows = (len(held_out) - 1) // window_len
    stream = torch.from_numpy(held_out[: num_rows * window_len + 1].astype(np.int64))
    inputs, labels = stream[:-1].view(num_rows, window_len), stream[1:].view(num_rows, window_len)
    columns: dict[str, list[np.ndarray]] = {"target": [], "draft": [], "agreed": [], "overlap": []}
    for ids, wanted in zip(inputs.split(4), labels.split(4), strict=True):
        a, b = target(ids), draft(ids)
        columns["target"].append(label_nats(a, wanted))
        columns["draft"].append(label_nats(b, wanted))
        columns["agreed"].append((a.argmax(-1) == b.argmax(-1)).numpy())
        columns["overlap"].append(overlap(a, b, 1.0).numpy())
    table = {name: np.concatenate(parts) for name, parts in columns.items()}  # each [num_rows, window_len]
    num_bytes = lengths[labels.numpy()]  # [num_rows, window_len]

    def bits_per_byte(name: str, places: slice) -> float:
        return float(table[name][:, places].sum() / np.log(2) / num_bytes[:, places].sum())

    everywhere, half = slice(None), window_len // 2
    return {
        "context": window_len,
        "num_places": int(num_bytes.size),
        "target_nats_per_token": float(table["target"].mean()),
        "target_bits_per_byte": bits_per_byte("target", everywhere),
        "target_bits_per_byte_second_half": bits_per_byte("target", slice(half, None)),
        "draft_nats_per_token": float(table["draft"].mean()),
        "draft_bits_per_byte": bits_per_byte("draft", everywhere),
        "draft_bits_per_byte_second_half": bits_per_byte("draft", slice(half, None)),
        "greedy_agreement": float(table["agreed"].mean()),
        "greedy_agreement_second_half": float(table["agreed"][:, half:].mean()),
        "one_minus_tv": float(table["overlap"].mean()),
    }


@torch.no_grad()
def evaluate(build_dir: Path, seed: int, max_len: int = 1024) -> None:
    """The evaluate stage: writes prompts.jsonl and figures.json into `build_dir`."""
    started = time.monotonic()
    tokenizer = Tokenizer.from_file(str(build_dir / "tokenizer.json"))
    target = load_rounded(TARGET_SHAPE, build_dir / "target.safetensors")
    draft = load_rounded(DRAFT_SHAPE, build_dir / "draft_refined.safetensors")
    held_out = np.load(build_dir / "held_out.npy")
    prompts = write_prompts(tokenizer, build_dir / "prompts.jsonl", seed)
    encoded = [tokenizer.encode(p["prompt"], add_special_tokens=False).ids[-PROMPT_LEN:] for p in prompts]
    ids = torch.tensor(encoded)  # [num_prompts, PROMPT_LEN]
    figures = {
        "held_out_text": held_out_text(target, draft, held_out, token_bytes(tokenizer), max_len),
        "own_samples_t0.8": own_samples(target, draft, ids.repeat(2, 1), 0.8, seed),
        "own_samples_greedy": own_samples(target, draft, ids, 0.0, seed),
        "flops_per_token": {"target": TARGET_SHAPE.flops_per_token, "draft": DRAFT_SHAPE.flops_per_token},
        "draft_cost_share": DRAFT_SHAPE.flops_per_token / TARGET_SHAPE.flops_per_token,
        "num_params": {
            name: sum(p.numel() for p in model.parameters()) for name, model in (("target", target), ("draft", draft))
        },
        "evaluate_minutes": (time.monotonic() - started) / 60,
    }
    (build_dir / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2), flush=True)
