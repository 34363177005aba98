"""Prompt files, and limits on texts: what is long is counted before it is tokenised, and delays no other."""

import contextlib
import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from faser_backend.core.errors import QueueFullError, RequestError, UnavailableError
from faser_backend.core.request import Limits
from faser_backend.engines.build import build_engines
from faser_backend.engines.checkpoint import CheckpointError
from faser_backend.engines.tokenizer_files import MAX_TEMPLATE_BYTES, Prompts, read_prompts, read_tokenizer
from faser_backend.manifest import EngineManifest
from faser_backend.serving.served_model import ServedModel
from faser_backend.text.guides import MAX_GUIDE_BYTES, read_guide
from faser_backend.text.prompts import PromptFormat
from faser_backend.text.tokenizer import TextTokenizer
from faser_backend.triton.converters import preprocess
from faser_backend.triton.frontend import LONG_TEXT_BYTES, LongTexts
from tests.support.chat_templates import CHATML, CONVERSATIONS, MISTRAL, USER
from tests.support.clients import one, text
from tests.support.serving_pair import END_ID, byte_level_tokenizer, copy_without_template, write_pair
from tests.triton.test_contract import HANDSHAKE, MODEL, parse

HUGE = "x" * 5_000_000
MANY = tuple(f"w{index}" for index in range(1025))


