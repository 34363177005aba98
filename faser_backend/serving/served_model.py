"""Describes a served model to the programs that read requests: tokenizer, limits and end tokens.

The engine's process sends a `ServedModel` to the frontends and to the OpenAI server (triton/link.py). The Python API
makes its own from the engine directory.
"""

from __future__ import annotations

from dataclasses import dataclass

from faser_backend.core.request import Limits
from faser_backend.manifest import EngineManifest
from faser_backend.text.guides import GuideCompiler
from faser_backend.text.tokenizer import TextTokenizer

MIN_TEXT_BYTES = 64 << 10
MAX_TOKEN_BYTES = 16  # bytes per token that a text may have at most, even if the vocabulary has longer tokens


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Everything that turns a client's prompt into a request to the engine."""

    name: str
    tokenizer: TextTokenizer
    limits: Limits
    end_ids: tuple[int, ...]
    kv_block_size: int
    max_text_bytes: int  # of one prompt or conversation before it is tokenised
    adapters: tuple[str, ...] = ()  # names; an adapter's lora_task_id is its position, counted from 1
    lora_name: str = ""  # the adapter that its requests use

    @classmethod
    def of(
        cls,
        name: str,
        manifest: EngineManifest,
        limits: Limits,
        tokenizer: TextTokenizer,
        max_text_bytes: int | None = None,
    ) -> ServedModel:
        """max_text_bytes: None allows what may fit into the context."""
        if max_text_bytes is None:
            token_bytes = min(tokenizer.longest_token, MAX_TOKEN_BYTES)
            max_text_bytes = max(MIN_TEXT_BYTES, limits.max_context * token_bytes)
        return cls(name, tokenizer, limits, manifest.end_ids, manifest.kv_block_size, max_text_bytes)

    def guide_compiler(self) -> GuideCompiler:
        assert self.tokenizer.file is not None
        return GuideCompiler(self.tokenizer.file, self.limits.vocab_size, self.end_ids)
