"""AutoTokenizer on shipped models and engine directories reads text like the server and runs no code."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from faser_backend.engines.build import build_engines
from faser_backend.engines.tokenizer_files import read_prompts, read_tokenizer
from faser_backend.manifest import EngineManifest
from faser_backend.serving.model_source import DEMO_PAIR, demo_engine_dir
from faser_backend.text.prompts import PromptFormat
from faser_backend.text.tokenizer import TextTokenizer, load_tokenizer
from tests.support.chat_templates import CHATML, USER
from tests.support.serving_pair import END_ID, byte_level_tokenizer, write_pair
from tests.support.tiny_models import random_model
from tests.support.trtllm_models import write_trtllm

CONFIG = "tokenizer_config.json"
TEXTS = (
    "",
    " ",
    "def read_lines(path):\n    with open(path) as file:\n        return [line.rstrip() for line in file]\n",
    "it 's a , b . c ! don't\t\t  \r\n\n",
    "Größe - naïve café 東京 🙂👍🏽 \u202e\x00",
    "<|endoftext|>twice<|endoftext|>",
    "<|end|><tool 🙂> <|end|><|end|>",
)


def auto_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(directory)


def check_reads_alike(theirs: PreTrainedTokenizerBase, ours: TextTokenizer) -> None:
    for text in TEXTS:
        token_ids = ours.encode(text)
        assert theirs.encode(text) == theirs(text)["input_ids"] == ours.encode_prompt(text) == token_ids
        assert theirs.decode(token_ids, skip_special_tokens=True) == ours.decode(token_ids)
    assert isinstance(theirs.eos_token, str)
    end = theirs.encode(theirs.eos_token, add_special_tokens=False)  # the first call of load clients
    assert end == [theirs.eos_token_id]


def check_engine_dir(directory: Path) -> PreTrainedTokenizerBase:
    manifest = EngineManifest.load(directory)
    assert manifest.tokenizer_config is not None and manifest.tokenizer_config in manifest.files
    theirs = auto_tokenizer(directory)
    prompts = PromptFormat.load(directory, manifest)
    check_reads_alike(theirs, TextTokenizer.from_file(directory / "tokenizer.json", prompts))
    assert theirs.eos_token_id in manifest.end_ids
    return theirs


def write_config(checkpoint: Path, **fields: Any) -> bytes:
    (checkpoint / CONFIG).write_text(json.dumps(fields))
    return (checkpoint / CONFIG).read_bytes()


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    return write_pair(tmp_path / "pair")


@pytest.fixture
def bare(pair: Path) -> Path:
    """A target without a tokenizer_config.json."""
    (pair / "target" / CONFIG).unlink()
    return pair / "target"


def build(checkpoint: Path) -> Path:
    build_engines(checkpoint, checkpoint, checkpoint.parent / "engine")
    return checkpoint.parent / "engine"


@pytest.mark.parametrize("name", ["target", "draft"])
def test_the_demo_models_load_and_read_as_the_server_does(name: str) -> None:
    directory = DEMO_PAIR / name
    prompts = read_prompts(read_tokenizer(directory / "tokenizer.json"))
    served = PromptFormat(prompts.chat_template, prompts.special_tokens, prompts.adds_begin_token is not False)
    theirs = auto_tokenizer(directory)
    check_reads_alike(theirs, TextTokenizer.from_file(directory / "tokenizer.json", served))
    config = json.loads((directory / "config.json").read_text())
    assert theirs.model_max_length == config["max_position_embeddings"]
    named = {kind: getattr(theirs, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    assert named == {kind: config[f"{kind}_token_id"] for kind in named}
    generation = json.loads((directory / "generation_config.json").read_text())
    assert named["eos"] == generation["eos_token_id"] and prompts.end_ids == (named["eos"],)


def test_the_demo_engines_carry_the_models_own_config() -> None:
    directory = demo_engine_dir()
    check_engine_dir(directory)
    assert (directory / CONFIG).read_bytes() == (DEMO_PAIR / "target" / CONFIG).read_bytes()


def test_a_checkpoints_own_config_is_copied_as_it_is(pair: Path) -> None:
    content = write_config(
        pair / "target", eos_token={"__type": "AddedToken", "content": "<|end|>"}, model_max_length=77
    )
    directory = build(pair / "target")
    theirs = check_engine_dir(directory)
    assert (directory / CONFIG).read_bytes() == content
    assert (theirs.eos_token, theirs.model_max_length) == ("<|end|>", 77)


def test_lengths_that_a_training_left_in_a_tokenizer_cut_and_fill_no_prompt(pair: Path) -> None:
    tokenizer = byte_level_tokenizer()
    expected = tokenizer.encode("some words").ids
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(pair / "tokenizer.json"))
    assert load_tokenizer(pair / "tokenizer.json").encode("some words").ids == expected


def test_a_template_in_a_file_of_its_own_comes_along(pair: Path) -> None:
    write_config(pair / "target", eos_token="<|end|>", chat_template="{{ 'other' }}")
    (pair / "target" / "chat_template.jinja").write_text(CHATML)
    theirs = check_engine_dir(build(pair / "target"))
    assert theirs.chat_template == CHATML
    assert "<|im_start|>" in theirs.apply_chat_template(USER, tokenize=False)


def test_a_config_is_made_of_what_a_checkpoint_says(bare: Path) -> None:
    edit = json.loads((bare / "config.json").read_text()) | {"bos_token_id": END_ID, "pad_token_id": 9}
    (bare / "config.json").write_text(json.dumps(edit))
    (bare / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, END_ID]}))
    theirs = check_engine_dir(build(bare))
    assert (theirs.bos_token, theirs.eos_token) == ("<|end|>", "<|end|>")
    assert theirs.pad_token is None  # id 9 is a plain token; as pad_token it would be removed from words
    assert theirs.model_max_length == edit["max_position_embeddings"]


def test_a_tensorrt_llm_checkpoint_gets_one_too(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    source = write_trtllm(random_model("qwen2", vocab_size=tokenizer.get_vocab_size()), tmp_path / "source", tp=2)
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": END_ID}))
    theirs = check_engine_dir(build(source))
    content = write_config(source, eos_token="<|end|>", model_max_length=5)
    directory = build(source)
    assert theirs.model_max_length == EngineManifest.load(directory).target.spec.max_context
    assert (directory / CONFIG).read_bytes() == content and check_engine_dir(directory).model_max_length == 5


@pytest.mark.parametrize("auto_map", [{"AutoTokenizer": ["evil.Tokenizer", None]}, ["a--evil.Tokenizer", None]])
def test_nothing_in_it_names_code_or_files_elsewhere(pair: Path, auto_map: Any) -> None:
    fields = {"eos_token": "<|end|>", "tokenizer_class": "EvilTokenizer", "model_max_length": 64}
    elsewhere = {"tokenizer_file": "../x.json", "vocab_file": "/x", "fast_tokenizer_files": ["tokenizer.4.0.0.json"]}
    write_config(pair / "target", **fields, auto_map=auto_map, **elsewhere)
    (pair / "target" / "evil.py").write_text("raise SystemExit('ran')\nclass Tokenizer: ...")
    directory = build(pair / "target")
    assert json.loads((directory / CONFIG).read_text()) == fields
    assert not list(directory.glob("*.py"))
    check_engine_dir(directory)
    AutoTokenizer.from_pretrained(directory, trust_remote_code=True)  # trusted, it runs no code either
