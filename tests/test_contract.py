"""Tensors in, without a server: every input name, every refusal, every parameter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from faser_backend.core.errors import ConfigError, QueueFullError, RequestError
from faser_backend.core.request import Limits
from faser_backend.serving.contract import REFUSED_FLAGS, REFUSED_TENSORS, parse_request, word_ids_array
from faser_backend.serving.link import Hello, describe_refusal
from faser_backend.serving.parameters import Parameters, read_engine_config, read_serving_options
from faser_backend.serving.tokenizer import TextTokenizer
from tests.serving_pair import END_ID, byte_level_tokenizer

TOKENIZER = TextTokenizer(byte_level_tokenizer())
VOCAB = TOKENIZER.vocab_size
HELLO = Hello(Path("tokenizer.json"), Limits(VOCAB, 128), (END_ID,), 4, "reject", False, 0.1)


def text(*values: str) -> np.ndarray:
    return np.array([[value.encode() for value in values]], dtype=object)


def number(value, dtype=np.int32) -> np.ndarray:
    return np.array([[value]], dtype)


def real(value: float) -> np.ndarray:
    return number(value, np.float32)


def parse(*, hello: Hello = HELLO, is_decoupled: bool = True, **tensors: np.ndarray):
    given = {"text_input": text("the fox"), "max_tokens": number(8), **tensors}
    return parse_request(
        {k: v for k, v in given.items() if v is not None}, "r", hello, TOKENIZER, is_decoupled=is_decoupled
    )


def parse_ids(ids: list[int], **tensors: np.ndarray):
    ids_tensor = np.array([ids], np.int32)
    lengths = tensors.pop("input_lengths", number(len(ids)))
    return parse(
        text_input=None,
        max_tokens=None,
        input_ids=ids_tensor,
        input_lengths=lengths,
        request_output_len=number(8),
        **tensors,
    )


def test_text_request_with_nothing_else_decodes_greedily():
    parsed = parse()
    assert parsed.request.prompt_ids.tolist() == TOKENIZER.encode("the fox")
    assert parsed.request.max_tokens == 8
    assert parsed.request.sampling.is_greedy
    assert parsed.request.end_ids == (END_ID,)
    assert not parsed.is_streaming and not parsed.excludes_input


@pytest.mark.parametrize(
    ("tensors", "temperature"),
    [
        ({"temperature": real(0.5)}, 0.5),
        ({"temperature": real(0.0)}, 0.0),
        ({"top_p": real(0.9)}, 1.0),
        ({"runtime_top_p": real(0.0)}, 0.0),
        ({"top_k": number(0)}, 0.0),
        ({"runtime_top_k": number(5)}, 1.0),
        ({"top_k": number(1), "temperature": real(0.7)}, 0.0),
        ({"min_p": real(0.1)}, 1.0),
    ],
)
def test_which_values_sample(tensors, temperature):
    assert parse(**tensors).request.sampling.temperature == pytest.approx(temperature)


def test_absent_seeds_differ_and_given_seeds_hold():
    assert parse(temperature=real(1)).request.sampling.seed != parse(temperature=real(1)).request.sampling.seed
    assert parse(seed=number(2**64 - 1, np.uint64)).request.sampling.seed == 2**64 - 1
    assert parse(random_seed=number(7, np.uint64)).request.sampling.seed == 7


def test_every_sampling_tensor_arrives():
    sampling = parse(
        min_length=number(3),
        repetition_penalty=real(1.5),
        presence_penalty=real(0.25),
        frequency_penalty=real(0.5),
        bad_words=text("fox", ""),
        embedding_bias_words=text("x"),
        embedding_bias_weights=np.array([[2.0]], np.float32),
    ).request.sampling
    assert (sampling.min_tokens, sampling.repetition_penalty) == (3, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.25, 0.5)
    assert sampling.bad_words == (tuple(TOKENIZER.encode("fox")),)
    assert sampling.logit_bias == {TOKENIZER.encode("x")[0]: 2.0}


def test_token_level_words_and_bias():
    bias = np.zeros((1, VOCAB), np.float32)
    bias[0, 5] = -3
    stops = np.array([[[4, 5, 6], [2, 3, -1]]], np.int32)
    parsed = parse_ids(
        [9, 8, 7, 7], input_lengths=number(3), stop_words_list=stops, embedding_bias=bias, end_id=number(-1)
    )
    assert parsed.request.prompt_ids.tolist() == [9, 8, 7]
    assert parsed.request.stop_sequences == ((4, 5), (6,))
    assert parsed.request.sampling.logit_bias == {5: -3.0}
    assert parsed.request.end_ids == ()
    assert parse_ids([1], bad_words_list=np.zeros((1, 2, 0), np.int32)).request.sampling.bad_words == ()


def test_word_ids_array_round_trip():
    words = ((1, 2, 3), (4,), (5, 6))
    parsed = parse_ids([1], stop_words_list=word_ids_array(words)[None])
    assert parsed.request.stop_sequences == words


def test_empty_stop_words_mean_none():
    parsed = parse(stop_words=text(""), bad_words=text(""))
    assert parsed.stop_strings == () and parsed.request.stop_sequences == ()


def test_out_of_vocab_ids_are_refused_or_clamped():
    with pytest.raises(RequestError, match=rf"input_ids = {VOCAB}: token ids must lie in \[0, {VOCAB - 1}\]"):
        parse_ids([1, VOCAB])
    clamping = Hello(Path(), HELLO.limits, (), 4, "clamp", False, 0.1)
    given = {"input_ids": np.array([[1, 2**31 - 1, -5]], np.int32), "request_output_len": number(4)}
    parsed = parse_request(given, "r", clamping, TOKENIZER, is_decoupled=True)
    assert parsed.request.prompt_ids.tolist() == [1, VOCAB - 1, 0]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"text_input": text("")}, "text_input = '': prompt is empty"),
        ({"text_input": text("x " * 300)}, "input_ids length = .*context length of 128"),
        ({"text_input": np.array([[b"\xff\xfe"]], dtype=object)}, "text_input .* must be UTF-8 text"),
        ({"text_input": None}, "a prompt is needed"),
        ({"input_ids": np.array([[1]], np.int32)}, "send one of the two"),
        ({"max_tokens": number(0)}, r"max_tokens = 0: must lie in \[1, "),
        ({"max_tokens": number(128)}, r"max_tokens = 128: must lie in \[1, "),
        ({"max_tokens": None}, "max_tokens = None: is required"),
        ({"max_tokens": np.array([[1, 2]], np.int32)}, r"max_tokens = \[1, 2\]: must hold exactly 1 value"),
        ({"max_tokens": np.array([[1], [2]], np.int32)}, "batch size must be 1"),
        ({"temperature": real(float("nan"))}, r"temperature = nan: must lie in \[0, 100\]"),
        ({"temperature": real(-1)}, "temperature = -1"),
        ({"top_p": real(float("nan"))}, "top_p = nan"),
        ({"top_p": real(-0.5)}, "top_p = -0.5"),
        ({"top_k": number(-1)}, "top_k = -1"),
        ({"top_k": number(1), "temperature": real(float("nan"))}, "temperature = nan"),
        ({"repetition_penalty": real(0)}, "repetition_penalty = 0"),
        ({"frequency_penalty": real(float("inf"))}, "frequency_penalty = inf"),
        ({"beam_width": number(4)}, "beam_width = 4: beam search: not supported"),
        ({"num_return_sequences": number(2)}, "num_return_sequences = 2: several sequences"),
        ({"end_id": number(VOCAB)}, "end_id = "),
        ({"embedding_bias_words": text("a", "b")}, "embedding_bias_weights = 0: one weight per word"),
        ({"embedding_bias": np.ones((1, 3), np.float32)}, "embedding_bias length = 3"),
        ({"stop_words_list": np.array([[[4, 5], [9, -1]]], np.int32)}, "stop_words_list = .9.: ends must rise"),
        ({"num_draft_tokens": number(-1)}, "num_draft_tokens = -1"),
    ],
)
def test_bad_input_is_refused_by_name_value_and_limit(tensors, message):
    with pytest.raises(RequestError, match=message):
        parse(**tensors)


@pytest.mark.parametrize("name", REFUSED_TENSORS)
def test_unsupported_tensors_are_refused_by_name(name):
    with pytest.raises(RequestError, match=f"{name} .*not supported"):
        parse(**{name: np.ones((1, 1), np.int32)})
    assert parse(**{name: np.zeros((1, 0), np.int32)}).request.max_tokens == 8


@pytest.mark.parametrize("name", REFUSED_FLAGS)
def test_unsupported_flags_are_refused_only_when_set(name):
    with pytest.raises(RequestError, match=f"{name} = True: .*not supported"):
        parse(**{name: number(True, bool)})
    assert parse(**{name: number(False, bool)}).request.max_tokens == 8


def test_streaming_needs_a_decoupled_model():
    with pytest.raises(RequestError, match="Streaming is only supported if model is deployed using decoupled mode"):
        parse(stream=number(True, bool), is_decoupled=False)


def test_queue_full_has_the_phrases_that_clients_look_for():
    message = describe_refusal(QueueFullError(4), 4)
    assert "Exceeds maximum queue size" in message and "Maximum queue size of 4" in message


def parameters(**values: str) -> Parameters:
    return Parameters({"parameters": {name: {"string_value": value} for name, value in values.items()}})


def test_parameters_left_in_place_are_unset():
    unset = parameters(engine_dir="${engine_dir}", max_queue_size="", out_of_vocab="${out_of_vocab}")
    assert read_serving_options(unset).engine_dir is None
    assert read_serving_options(unset).out_of_vocab == "reject"
    assert read_engine_config(unset).max_queue_size == 256


def test_parameters_reach_the_configuration():
    given = parameters(max_queue_size="7", enable_kv_cache_reuse="False", batch_scheduler_policy="guaranteed_no_evict")
    config = read_engine_config(given)
    assert (config.max_queue_size, config.enable_prefix_reuse, config.admission) == (7, False, "guaranteed_no_evict")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_queue_size": "many"}, "parameter max_queue_size = 'many': must be an integer"),
        ({"enable_kv_cache_reuse": "maybe"}, "parameter enable_kv_cache_reuse = 'maybe': must be true or false"),
        ({"batch_scheduler_policy": "best"}, "admission = 'best'"),
        ({"out_of_vocab": "wrap"}, "parameter out_of_vocab = 'wrap': must be reject or clamp"),
    ],
)
def test_bad_parameters_are_named(values, message):
    read = read_serving_options if "out_of_vocab" in values else read_engine_config
    with pytest.raises(ConfigError, match=message):
        read(parameters(**values))
