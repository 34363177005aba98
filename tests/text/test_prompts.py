"""The prompt files of a build, directories without them, and `faser generate --chat`."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from faser_backend.engines.build import build_engines
from faser_backend.engines.checkpoint import CheckpointError
from faser_backend.engines.tokenizer_files import MAX_TEMPLATE_BYTES, Prompts, read_prompts, read_tokenizer
from faser_backend.manifest import EngineManifest
from faser_backend.text.prompts import PromptFormat
from tests.support.chat_templates import CHATML, CONVERSATIONS, MISTRAL, USER
from tests.support.serving_pair import END_ID, byte_level_tokenizer, copy_without_template, write_pair

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


def test_a_directory_without_prompts_loads_and_has_no_template(without_template: Path):
    assert PromptFormat.load(without_template, EngineManifest.load(without_template)) == PromptFormat()


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", "x", "--system", "s"], "--system = 's': is for conversations: give --chat too"),
        (["--prompt", "x", "--messages", "m.json"], "--messages = 'm.json': is for conversations"),
        (["--prompt", "x", "--chat-template", "t"], "--chat-template = 't': is for conversations"),
        (["--chat"], "give exactly one of --prompt and --messages with --chat"),
        (["--chat", "--prompt", "x", "--messages", "m.json"], "give exactly one of --prompt and --messages"),
        (["--chat", "--prompt-ids", "1"], "--prompt-ids = [1]: cannot be a message"),
        (["--chat", "--messages", "m.json", "--system", "s"], "--system = 's': write it into the file"),
        (["--chat", "--messages", "none.json"], "--messages = 'none.json': not readable as text"),
        (["--chat", "--messages", __file__], "invalid JSON: "),
        (["--chat", "--prompt", "x", "--chat-template", "none"], "chat_template = none: not readable"),
    ],
)
def test_options_that_contradict_each_other_are_one_line(run, engine_dir: Path, options: list[str], message: str):
    status, out, err = run("generate", "--engine-dir", engine_dir, *options)
    assert (status, out) == (1, "")
    assert message in err and err.startswith("error: ") and err.count("\n") == 1


def test_serve_refuses_a_template_that_cannot_be_compiled(run, engine_dir: Path, tmp_path: Path):
    (tmp_path / "broken.jinja").write_text(MISTRAL + "{% endif %}")
    status, _, err = run("serve", "--engine-dir", engine_dir, "--chat-template", tmp_path / "broken.jinja")
    assert status == 1 and "cannot be rendered: line " in err
