"""Streamed text: joined deltas equal the whole text, for any tokens and any split into outputs."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from faser_backend.core.request import EngineOutput
from faser_backend.openai.replies import named
from faser_backend.text.answer_stream import AnswerStream, StopMatcher
from faser_backend.text.tokenizer import TextTokenizer
from tests.support.serving_pair import byte_level_tokenizer


def make_sentencepiece_like() -> TextTokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁fox", "a", "e", "fo", "x", "é", "京"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return TextTokenizer(tokenizer)


TOKENIZERS = {"byte_level": TextTokenizer(byte_level_tokenizer()), "sentencepiece_like": make_sentencepiece_like()}


def said(stream: AnswerStream, token_ids: list[int], rng: random.Random | None = None) -> str:
    """Returns the text of tokens that come in one output or, with rng, in random outputs."""
    parts, position = [], 0
    while position < len(token_ids):
        size = rng.randint(1, 6) if rng else len(token_ids)
        parts.append(stream.add(EngineOutput("", token_ids[position : position + size])).text)
        position += size
    return "".join(parts)


def byte_ids(text: bytes) -> list[int]:
    return [TOKENIZERS["byte_level"].token_bytes.index(bytes([byte])) for byte in text]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("includes_stop", [True, False])
def test_random_tokens_stream_to_the_unary_text(kind, includes_stop):
    tokenizer = TOKENIZERS[kind]
    for seed in range(150):
        rng = random.Random(seed)
        token_ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(0, 60))]
        stops = ["ab", "\ufffd\ufffd", "e f"][: rng.randint(0, 3)]
        whole, cut = (AnswerStream(tokenizer, stop_strings=stops, includes_stop=includes_stop) for _ in range(2))
        text = said(whole, token_ids) + whole.finish()
        assert said(cut, token_ids, rng) + cut.finish() == text
        if kind == "byte_level" and not stops:
            assert text == tokenizer.decode(token_ids)


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", ["Größe - naïve café", "東京🙂🙂🙂👍🏽 x", "  two leading spaces", "\n\ttab", ""])
def test_text_survives_one_token_at_a_time(text, kind):
    token_ids = TOKENIZERS[kind].encode(text)
    stream = AnswerStream(TOKENIZERS[kind], token_ids)
    tokens, _ = stream.add(EngineOutput("", token_ids))
    assert all("\ufffd" not in token.text for token in tokens)
    assert "".join(token.text for token in tokens) + stream.finish() == text


def test_leading_space_survives_after_a_prompt_in_a_space_stripping_vocabulary():
    tokenizer = TOKENIZERS["sentencepiece_like"]
    the, fox = 258, 259
    assert tokenizer.decode([fox]) == "fox", "the vocabulary strips the first space"
    assert said(AnswerStream(tokenizer, [the]), [fox]) == " fox"


@pytest.mark.parametrize(
    ("kind", "text"), [("byte_level", b"\xc3"), ("sentencepiece_like", b"\xe4"), ("byte_level", b"")]
)
def test_a_token_of_an_incomplete_character_is_named_by_its_byte(kind: str, text: bytes):
    token_id = {b"\xe4": 1 + 0xE4, b"": 10**6}.get(text) or byte_ids(text)[0]  # 10**6: of a padded vocabulary
    assert named(TOKENIZERS[kind], token_id) == ("".join(f"bytes:\\x{byte:02x}" for byte in text), text)


def test_stop_string_across_token_borders():
    kept, cut = (
        AnswerStream(TOKENIZERS["byte_level"], stop_strings=["END"], includes_stop=includes)
        for includes in (True, False)
    )
    tokens, _ = kept.add(EngineOutput("", byte_ids(b"one END two")))
    assert ("".join(token.text for token in tokens), len(tokens), kept.is_stopped) == ("one END", 7, True)
    assert said(cut, byte_ids(b"one END two")) + cut.finish() == "one "


def test_text_that_only_looked_like_a_stop_is_given_back():
    matcher = StopMatcher(["END"], includes_stop=False)
    assert matcher.push("the EN") == ("the ", False)
    assert matcher.push("T") == ("ENT", False)
    assert matcher.push(" E") == (" ", False)
    assert matcher.finish() == "E"


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 5), max_size=30),
    includes_stop=st.booleans(),
)
def test_matcher_finds_the_match_that_ends_first(text, stops, cuts, includes_stop):
    ends = [(end, -len(s)) for s in stops for end in range(len(s), len(text) + 1) if text[:end].endswith(s)]
    expected = text
    if ends:
        end, negative_length = min(ends)
        expected = text[: end if includes_stop else end + negative_length]
    matcher, parts, position, stopped = StopMatcher(stops, includes_stop=includes_stop), [], 0, False
    for size in [*cuts, len(text)]:
        if not stopped:
            part, stopped = matcher.push(text[position : position + size])
            parts.append(part)
            position += size
    tail = "" if stopped else matcher.finish()
    assert "".join(parts) + tail == expected
    assert stopped == bool(ends)
