"""Converts the tokenizer of a GGUF file to Hugging Face's tokenizer.json and tokenizer_config.json.

Two kinds are supported. Byte-level merges (BPE) first split text into words, by the file's pre-tokenizer. The merges of
SentencePiece follow from the scores of the tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from faser_backend.engines.checkpoint import (
    GENERIC_CLASS,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    CheckpointError,
    ConfigFields,
)
from faser_backend.engines.tokenizer_files import checked_template

KINDS = ("gpt2", "llama")  # byte-level merges; SentencePiece's merges
UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6  # types of tokens; 1 is a normal one
NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
ENDS = ("eos", "eot", "eom")  # end of text, of turn, of message
# Most files name one end; the model's other ends are known by their text, as in llama.cpp.
END_TOKENS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>")
SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # defaults
PREFIX = "tokenizer.ggml"
SPACE = "\u2581"  # as SentencePiece writes it
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS, _REST = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CAMEL = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"


class _Words(NamedTuple):
    """The rules by which a byte-level tokenizer splits text into words. Tokens are merged inside words only."""

    pattern: str | None = None  # None: GPT-2's
    has_single_digits: bool = False  # each digit is a word
    keeps_whole_words: bool = False  # a word that is a token stays whole, whatever the merges say
    adds_begin: bool = False  # default for files that do not say


_LLAMA3 = _Words(rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}", keeps_whole_words=True, adds_begin=True)
_QWEN2 = _Words(rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}")
_TEKKEN = _Words(
    rf"{_CAMEL}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    keeps_whole_words=True,
    adds_begin=True,
)
_SINGLE_DIGITS = _Words(has_single_digits=True)
PRE_TOKENIZERS = {
    "gpt-2": _Words(),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "tekken": _TEKKEN,
}


@dataclass(frozen=True, slots=True)
class GGUFVocabulary:
    """The tokenizer as the file describes it. Ids that only pad an embedding have no token."""

    path: Path
    kind: str  # one of KINDS
    pre_tokenizer: str | None
    tokens: dict[str, int]
    types: list[int]  # by id
    scores: list[float] | None  # by id
    merges: list[tuple[str, str]] | None  # best first
    named: dict[str, int]  # ids by the values of NAMED, and by ENDS
    adds_begin: bool | None  # None: the kind's default
    adds_end: bool
    adds_space_prefix: bool
    chat_template: str | None

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Returns the ids that end an answer, the end of text first."""
        known = [self.tokens[token] for token in END_TOKENS if token in self.tokens]
        return tuple(dict.fromkeys([self.named[name] for name in ENDS if name in self.named] + known))

    def of_types(self, *types: int) -> list[str]:
        """Returns the tokens of these types in the order of their ids."""
        return [token for token, token_id in self.tokens.items() if self.types[token_id] in types]