class NoTokenizer(TextTokenizer):
    """A tokenizer that fails the test for a text that should have been refused."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        assert len(text) <= 1000, "tokenised before it was measured"
        return super().encode(text, add_special_tokens=add_special_tokens)


LIMITED = replace(MODEL, tokenizer=NoTokenizer(byte_level_tokenizer()), max_text_bytes=1000)


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("text_input length = 5000000: must be at most 1000 bytes", {"text_input": text(HUGE)}),
    ("text_input length = 1001: must be at most 1000 bytes", {"text_input": text("x" * 1001)}),
    ("text_input length = 1002: must be at most 1000 bytes", {"text_input": text("é" * 501)}),
    ("messages length = 5000000", {"text_input": None, "messages": text(HUGE)}),
    ("stop_words = 65: at most 64 are allowed", {"stop_words": text(*MANY[:65])}),
    ("stop_words length = 5000000: at most 4096 bytes in all", {"stop_words": text(HUGE)}),
    ("bad_words = 1025: at most 1024 are allowed", {"bad_words": text(*MANY)}),
    ("bad_words length = 5000001: at most 65536 bytes in all", {"bad_words": text(HUGE, "y")}),
    ("embedding_bias_words length = 5000000", {"embedding_bias_words": text(HUGE)}),
    (
        f"guided_decoding_guide length = 5000000: must be at most {MAX_GUIDE_BYTES} bytes",
        {"guided_decoding_guide": text(HUGE), "guided_decoding_guide_type": text("regex")},
    ),
    ("guided_decoding_guide_type length = 5000000", {"guided_decoding_guide_type": text(HUGE)}),
    ("bad_words_list length = 8193: at most 8192 tokens", {"bad_words_list": np.zeros((1, 2, 8193), np.int32)}),
    ("stop_words_list length = 4097: at most 4096 tokens", {"stop_words_list": np.zeros((1, 2, 4097), np.int32)}),
    ("draft_input_ids length = 129: must be at most", {"draft_input_ids": np.zeros((1, 129), np.int32)}),
]


@pytest.mark.parametrize(("error", "given"), REFUSED)
def test_texts_are_measured_before_they_are_tokenised(error: str, given: dict[str, Any]):
    with pytest.raises(RequestError, match=error):
        parse(handshake=replace(HANDSHAKE, model=LIMITED), **given)


def test_texts_at_the_limit_are_taken():
    long = replace(HANDSHAKE, model=replace(LIMITED, limits=replace(MODEL.limits, max_context=2000)))
    assert parse(handshake=long, text_input=text("é" * 500)).prompt_text == "é" * 500
    assert len(parse(stop_words=text(*MANY[:64])).stop_strings) == 64
    assert len(parse(bad_words=text(*MANY[:1024])).request.sampling.bad_words) == 1024
    with pytest.raises(AssertionError, match="tokenised before"):  # control: without a limit it is tokenised
        parse(handshake=replace(HANDSHAKE, model=replace(LIMITED, max_text_bytes=10**7)), text_input=text(HUGE))


@pytest.mark.parametrize(
    ("error", "given"),
    [
        ("QUERY length = 5000000", {"QUERY": text(HUGE)}),
        ("MESSAGES length = 5000000", {"MESSAGES": text(HUGE)}),
        ("BAD_WORDS_DICT length", {"QUERY": text("x"), "BAD_WORDS_DICT": text(HUGE)}),
        ("STOP_WORDS_DICT = 65", {"QUERY": text("x"), "STOP_WORDS_DICT": text(*MANY[:65])}),
        ("EMBEDDING_BIAS_WORDS = 1025", {"QUERY": text("x"), "EMBEDDING_BIAS_WORDS": text(*MANY)}),
    ],
)
def test_preprocessing_has_the_same_limits(error: str, given: dict[str, Any]):
    with pytest.raises(RequestError, match=error):
        preprocess({"REQUEST_OUTPUT_LEN": one(4), **given}, LIMITED)


def test_what_a_template_writes_is_measured_too():
    tokenizer = NoTokenizer(byte_level_tokenizer(), PromptFormat("{{ 'x' * 5000000 }}"))
    with pytest.raises(RequestError, match="messages length = 5000000: must be at most 1000 bytes, rendered"):
        tokenizer.encode_chat("messages", json.dumps([{"role": "user", "content": "x"}]), 1000)
    tokenizer.close()


def test_the_limit_follows_the_context():
    manifest: Any = SimpleNamespace(end_ids=(), kv_block_size=16)
    for max_context, longest, limit in ((128, 8, 65536), (131072, 8, 8 * 131072), (131072, 256, 16 * 131072)):
        tokenizer: Any = SimpleNamespace(longest_token=longest)
        assert ServedModel.of("m", manifest, Limits(320, max_context), tokenizer).max_text_bytes == limit


def test_a_long_text_is_read_beside_and_a_short_one_at_once():
    texts, may_go, read = LongTexts(2), threading.Event(), []

    def wait() -> None:
        may_go.wait(10)

    long, short = {"text_input": text("x" * (LONG_TEXT_BYTES + 1))}, {"text_input": text("x")}
    texts.run(long, wait)  # waits on another thread
    texts.run(long, wait)
    texts.run(short, lambda: read.append("short"))
    assert read == ["short"]
    with pytest.raises(QueueFullError):
        texts.run(long, wait)
    may_go.set()
    while len(read) < 2:  # once one of the two is read
        with contextlib.suppress(QueueFullError):
            texts.run(long, lambda: read.append("long"))
            texts.close()
    assert read == ["short", "long"]
    for _ in range(2):
        with pytest.raises(UnavailableError):
            texts.run(long, wait)


CHAIN = "".join(f'r{index} ::= "a" r{index + 1}\n' for index in range(400)) + 'r400 ::= "x"\nroot ::= r0'


@pytest.mark.parametrize(
    ("kind", "guide", "error"),
    [
        ("ebnf_grammar", CHAIN, "guide rules = 402: 7006 bytes of GBNF may have 149 rules at most"),
        ("ebnf_grammar", "\n" * 200_000, "guide length = 200000: must be at most 32768 bytes in GBNF"),
        ("ebnf_grammar", f"{'x' * 250_000}", "guide length = 250000"),
        ("structural_tag", json.dumps({"structures": [], "triggers": ["x"] * 257}), "257 triggers: at most 256"),
        ("structural_tag", json.dumps({"structures": [1] * 257, "triggers": []}), "257 structures: at most 256"),
    ],
)
def test_a_grammar_that_takes_long_to_read_is_refused(kind: str, guide: str, error: str):
    with pytest.raises(RequestError, match=error):
        read_guide(kind, guide)


def test_grammars_below_the_limits_are_read():
    assert "start" in read_guide("ebnf_grammar", 'root ::= "x" other\nother ::= [a-z]+')
    lark = "start: " + " | ".join(f'"w{index}"' for index in range(20_000))
    assert lark in read_guide("ebnf_grammar", lark)


SHORT = ("--max-tokens", 6, "--num-threads", 1, "--json")


@pytest.fixture
def without_template(engine_dir: Path, tmp_path: Path) -> Path:
    return copy_without_template(engine_dir, tmp_path / "plain")


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    byte_level_tokenizer().save(str(path))
    return path


def write_config(tokenizer_file: Path, **fields: Any) -> None:
    (tokenizer_file.parent / "tokenizer_config.json").write_text(json.dumps(fields))


def test_a_build_takes_the_targets_template_and_tokens_along(engine_dir: Path):
    manifest = EngineManifest.load(engine_dir)
    prompts = PromptFormat.load(engine_dir, manifest)
    assert (prompts.chat_template, prompts.special_tokens) == (CHATML, {"eos_token": "<|end|>"})
    assert prompts.adds_special_tokens and not prompts.adds_begin_token
    assert manifest.prompts.name in {path.name for path in engine_dir.iterdir()}


def test_end_ids_come_from_generation_config_else_from_the_eos_token(tmp_path: Path):
    pair = write_pair(tmp_path / "pair")
    several = pair / "target" / "generation_config.json"
    several.write_text(json.dumps({"eos_token_id": [7, END_ID, 9]}))
    assert build_engines(pair / "target", pair / "draft", tmp_path / "several").end_ids == (7, END_ID, 9)
    several.unlink()
    config = pair / "target" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token_id": None}))
    assert build_engines(pair / "target", pair / "draft", tmp_path / "token").end_ids == (END_ID,)


def test_a_template_file_is_preferred_and_of_named_ones_the_default(tokenizer_file: Path):
    assert read_prompts(read_tokenizer(tokenizer_file)) == Prompts()
    write_config(tokenizer_file, chat_template="one", bos_token={"content": "<|end|>"}, eos_token=None)
    assert read_prompts(read_tokenizer(tokenizer_file)) == Prompts("one", {"bos_token": "<|end|>"})
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": "two"}]
    write_config(tokenizer_file, chat_template=named, add_bos_token=False)
    assert read_prompts(read_tokenizer(tokenizer_file)) == Prompts("two", adds_begin_token=False)
    (tokenizer_file.parent / "chat_template.jinja").write_text("three\n")
    assert read_prompts(read_tokenizer(tokenizer_file)).chat_template == "three\n"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chat_template": 3}, "chat_template = 3: must be text or a list"),
        ({"chat_template": ["x"]}, r"chat_template = \['x'\]: must list objects with name and template"),
        ({"chat_template": [{"name": "rag", "template": "x"}]}, r"= \['rag'\]: must have the text of a 'default'"),
        ({"chat_template": "x" * (MAX_TEMPLATE_BYTES + 1)}, f"must fit {MAX_TEMPLATE_BYTES} bytes"),
        ({"eos_token": 5}, "eos_token = 5: must be a token's text"),
        ({"bos_token": {"id": 5}}, "bos_token = .*: must be a token's text"),
        ({"add_bos_token": "yes"}, "add_bos_token = 'yes': must be true or false"),
        ({"add_bos_token": True}, r"add_bos_token is true and bos_token = None: not in tokenizer\.json"),
        ({"add_bos_token": True, "bos_token": "<x>"}, "bos_token = '<x>': not in"),
    ],
)
def test_a_malformed_tokenizer_config_is_refused(tokenizer_file: Path, fields: dict[str, Any], message: str):
    write_config(tokenizer_file, **fields)
    with pytest.raises(CheckpointError, match=rf"tokenizer_config\.json: .*{message}"):
        read_prompts(read_tokenizer(tokenizer_file))


@pytest.mark.parametrize(
    ("content", "message"), [(b"\xff", "not readable as UTF-8"), (b"x" * (MAX_TEMPLATE_BYTES + 1), "must be at most")]
)
def test_a_malformed_template_file_is_refused(tokenizer_file: Path, content: bytes, message: str):
    (tokenizer_file.parent / "chat_template.jinja").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"chat_template\.jinja: .*{message}"):
        read_prompts(read_tokenizer(tokenizer_file))


def test_generate_chats_as_transformers_would_prompt(run, engine_dir: Path, tmp_path: Path):
    tokenizer = Tokenizer.from_file(str(engine_dir / "tokenizer.json"))
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHATML, eos_token="<|end|>")
    (tmp_path / "messages.json").write_text(json.dumps(CONVERSATIONS["turns"]))
    said = USER[0]["content"]
    run("generate", "--engine-dir", engine_dir, *SHORT, "--prompt-ids", "1")  # compiles kernels, which is reported once
    cases = [
        (USER, ("--prompt", said)),
        ([{"role": "system", "content": "s"}, *USER], ("--prompt", said, "--system", "s")),
        (CONVERSATIONS["turns"], ("--messages", tmp_path / "messages.json")),
    ]
    for messages, options in cases:
        token_ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        command = ("generate", "--engine-dir", engine_dir, *SHORT, "--policy", "fixed:2")
        status, out, err = run(*command, "--chat", *options)
        assert (status, err) == (0, "")
        expected = run(*command, "--prompt-ids", ",".join(map(str, token_ids)))[1]
        untimed = [{**json.loads(text), "tokens_per_s": 0} for text in (out, expected)]
        assert untimed[0] == untimed[1]


def test_without_a_template_generate_says_what_to_do(run, without_template: Path, tmp_path: Path):
    command = ("generate", "--engine-dir", without_template, "--chat", "--prompt", "x")
    status, out, err = run(*command)
    assert (status, out) == (1, "") and err.count("\n") == 1
    assert "these engines came without a chat template" in err and "--chat-template FILE" in err
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}!")
    given = run(*command, "--chat-template", tmp_path / "mine.jinja", *SHORT)[1]
    plain = run("generate", "--engine-dir", without_template, "--prompt", "x!", *SHORT)[1]
    assert json.loads(given)["token_ids"] == json.loads(plain)["token_ids"]


def test_serve_refuses_a_template_that_cannot_be_compiled(run, engine_dir: Path, tmp_path: Path):
    (tmp_path / "broken.jinja").write_text(MISTRAL + "{% endif %}")
    status, _, err = run("serve", "--engine-dir", engine_dir, "--chat-template", tmp_path / "broken.jinja")
    assert status == 1 and "cannot be rendered: line " in err
