"""Effects of formats of weights, or of --compute, on a model, over its own answers: engines beside a reference.

    python scripts/check_weights.py REFERENCE_DIR ENGINE_DIR... --prompts FILE [--chat] [--texts FILE]

The reference answers each prompt greedily; then every engine reads prompt and answer, and its logits at the answer's
tokens are compared: how often the best token is the same, how far logits differ, the distance of distributions (KL),
and how much less likely the answer becomes (ratio of perplexities). Prints a table, and writes it as JSON where --json
says. --texts writes the conversations as plain text, for other programs to read.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from faser_backend.lab.checks.options import add_prompt_options, asked_prompts, make_parser
from faser_backend.lab.checks.target import OpenTarget


def answer_to(target: OpenTarget, prompt: list[int], max_tokens: int) -> list[int]:
    """Generates greedily up to an end token, which is left out."""
    text, logits = list(prompt), target.logits(np.array(prompt))
    while len(text) < len(prompt) + max_tokens:
        token = int(logits[0].argmax())
        if token in target.manifest.end_ids:
            break
        text.append(token)
        logits = target.logits(np.array([token]), len(text) - 1)
    return text[len(prompt) :]


def log_likelihoods(logits: np.ndarray, token_ids: list[int]) -> np.ndarray:
    """[R] of each row's token."""
    return log_probs(logits)[np.arange(len(token_ids)), token_ids]


def log_probs(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def main() -> None:
    parser = make_parser(__doc__, "json", max_tokens=64)
    parser.add_argument("reference_dir", type=Path)
    parser.add_argument("engine_dirs", type=Path, nargs="+")
    add_prompt_options(parser)
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--texts", type=Path)
    args = parser.parse_args()
    prompts = asked_prompts(args, args.reference_dir).prompts[: args.num_prompts]
    longest = max(len(prompt.token_ids) for prompt in prompts) + args.max_tokens
    reference, *others = (OpenTarget(each, longest) for each in (args.reference_dir, *args.engine_dirs))
    found: list[list[np.ndarray]] = [[] for _ in others]  # of each answer [5, R]
    texts = []
    for prompt in tqdm(prompts, disable=None):
        answer = answer_to(reference, list(prompt.token_ids), args.max_tokens)
        if not answer:
            continue
        texts.append([*prompt.token_ids, *answer])
        read = np.array(texts[-1][:-1])
        expected = reference.logits(read, 0, len(answer)).copy()
        for other, parts in zip(others, found, strict=True):
            logits = other.logits(read, 0, len(answer))
            differences = np.abs(logits - expected)
            is_same = logits.argmax(axis=1) == expected.argmax(axis=1)
            lost = log_likelihoods(expected, answer) - log_likelihoods(logits, answer)
            likely = log_probs(expected)
            distance = (np.exp(likely) * (likely - log_probs(logits))).sum(axis=1)
            parts.append(np.stack([is_same, differences.mean(axis=1), differences.max(axis=1), distance, lost]))
    rows = []
    for engine_dir, other, parts in zip(args.engine_dirs, others, found, strict=True):
        is_same, mean, largest, distance, lost = np.concatenate(parts, axis=1)
        rows.append({
            "engine": title_of(engine_dir, other), "num_rows": is_same.size, "same_best_token": float(is_same.mean()),
            "mean_logit_difference": float(mean.mean()), "max_logit_difference": float(largest.max()),
            "kl": float(distance.mean()), "perplexity_ratio": float(np.exp(lost.mean())),
        })  # fmt: skip
    told = title_of(args.reference_dir, reference)
    print(f"reference: {told}; {len(texts)} answers, {rows[0]['num_rows']} tokens")
    for row in rows:
        print(
            f"{row['engine']}: same best token {row['same_best_token']:.2%}, logits differ by "
            f"{row['mean_logit_difference']:.3f} on average, {row['max_logit_difference']:.2f} at most; "
            f"KL {row['kl']:.1e}; perplexity {row['perplexity_ratio']:.4f}x"
        )
    if args.texts is not None:
        tokenizer = Tokenizer.from_file(str(args.reference_dir / "tokenizer.json"))
        args.texts.write_text("\n".join(tokenizer.decode(text, skip_special_tokens=False) for text in texts))
    if args.json is not None:
        args.json.write_text(json.dumps({"reference": told, "rows": rows}, indent=1) + "\n")


def title_of(engine_dir: Path, target: OpenTarget) -> str:
    manifest = target.manifest
    return f"{engine_dir.name}: {manifest.runtime}, {manifest.target.weight_format.title}, {manifest.compute}"
