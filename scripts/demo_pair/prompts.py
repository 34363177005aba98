"""Held-out prompts for code completion: file context, then a function's head and docstring.

A prompt ends where a body is due: after the docstring's closing line, or, for undocumented
functions, after the `def ...:` line. Knows nothing of models.
"""

import ast
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from .corpus import SourceFile, read_standard_library

MIN_TOKENS, MAX_TOKENS = 64, 200
MAX_PER_FILE = 3
NUM_PROMPTS = 80


@dataclass(frozen=True)
class FunctionHead:
    """Line numbers, from 1: the first line, the last of the signature, the last of the docstring (or None)."""

    first_line: int
    signature_end: int
    docstring_end: int | None


def function_heads(text: str) -> list[FunctionHead]:
    """The functions of a source text, in order, whose body starts on a line of its own."""
    heads = []
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        first = node.body[0]
        has_docstring = ast.get_docstring(node) is not None
        last_before_code = first.end_lineno if has_docstring else first.lineno - 1
        if first.lineno > node.lineno and node.end_lineno > last_before_code:
            heads.append(FunctionHead(node.lineno, first.lineno - 1, first.end_lineno if has_docstring else None))
    return sorted(heads, key=lambda head: head.first_line)


def cut_prompt(
    tokenizer: Tokenizer, lines: list[str], first_line: int, last_line: int, max_tokens: int
) -> tuple[str, int] | None:
    """The text up to `last_line`, with as many whole lines before `first_line` as `max_tokens` allows.

    Returns (prompt, num_tokens), or None where it cannot be made to fit.
    """

    def count(start: int) -> int:
        return len(tokenizer.encode("".join(lines[start:last_line]), add_special_tokens=False).ids)

    start = first_line - 1
    if count(start) > MAX_TOKENS:
        return None
    while start > 0 and count(start - 1) <= max_tokens:
        start -= 1
    while start < first_line - 1 and not lines[start].strip():
        start += 1
    num_tokens = count(start)
    return ("".join(lines[start:last_line]), num_tokens) if num_tokens >= MIN_TOKENS else None


def prompts_of_file(tokenizer: Tokenizer, source: SourceFile, rng: np.random.Generator) -> list[dict]:
    """Up to MAX_PER_FILE prompts of a file, documented functions first, in a random choice."""
    lines = source.text.splitlines(keepends=True)
    heads = function_heads(source.text)
    heads = [heads[i] for i in rng.permutation(len(heads))]
    heads.sort(key=lambda head: head.docstring_end is None)
    found = []
    for head in heads:
        is_bare = head.docstring_end is None
        last_line = head.signature_end if is_bare else head.docstring_end
        cut = cut_prompt(tokenizer, lines, head.first_line, last_line, int(rng.integers(90, MAX_TOKENS + 1)))
        if cut and cut[0].endswith("\n"):
            ends_after = "signature" if is_bare else "docstring"
            found.append({"source": source.path, "prompt": cut[0], "num_tokens": cut[1], "ends_after": ends_after})
        if len(found) == MAX_PER_FILE:
            break
    return found


def choose_prompts(tokenizer: Tokenizer, files: list[SourceFile], seed: int) -> list[dict]:
    """At most MAX_PER_FILE prompts of each held-out file, NUM_PROMPTS in all.

    Those that end after a docstring come first; within a kind, every file has its turn before a file's second.
    """
    rng = np.random.default_rng(seed)
    per_file = [prompts_of_file(tokenizer, source, rng) for source in files]
    rounds = [found[turn] for turn in range(MAX_PER_FILE) for found in per_file if len(found) > turn]
    rounds.sort(key=lambda prompt: prompt["ends_after"] != "docstring")
    return [{"id": f"heldout-{i:03d}", **prompt} for i, prompt in enumerate(rounds[:NUM_PROMPTS])]


def write_prompts(tokenizer: Tokenizer, path: Path, seed: int) -> list[dict]:
    """Writes one JSON object per line: id, source, prompt, num_tokens, ends_after."""
    files = [f for f in read_standard_library() if f.is_held_out]
    prompts = choose_prompts(tokenizer, files, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(p) + "\n" for p in prompts))
    return prompts
