"""Structured output: reads and compiles the grammars that answers must follow.

llguidance compiles JSON schemas, regular expressions and context-free grammars, and returns the tokens that may come
next. Unlike xgrammar it rolls back a drafted path and needs neither torch nor transformers. A grammar is compiled once,
on a thread beside the step loop; the library limits the cost.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag
from llguidance.gbnf_to_lark import gbnf_to_lark

from faser_backend.core.errors import ErrorCode, FaserError, RequestError
from faser_backend.core.request import GUIDE, Grammar

GUIDE_TYPE = "guided_decoding_guide_type"
TYPES = ("json", "json_schema", "regex", "ebnf_grammar", "structural_tag")
MAX_GUIDE_BYTES = 256 << 10
# The library converts GBNF to Lark in Python, with one pass over the non-terminals per rule.
MAX_GBNF_BYTES = 32 << 10
MAX_GBNF_WORK = 1 << 20  # rules times bytes: a quarter of a second
MAX_TAGS = 256  # structures per structural tag, and triggers
MAX_COMPILED = 64  # grammars that stay compiled
MAX_WAITING = 64  # grammars that wait to be compiled
# The library's own limits are too high for a shared server. Compiling runs beside the engine, but the engine waits for
# a token's mask and for forced text, which are computed between two steps.
LIMITS = LLParserLimits(
    initial_lexer_fuel=100_000,  # a tenth: a regular expression may cost 50 ms instead of a second
    max_grammar_size=20_000,  # a 25th: schemas with thousands of properties take seconds
    step_max_items=5_000,  # a tenth: per mask or forced text
    verbose_errors=False,
)
MAX_TRIED = 64  # forced tokens at the start, tried while compiling
# As json.dumps writes: a small model that may indent does so until its tokens are spent.
JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
Answer = TypeVar("Answer")
OnDone = Callable[[Grammar | FaserError], None]
_LARK_LINE = re.compile(r"\s*(%llguidance\b|start\s*:)")  # grammars without such a line are GBNF, llama.cpp's


def read_guide(kind: str, guide: str) -> str:
    """Returns a grammar as the library's text. guide: "" for kind "json".

    Raises RequestError for a guide that is not of its kind; compiling may find further errors.
    """
    if kind not in TYPES:
        raise RequestError(GUIDE_TYPE, kind, f"must be one of {', '.join(TYPES)}")
    if kind != "json" and not guide:
        raise RequestError(GUIDE, guide, f"a {kind} must not be empty")
    if len(guide.encode()) > MAX_GUIDE_BYTES:
        raise RequestError(GUIDE, guide, f"must be at most {MAX_GUIDE_BYTES} bytes")
    is_gbnf = kind == "ebnf_grammar" and not any(map(_LARK_LINE.match, guide.splitlines()))
    if is_gbnf:
        _check_gbnf(guide)
    try:
        if kind == "json":
            return LLMatcher.grammar_from_json_schema("{}", defaults=JSON_STYLE)
        if kind == "json_schema":
            return LLMatcher.grammar_from_json_schema(guide, defaults=JSON_STYLE)
        if kind == "regex":
            return LLMatcher.grammar_from_regex(guide)
        if kind == "ebnf_grammar":
            return LLMatcher.grammar_from_lark(gbnf_to_lark(guide) if is_gbnf else guide)
        return _structural_tag(json.loads(guide))
    except RecursionError:
        raise RequestError(GUIDE, guide, "is nested too deeply") from None
    except Exception as error:  # the library's converters raise plain exceptions
        raise RequestError(GUIDE, guide, f"is not a valid {kind}: {_first_line(error)}") from None


def _check_gbnf(guide: str) -> None:
    num_bytes, num_rules = len(guide.encode()), guide.count("::=")
    if num_bytes > MAX_GBNF_BYTES:
        limit = f"must be at most {MAX_GBNF_BYTES} bytes in GBNF; Lark may have {MAX_GUIDE_BYTES}"
        raise RequestError(f"{GUIDE} length", num_bytes, limit)
    if num_rules * num_bytes > MAX_GBNF_WORK:
        limit = f"{num_bytes} bytes of GBNF may have {MAX_GBNF_WORK // num_bytes} rules at most; Lark may have more"
        raise RequestError(f"{GUIDE} rules", num_rules, limit)


def _structural_tag(tag: Any) -> str:
    """Converts XGrammar's {"structures": [{"begin", "schema", "end"}], "triggers": [...]}.

    The text is free, but a structure that has begun must be completed.
    """
    structures = tag["structures"]
    for name in ("structures", "triggers"):
        if len(tag[name]) > MAX_TAGS:
            raise ValueError(f"{len(tag[name])} {name}: at most {MAX_TAGS} are allowed")
    tags = []
    for structure in structures:
        begin = structure["begin"]
        trigger = next((each for each in tag["triggers"] if begin.startswith(each)), None)
        if trigger is None:
            raise ValueError(f"begin = {begin!r}: must start with a trigger")
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=structure["schema"], end=structure["end"]))
    if not tags:
        raise ValueError("structures is empty")
    return StructTag.to_grammar(tags, assume_special=False)


class LlgState:
    """A core.request.GrammarState, and the core.request.Grammar of answers that start from it.

    A matcher that has reached a limit keeps its error.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._mask = np.zeros(-(-vocab_size // 32), np.int32)

    def start(self) -> LlgState:
        return LlgState(self._matcher.deep_copy(), self._vocab_size)

    def advance(self, tokens: list[int]) -> int:
        return self._ask(self._matcher.try_consume_tokens, tokens) if tokens else 0

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self._ask(self._matcher.rollback, num_tokens)

    def allowed(self) -> np.ndarray:
        self._ask(self._matcher.unsafe_compute_mask_ptr, self._mask.ctypes.data, self._mask.nbytes)
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little", count=self._vocab_size)
        return bits.view(np.bool_)

    def forced(self) -> list[int]:
        return self._ask(self._matcher.compute_ff_tokens)

    def _ask(self, ask: Callable[..., Answer], *arguments: Any) -> Answer:
        try:
            answer = ask(*arguments)
            reason = _first_line(self._matcher.get_error()) if self._matcher.is_error() else ""
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in the library is a BaseException
            raise RequestError(GUIDE, "given", f"the grammar failed: {_first_line(error)}") from None
        if reason:
            raise RequestError(GUIDE, "given", f"a limit of grammars was reached: {reason}")
        return answer


class GuideCompiler:
    """A compiler for the grammars of one model's requests, on its own thread. Thread-safe."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, end_ids: tuple[int, ...]) -> None:
        self._tokenizer_file, self._vocab_size, self.end_ids = tokenizer_file, vocab_size, end_ids
        self._tokenizer: LLTokenizer | None = None  # loaded with the first grammar, in a third of a second
        self._compiled: OrderedDict[str, LlgState] = OrderedDict()
        self._waiting: dict[str, list[OnDone]] = {}  # by grammar
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, "guides")

    def compile_later(self, guide: str, on_done: OnDone) -> None:
        """Calls on_done with the grammar or its error: at once if it is compiled, else on the compiler's thread.

        Raises RequestError if too many grammars wait. Requests for the same grammar wait for it together.
        """
        with self._lock:
            if (known := self._known(guide)) is None:
                if guide not in self._waiting:
                    if len(self._waiting) >= MAX_WAITING:
                        limit = f"{MAX_WAITING} grammars wait to be compiled; retry later"
                        raise RequestError(GUIDE, "given", limit, code=ErrorCode.QUEUE_FULL)
                    self._waiting[guide] = []
                    self._pool.submit(self._run, guide)
                self._waiting[guide].append(on_done)
                return
        on_done(known)

    def compile(self, guide: str) -> Grammar:
        """Compiles a guide of read_guide. Raises RequestError with the library's message."""
        with self._lock:
            if (known := self._known(guide)) is not None:
                return known
        if not self.end_ids:
            raise RequestError(GUIDE, "given", "needs a model with an end token")
        if self._tokenizer is None:
            text = self._tokenizer_file.read_text(encoding="utf-8")
            self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=list(self.end_ids))
        matcher = LLMatcher(self._tokenizer, guide, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise RequestError(GUIDE, "given", _first_line(matcher.get_error()))
        grammar = LlgState(matcher, self._vocab_size)
        grammar.allowed()  # the first mask costs most; copies of the state share it
        trial = grammar.start()
        trial.advance(trial.forced()[:MAX_TRIED])
        with self._lock:
            self._compiled[guide] = grammar
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return grammar

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _known(self, guide: str) -> LlgState | None:
        """Call under the lock."""
        if guide in self._compiled:
            self._compiled.move_to_end(guide)
        return self._compiled.get(guide)

    def _run(self, guide: str) -> None:
        try:
            result: Grammar | FaserError = self.compile(guide)
        except FaserError as error:
            result = error
        except BaseException as error:  # a panic in the library must neither end the thread nor leave a request waiting
            result = RequestError(GUIDE, "given", f"could not be compiled: {type(error).__name__}")
        with self._lock:
            waiting = self._waiting.pop(guide)
        for on_done in waiting:
            on_done(result)


def _first_line(error: object) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
