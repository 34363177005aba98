"""What formats of weights do to a model, over its own answers: engines beside one with float32 matrices.

    python scripts/check_weights.py REFERENCE_DIR ENGINE_DIR... --prompts FILE [--chat] [--texts FILE]

The reference answers each prompt greedily; then every engine reads prompt and answer, and its logits at the answer's
tokens are compared: how often the best token is the same, how far logits differ, and how much less likely the answer
becomes (ratio of perplexities). Prints a table, and writes it as JSON where --json says. --texts writes the
conversations as plain text, for other programs to read.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from faser_backend.config import EngineConfig
from faser_backend.core.batch import RowBatch
from faser_backend.manifest import EngineManifest
from faser_backend.pipeline.model_call import run_model
from faser_backend.serving.runtimes import open_runtime
from lab.options import add_prompt_options, asked_prompts


class Reader:
    """The target of an engine directory, with room for one text."""

    def __init__(self, engine_dir: Path, max_tokens: int) -> None:
        manifest = EngineManifest.load(engine_dir)
        self.title = f"{engine_dir.name}: {manifest.runtime}, {manifest.target.weight_format.title}"
        self.end_ids = set(manifest.end_ids)
        runtime = open_runtime(engine_dir, manifest, EngineConfig())
        self._num_blocks = -(-max_tokens // manifest.kv_block_size)
        pool = runtime.open_pool(manifest.target, self._num_blocks)
        self._runner = runtime.open_runner(manifest.target, runtime.menu.whole, pool)

    def logits(self, token_ids: list[int], context_len: int, num_logits: int) -> np.ndarray:
        """The last num_logits rows of tokens that follow context_len others: [num_logits, V], lent."""
        num_rows = len(token_ids)
        rows = RowBatch(
            token_ids=np.array(token_ids),
            cu_rows=np.array([0, num_rows]),
            context_lens=np.array([context_len]),
            block_tables=np.arange(self._num_blocks)[None],
            logit_rows=np.arange(num_rows - num_logits, num_rows),
        )
        return np.asarray(run_model(self._runner, rows))

    def answer(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Greedily, up to an end token, which is left out."""
        text, logits = list(prompt), self.logits(prompt, 0, 1)
        while len(text) < len(prompt) + max_tokens:
            token = int(logits[0].argmax())
            if token in self.end_ids:
                break
            text.append(token)
            logits = self.logits([token], len(text) - 1, 1)
        return text[len(prompt) :]


def log_likelihoods(logits: np.ndarray, token_ids: list[int]) -> np.ndarray:
    """Of each row's token."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted[np.arange(len(token_ids)), token_ids] - np.log(np.exp(shifted).sum(axis=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference_dir", type=Path)
    parser.add_argument("engine_dirs", type=Path, nargs="+")
    add_prompt_options(parser)
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    prompts = asked_prompts(args, args.reference_dir).prompts[: args.num_prompts]
    longest = max(len(prompt.token_ids) for prompt in prompts) + args.max_tokens
    reference = Reader(args.reference_dir, longest)
    readers = [Reader(engine_dir, longest) for engine_dir in args.engine_dirs]
    found: dict[str, list[np.ndarray]] = {reader.title: [] for reader in readers}
    largest = dict.fromkeys(found, 0.0)
    texts = []
    for prompt in tqdm(prompts, disable=None):
        asked = list(prompt.token_ids)
        answer = reference.answer(asked, args.max_tokens)
        if not answer:
            continue
        texts.append([*asked, *answer])
        read = texts[-1][:-1]
        expected = reference.logits(read, 0, len(answer)).copy()
        likelihoods = log_likelihoods(expected, answer)
        for reader in readers:
            logits = reader.logits(read, 0, len(answer))
            differences = np.abs(logits - expected)
            largest[reader.title] = max(largest[reader.title], float(differences.max()))
            is_same = logits.argmax(axis=1) == expected.argmax(axis=1)
            found[reader.title].append(
                np.stack([is_same, differences.mean(axis=1), likelihoods - log_likelihoods(logits, answer)])
            )
    rows = []
    for title, parts in found.items():
        is_same, difference, lost = np.concatenate(parts, axis=1)
        rows.append({
            "engine": title,
            "num_rows": is_same.size,
            "same_best_token": float(is_same.mean()),
            "mean_logit_difference": float(difference.mean()),
            "max_logit_difference": largest[title],
            "perplexity_ratio": float(np.exp(lost.mean())),
        })  # fmt: skip
    print(f"reference: {reference.title}; {len(texts)} answers, {rows[0]['num_rows']} tokens")
    for row in rows:
        print(
            f"{row['engine']}: same best token {row['same_best_token']:.2%}, logits differ by "
            f"{row['mean_logit_difference']:.3f} on average, {row['max_logit_difference']:.2f} at most; perplexity "
            f"{row['perplexity_ratio']:.4f}x"
        )
    if args.texts is not None:
        tokenizer = Tokenizer.from_file(str(args.reference_dir / "tokenizer.json"))
        args.texts.write_text("\n".join(tokenizer.decode(text, skip_special_tokens=False) for text in texts))
    if args.json is not None:
        args.json.write_text(json.dumps({"reference": reference.title, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
