"""Prompt files: reading, order, requests made from them, and prompts that are refused or left out."""

import json
from pathlib import Path

import pytest

from faser_backend.core.errors import ConfigError
from faser_backend.lab.prompts import PromptLimits, PromptSet, load_prompt_set
from faser_backend.manifest import EngineManifest
from faser_backend.text.prompts import Prompt, PromptFormat, read_prompts
from faser_backend.text.tokenizer import TextTokenizer
from tests.support.serving_pair import MAX_CONTEXT

LONG = "x" * 5000  # more tokens than the tiny pair's context
QUESTIONS = [
    {"question_id": 2, "category": "math", "turns": ["How much is 2 + 2?", "Are you sure?"]},
    {"question_id": 4, "category": "math", "turns": ["How much is 3 * 3?"], "reference": ["9"]},
    {"question_id": 6, "category": "writing", "turns": ["Write a line\u2028and another."]},
    {"question_id": 8, "category": "rag", "turns": [LONG]},
]


def write_lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("questions") / "question.jsonl", *QUESTIONS)


def load(path: Path, engine_dir: Path, *, is_chat: bool = True, **limits: int) -> PromptSet:
    manifest = EngineManifest.load(engine_dir)
    return load_prompt_set(path, engine_dir, manifest, PromptLimits(**{"max_tokens": 10, **limits}), is_chat=is_chat)


def test_files_are_read_as_they_are_written(tmp_path: Path, questions: Path):
    first = [Prompt(str(line["turns"][0]), str(line["category"])) for line in QUESTIONS]
    assert read_prompts(questions) == first
    plain = tmp_path / "plain.jsonl"
    plain.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "id": 1}\r\n\n  {"text": "b\\n", "category": "c"}')
    assert read_prompts(plain) == [Prompt("a"), Prompt("b\n", "c")]
    lines = tmp_path / "lines.txt"
    lines.write_text("{one}\n\n two \n")
    assert read_prompts(lines) == [Prompt("{one}"), Prompt(" two ")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file holds no prompts"),
        ('{"prompt": "a"}\nhello\n', "line 2: not JSON .*only files named .txt hold plain lines"),
        ('{"prompt": "a"}\n\n["b"]\n', 'line 3: must be a JSON object with "turns", "prompt" or "text"'),
        ('{"turns": []}', r"line 1: turns = \[\]: must be text, not empty"),
        ('{"turns": [3, "a"]}', r"line 1: turns = \[3, 'a'\]: must be text, not empty"),
        ('{"prompt": " "}', "line 1: prompt = ' ': must be text, not empty"),
        ('{"text": "a", "category": 7}', "line 1: category = 7: must be text"),
        ('{"text": "\\ud83d"}', r"line 1: text = '\\ud83d': must be text, not empty, valid Unicode"),
        ("[" * 100_000, "line 1: not JSON"),
    ],
)
def test_a_malformed_file_is_refused_by_line(tmp_path: Path, content: str, message: str):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=rf"^prompts .*prompts\.jsonl(: |, ){message}"):
        read_prompts(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl: missing"):
        read_prompts(tmp_path / "nowhere.jsonl")
    with pytest.raises(ConfigError, match=r"not readable .*Is a directory"):
        read_prompts(tmp_path)
    (tmp_path / "latin.txt").write_bytes("Größe".encode("latin-1"))
    with pytest.raises(ConfigError, match="not readable as UTF-8 text"):
        read_prompts(tmp_path / "latin.txt")


def test_messages_become_what_text_models_make_of_them(engine_dir: Path, questions: Path):
    manifest = EngineManifest.load(engine_dir)
    tokenizer = TextTokenizer.from_file(engine_dir / "tokenizer.json", PromptFormat.load(engine_dir, manifest))
    found = load(questions, engine_dir)
    assert [prompt.category for prompt in found.prompts] == ["math", "writing", "math"]
    for prompt in found.prompts:
        messages = json.dumps([{"role": "user", "content": prompt.text}])
        text, token_ids = tokenizer.encode_chat("messages", messages)
        assert prompt.token_ids == tuple(token_ids) and prompt.is_chat
        assert text.endswith("assistant\n") and prompt.text in text
    tokenizer.close()
    plain = load(questions, engine_dir, is_chat=False)
    assert all(len(a.token_ids) < len(b.token_ids) for a, b in zip(plain.prompts, found.prompts, strict=True))


def test_prompts_that_do_not_fit_are_left_out_and_counted(engine_dir: Path, questions: Path):
    found = load(questions, engine_dir)
    room = MAX_CONTEXT - 10
    reason = f"longer than {room} tokens, all that a context of {MAX_CONTEXT} holds beside an answer of 10"
    assert found.left_out == f"1 of 4 prompts are left out: {reason} (rag 1 of 1)"
    summary = {"name": "question.jsonl", "is_chat": True, "num_prompts": 3, "num_left_out": 1}
    assert found.as_dict() == {**summary, "categories": {"math": 2, "writing": 1}}
    short = load(questions, engine_dir, is_chat=False, max_prompt_chars=20)
    assert "longer than 20 characters or " in short.left_out and "writing 1 of 1, rag 1 of 1" in short.left_out
    for limit, message in ((3, "all 4 prompts are longer than 3 tokens"), (0, "tokens = 0: must be at least 1")):
        with pytest.raises(ConfigError, match=message):
            load(questions, engine_dir, max_prompt_tokens=limit)
    with pytest.raises(ConfigError, match=f"max_context = {MAX_CONTEXT}: no room for a prompt and 2100 answer tokens"):
        load(questions, engine_dir, max_tokens=2100)