def convert_tokenizer(
    path: Path, metadata: dict[str, Any], max_context: int | None, directory: Path
) -> tuple[int, ...]:
    """Writes tokenizer.json and tokenizer_config.json into directory, and returns the ids that end an answer.

    path, metadata: the GGUF file and its metadata. Raises CheckpointError naming file, key and value.
    """
    vocabulary = _read_vocabulary(path, metadata)
    try:
        tokenizer = _byte_level(vocabulary) if vocabulary.kind == "gpt2" else _sentencepiece(vocabulary)
        special = [AddedToken(token, normalized=False, special=True) for token in vocabulary.of_types(CONTROL, UNKNOWN)]
        tokenizer.add_special_tokens(special)
        # These are matched whole, but stay text.
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in vocabulary.of_types(USER_DEFINED)])
        tokenizer.save(str(directory / TOKENIZER_FILE))
    except CheckpointError:
        raise
    except Exception as error:  # the library raises plain Exception for every cause
        raise CheckpointError(f"{path}: {PREFIX}.tokens, {PREFIX}.merges: {str(error)!r:.200}") from None
    fields = {
        "tokenizer_class": GENERIC_CLASS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_context,
        "chat_template": vocabulary.chat_template,
    } | _special_names(vocabulary)
    fields = {name: value for name, value in fields.items() if value is not None}
    (directory / TOKENIZER_CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    return vocabulary.end_ids


def _read_vocabulary(path: Path, metadata: dict[str, Any]) -> GGUFVocabulary:
    fields = ConfigFields(metadata, path)
    kind = fields.choice(f"{PREFIX}.model", KINDS)
    fields.must_be(f"{PREFIX}.remove_extra_whitespaces", False)
    texts = _list(fields, f"{PREFIX}.tokens", str)
    if not texts:
        raise fields.error(f"{PREFIX}.tokens", texts, "must list the vocabulary")
    named = _named(fields, len(texts), SENTENCEPIECE_IDS if kind == "llama" else {})
    types = _by_id(fields, f"{PREFIX}.token_type", int, len(texts))
    if types is None:  # the tokens that the file names are special, all others normal
        types = [CONTROL if token_id in named.values() else 1 for token_id in range(len(texts))]
    return GGUFVocabulary(
        path=path,
        kind=kind,
        pre_tokenizer=metadata.get(f"{PREFIX}.pre"),
        tokens=_tokens(fields, texts, types),
        types=types,
        scores=_by_id(fields, f"{PREFIX}.scores", float, len(texts)),
        merges=_merges(fields),
        named=named,
        adds_begin=None if f"{PREFIX}.add_bos_token" not in metadata else fields.flag(f"{PREFIX}.add_bos_token", False),
        adds_end=fields.flag(f"{PREFIX}.add_eos_token", False),
        adds_space_prefix=fields.flag(f"{PREFIX}.add_space_prefix", True),
        chat_template=checked_template(fields, "tokenizer.chat_template", "text"),
    )


def _tokens(fields: ConfigFields, texts: list[str], types: list[int]) -> dict[str, int]:
    """Returns ids by text, without the placeholders that converters write for padding rows of an embedding."""
    tokens: dict[str, int] = {}
    for token_id, text in enumerate(texts):
        if types[token_id] == UNUSED and text == f"[PAD{token_id}]":
            continue
        if text in tokens:
            raise fields.error(f"{PREFIX}.tokens[{token_id}]", text, f"repeats token {tokens[text]}")
        tokens[text] = token_id
    return tokens


def _named(fields: ConfigFields, num_ids: int, defaults: dict[str, int]) -> dict[str, int]:
    """Returns the ids that the file names, by the values of NAMED and by ENDS."""
    named = {}
    for name in dict.fromkeys((*NAMED.values(), *ENDS)):
        key = f"{PREFIX}.{name}_token_id"
        token_id = fields.values.get(key, defaults.get(name))
        if token_id is None:
            continue
        if type(token_id) is not int or not 0 <= token_id < num_ids:
            raise fields.error(key, token_id, f"must lie in [0, {num_ids - 1}]")
        named[name] = token_id
    return named


def _merges(fields: ConfigFields) -> list[tuple[str, str]] | None:
    key = f"{PREFIX}.merges"
    texts = _list(fields, key, str)
    if texts is None:
        return None
    merges = []
    for index, text in enumerate(texts):
        left, _, right = text.partition(" ")
        if not left or not right or " " in right:
            raise fields.error(f"{key}[{index}]", text, "must be two tokens with a space between")
        merges.append((left, right))
    return merges


def _list(fields: ConfigFields, key: str, kind: type) -> list[Any] | None:
    value = fields.values.get(key)
    if value is not None and not (isinstance(value, list) and all(type(each) is kind for each in value)):
        raise fields.error(key, value, f"must be a list of {kind.__name__}")
    return value


def _by_id(fields: ConfigFields, key: str, kind: type, num_ids: int) -> list[Any] | None:
    found = _list(fields, key, kind)
    if found is not None and len(found) != num_ids:
        raise fields.error(f"length of {key}", len(found), f"must be {num_ids}, the length of {PREFIX}.tokens")
    return found


def _byte_level(vocabulary: GGUFVocabulary) -> Tokenizer:
    words = PRE_TOKENIZERS.get(vocabulary.pre_tokenizer or "")
    if words is None:
        value, known = vocabulary.pre_tokenizer, ", ".join(PRE_TOKENIZERS)
        raise CheckpointError(f"{vocabulary.path}: {PREFIX}.pre = {value!r:.120}: must be one of {known}")
    if vocabulary.merges is None:
        raise CheckpointError(f"{vocabulary.path}: {PREFIX}.merges = None: must list the merges of kind 'gpt2'")
    model = BPE(vocabulary.tokens, vocabulary.merges, fuse_unk=False, ignore_merges=words.keeps_whole_words)
    tokenizer = Tokenizer(model)
    steps: list[pre_tokenizers.PreTokenizer] = []
    if words.has_single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if words.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(words.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    _add_template(tokenizer, vocabulary, adds_begin=words.adds_begin)
    return tokenizer


def _sentencepiece(vocabulary: GGUFVocabulary) -> Tokenizer:
    merges = vocabulary.merges or _merges_of_scores(vocabulary)
    unknown = vocabulary.named.get("unknown")
    texts = {token_id: token for token, token_id in vocabulary.tokens.items()}
    model = BPE(
        vocabulary.tokens,
        merges,
        unk_token=None if unknown is None else texts.get(unknown),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    scheme = "first" if vocabulary.adds_space_prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.adds_space_prefix:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.decoder = decoders.Sequence(steps)
    _add_template(tokenizer, vocabulary, adds_begin=True)
    return tokenizer


def _merges_of_scores(vocabulary: GGUFVocabulary) -> list[tuple[str, str]]:
    """Returns all pairs of tokens that make a token, the best-scored token first, then the longer parts."""
    if vocabulary.scores is None:
        raise CheckpointError(f"{vocabulary.path}: {PREFIX}.scores = None: must list a number per token")
    tokens, found = vocabulary.tokens, []
    for token, token_id in tokens.items():
        if vocabulary.types[token_id] in (CONTROL, UNKNOWN):
            continue
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [(left, right) for left, right in pairs if left in tokens and right in tokens]
        pairs.sort(key=lambda pair: (tokens[pair[0]], tokens[pair[1]]))
        found += [(-vocabulary.scores[token_id], -len(left), -len(right), (left, right)) for left, right in pairs]
    found.sort(key=lambda entry: entry[:3])
    return [pair for *_, pair in found]


def _add_template(tokenizer: Tokenizer, vocabulary: GGUFVocabulary, *, adds_begin: bool) -> None:
    """Adds the tokens around a text. adds_begin: the default for files that do not say."""
    texts = {token_id: token for token, token_id in vocabulary.tokens.items()}
    begins = adds_begin if vocabulary.adds_begin is None else vocabulary.adds_begin
    before, after = (
        [texts[vocabulary.named[name]]] if is_added and name in vocabulary.named else []
        for name, is_added in (("bos", begins), ("eos", vocabulary.adds_end))
    )
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *(f"{token}:1" for token in before), "$B:1", *(f"{t}:1" for t in after)],
            special_tokens=[(token, vocabulary.tokens[token]) for token in {*before, *after}],
        )


def _special_names(vocabulary: GGUFVocabulary) -> dict[str, str]:
    """Returns bos_token etc. for special tokens only: any other would be found in the middle of other text."""
    special = {vocabulary.tokens[token]: token for token in vocabulary.of_types(CONTROL, UNKNOWN)}
    ids = {name: vocabulary.named.get(key) for name, key in NAMED.items()}
    return {name: special[token_id] for name, token_id in ids.items() if token_id in special}
