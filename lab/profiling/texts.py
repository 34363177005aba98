"""What the target writes while `faser profile` listens: its own text, or continuations of given prompts.

Without prompts no data is needed: sampled texts start where texts start, at the end token, and greedy ones
at a random token behind it, or all of them would be the same.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from faser_backend.core.errors import ConfigError
from faser_backend.core.request import Limits, Request, SamplingParams
from faser_backend.manifest import EngineManifest
from faser_backend.serving.tokenizer import TextTokenizer

TEMPERATURES = (0.0, 0.8, 0.0, 1.0)  # half greedy
TOKENS_EACH = 64  # greedy texts of small models loop when they grow long, and loops are easy to draft
MAX_PROMPT_TOKENS = 256


def read_prompts(path: Path, engine_dir: Path, manifest: EngineManifest) -> list[np.ndarray]:
    """Token ids of each prompt: lines of JSON with "prompt" where the name ends in .jsonl, else lines of text.

    Raises ConfigError naming file, line and what is missing.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts = {path}: not readable as text ({error})") from None
    tokenizer = TextTokenizer.from_file(engine_dir / manifest.tokenizer.name)
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            text = _prompt_of(line, f"prompts = {path}, line {number}") if path.suffix == ".jsonl" else line
            token_ids = tokenizer.encode(text)
            if not token_ids:
                raise ConfigError(f"prompts = {path}, line {number}: the tokenizer makes no token of it")
            prompts.append(np.array(token_ids, np.int64))
    if len(prompts) < 2:
        raise ConfigError(f"prompts = {path}: {len(prompts)} prompts; at least 2 are needed, one of them held out")
    return prompts


def calibration_requests(
    prompts: list[np.ndarray], end_ids: tuple[int, ...], limits: Limits, num_requests: int, rng: np.random.Generator
) -> list[tuple[int, Request]]:
    """(group, request) pairs, every prompt at all temperatures; the target's own text where prompts is empty.

    Requests of one prompt are of one group. None of them ends early.
    """
    room = limits.max_context - TOKENS_EACH
    longest = max(min(MAX_PROMPT_TOKENS, room), 2)
    requests = []
    for index in range(num_requests):
        text, temperature = index // len(TEMPERATURES), TEMPERATURES[index % len(TEMPERATURES)]
        if prompts:
            group = text % len(prompts)
            prompt = prompts[group][-longest:]
        else:
            group = text
            prompt = np.array(end_ids[:1], np.int64)
            if temperature == 0.0 or not end_ids:
                prompt = np.append(prompt, rng.integers(0, limits.vocab_size))
        max_tokens = min(TOKENS_EACH, limits.max_context - prompt.size)
        sampling = SamplingParams(temperature=temperature, seed=index)
        requests.append((group, Request(f"calibration-{index}", prompt, max_tokens, sampling)))
    return requests


def _prompt_of(line: str, place: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f'{place}: not a JSON object with "prompt" ({type(error).__name__}: {error})') from None
    if not isinstance(prompt, str):
        raise ConfigError(f"{place}: prompt = {prompt!r}: must be a string")
    return prompt
