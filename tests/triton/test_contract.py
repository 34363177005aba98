"""Requests' tensors and replies without a server: every input name, every refusal, every output."""

from dataclasses import replace

import numpy as np
import pytest

from faser_backend.core.errors import RequestError
from faser_backend.core.request import EngineOutput, FinishReason, Limits, RequestStats
from faser_backend.serving.served_model import ServedModel
from faser_backend.text.tokenizer import TextTokenizer
from faser_backend.triton.contract import parse_requests
from faser_backend.triton.converters import postprocess, preprocess
from faser_backend.triton.link import Handshake
from faser_backend.triton.tensor_io import Reply
from faser_backend.triton.tensors import TEXT_OUTPUTS
from tests.support.clients import NO_TOKEN, one, text
from tests.support.conformance_cases import WITHOUT_EFFECT
from tests.support.serving_pair import END_ID, byte_level_tokenizer

TOKENIZER = TextTokenizer(byte_level_tokenizer())
VOCAB = TOKENIZER.vocab_size
MODEL = ServedModel("m", TOKENIZER, Limits(VOCAB, 128), (END_ID,), 16, 1 << 16)
HANDSHAKE = Handshake(MODEL, 4, "reject", False, 0.1)


def real(value: float) -> np.ndarray:
    return one(value, np.float32)


def parse_all(*, handshake: Handshake = HANDSHAKE, is_decoupled: bool = True, **tensors: np.ndarray | None):
    given = {"text_input": text("the fox"), "max_tokens": one(8), **tensors}
    present = {name: array for name, array in given.items() if array is not None}
    return parse_requests(present, "r", handshake, is_decoupled=is_decoupled)


def parse(**given):
    (parsed,) = parse_all(**given)
    return parsed


def parse_ids(ids: list[int], **tensors):
    given = {"text_input": None, "max_tokens": None, "input_ids": np.array([ids], np.int32)}
    given |= {"input_lengths": one(len(ids)), "request_output_len": one(8)}
    return parse(**given | tensors)


@pytest.mark.parametrize(
    ("tensors", "temperature"),
    [
        ({"temperature": real(0.5)}, 0.0),  # what text clients of TensorRT-LLM always send
        ({"temperature": real(1.0), "top_k": one(0), "top_p": real(0.0)}, 0.0),
        ({"temperature": real(0.0), "top_p": real(0.9)}, 0.0),
        ({"temperature": real(0.5), "top_p": real(1.0)}, 0.5),
        ({"temperature": real(0.5), "top_k": one(4)}, 0.5),
        ({"top_p": real(0.9)}, 1.0),
        ({"runtime_top_p": real(0.0)}, 0.0),
        ({"top_k": one(0)}, 0.0),
        ({"runtime_top_k": one(5)}, 1.0),
        ({"top_k": one(1), "top_p": real(0.5), "temperature": real(0.7)}, 0.0),
        ({"min_p": real(0.1)}, 1.0),
    ],
)
def test_which_values_sample(tensors, temperature):
    sampling = parse(**tensors).request.sampling
    assert sampling.temperature == pytest.approx(temperature)
    assert sampling.top_p > 0


def test_an_absent_seed_is_0_and_given_seeds_hold():
    assert parse(top_p=real(1)).request.sampling.seed == 0
    assert parse(seed=one(2**64 - 1, np.uint64)).request.sampling.seed == 2**64 - 1
    assert parse(random_seed=one(7, np.uint64)).request.sampling.seed == 7


def test_every_sampling_tensor_arrives():
    sampling = parse(
        min_length=one(3),
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
    parsed = parse_ids([9, 8, 7, 7], input_lengths=one(3), stop_words_list=stops, embedding_bias=bias, end_id=one(-1))
    assert parsed.request.prompt_ids.tolist() == [9, 8, 7]
    assert parsed.request.stop_sequences == ((4, 5), (6,))
    assert parsed.request.sampling.logit_bias == {5: -3.0}
    assert parsed.request.end_ids == parse_ids([1], end_id=one(NO_TOKEN)).request.end_ids == ()
    assert parse_ids([1], bad_words_list=np.zeros((1, 2, 0), np.int32)).request.sampling.bad_words == ()


def test_out_of_vocab_ids_are_refused_or_clamped():
    with pytest.raises(RequestError, match=rf"input_ids = {VOCAB}: token ids must lie in \[0, {VOCAB - 1}\]"):
        parse_ids([1, VOCAB])
    with pytest.raises(RequestError, match="--out-of-vocab clamp accepts any"):
        parse_ids([-1])
    parsed = parse_ids([1, 2**31 - 1, -5], handshake=replace(HANDSHAKE, out_of_vocab="clamp"))
    assert parsed.request.prompt_ids.tolist() == [1, VOCAB - 1, 0]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"text_input": text("")}, "text_input = '': prompt is empty"),
        ({"text_input": text("x " * 300)}, "input_ids length = .*context length of 128"),
        ({"text_input": np.array([[b"\xff\xfe"]], dtype=object)}, "text_input .* must be UTF-8 text"),
        ({"text_input": None}, "a prompt is needed"),
        ({"input_ids": np.array([[1]], np.int32)}, "send one of the two"),
        ({"max_tokens": None, "request_output_len": one(0)}, r"request_output_len = 0: must lie in \[1, "),
        ({"max_tokens": None}, "max_tokens = None: is required"),
        ({"max_tokens": np.array([[1, 2]], np.int32)}, r"max_tokens = \[1, 2\]: must hold exactly 1 value"),
        ({"text_input": np.array([[b"a"], [b"b"]], dtype=object)}, r"max_tokens = \[1, 1\]: the batch holds 2 prompts"),
        ({"temperature": real(float("nan"))}, r"temperature = nan: must lie in \[0, 100\]"),
        ({"frequency_penalty": real(float("inf"))}, "frequency_penalty = inf"),
        ({"beam_width": one(4)}, "beam_width = 4: beam search: not supported"),
        ({"num_return_sequences": one(2000)}, r"num_return_sequences = 2000: must lie in \[1, 1024\]"),
        ({"draft_input_ids": np.array([[VOCAB]], np.int32)}, f"draft_input_ids = {VOCAB}: must lie in"),
        ({"embedding_bias_words": text("a", "b")}, "embedding_bias_weights = 0: one weight per word"),
        ({"embedding_bias": np.ones((1, 3), np.float32)}, "embedding_bias length = 3"),
        ({"embedding_bias": np.full((1, VOCAB), np.nan, np.float32)}, "embedding_bias = nan: must be a number below"),
        ({"stop_words_list": np.array([[[4, 5], [9, -1]]], np.int32)}, "stop_words_list = .9.: ends must rise"),
        ({"stop_words_list": np.array([[[VOCAB], [1]]], np.int32)}, f"stop_words_list.* = {VOCAB}: must lie in"),
        ({"bad_words_list": np.array([[[VOCAB], [1]]], np.int32)}, f"bad_words_list.* = {VOCAB}: must lie in"),
        ({"min_length": one(-1)}, "min_length = -1: must lie in"),
        ({"min_tokens": one(-1), "min_length": one(3)}, "min_tokens = -1: must lie in"),
    ],
)
def test_bad_input_is_refused_by_name_value_and_limit(tensors, message):
    with pytest.raises(RequestError, match=message):
        parse(**tensors)


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_what_is_without_effect_changes_nothing(name: str):
    assert repr(parse(**{name: real(0.5)})) == repr(parse())


def test_max_tokens_beyond_the_context_are_clamped_with_a_warning(caplog):
    room = 128 - len(TOKENIZER.encode("the fox"))
    assert parse(max_tokens=one(128)).request.max_tokens == room
    assert "max_tokens = 128" in caplog.text and str(room) in caplog.text
    caplog.clear()
    assert parse(max_tokens=one(room)).request.max_tokens == room and not caplog.text


def test_each_prompt_of_a_batch_is_a_request_of_its_own():
    prompts = np.array([[b"the fox"], [b"x"]], dtype=object)
    parsed = parse_all(
        text_input=prompts,
        max_tokens=np.array([[3], [9]], np.int32),
        seed=np.array([[5], [6]], np.uint64),
        stop_words=np.array([[b"a", b"b"], [b"", b""]], dtype=object),
    )
    assert [each.request.max_tokens for each in parsed] == [3, 9]
    assert [each.request.sampling.seed for each in parsed] == [5, 6]
    assert [each.prompt_text for each in parsed] == ["the fox", "x"]
    assert [each.stop_strings for each in parsed] == [("a", "b"), ()]
    assert [(each.batch_index, each.batch_size) for each in parsed] == [(0, 2), (1, 2)]
    assert len({each.request.request_id for each in parsed}) == 2


def test_several_sequences_of_one_prompt_have_seeds_of_their_own():
    parsed = parse_all(num_return_sequences=one(3), seed=one(2**64 - 2, np.uint64), top_p=real(1.0))
    assert [each.request.sampling.seed for each in parsed] == [2**64 - 2, 2**64 - 1, 0]
    assert [(each.sequence_index, each.num_sequences) for each in parsed] == [(0, 3), (1, 3), (2, 3)]
    assert len({each.request.request_id for each in parsed}) == 3


def test_streaming_and_prompts_whose_answers_have_other_tensors_need_a_decoupled_model():
    batch = {"text_input": text("a", "b").T, "max_tokens": np.array([[3], [9]], np.int32)}
    for name in ("num_return_sequences", "return_log_probs"):
        assert len(parse_all(**batch, **{name: np.array([[1], [2]])})) > 1
        with pytest.raises(RequestError, match=rf"{name} = \[1, 2\]: must be equal for all prompts of a unary request"):
            parse_all(**batch, **{name: np.array([[1], [2]])}, is_decoupled=False)
    with pytest.raises(RequestError, match=r"^stream = True: Streaming is only supported if model is deployed"):
        parse_all(stream=one(True, bool), is_decoupled=False)


def test_logits_beyond_a_gigabyte_are_refused_before_anything_is_computed():
    wide = replace(HANDSHAKE, model=replace(MODEL, limits=Limits(2**22, 128)))
    with pytest.raises(RequestError, match=r"return_context_logits = True: .* MiB: at most 1024 MiB are returned"):
        parse_ids(list(range(100)), handshake=wide, return_context_logits=one(True, bool))
    assert parse_ids([1], handshake=wide, return_context_logits=one(True, bool)).request.wants_context_logits


ALL_OUTPUTS = ["output_ids", "sequence_length", *(spec.name for spec in TEXT_OUTPUTS if "logits" not in spec.name)]
FLAGS = ("return_log_probs", "return_perf_metrics", "return_num_input_tokens", "return_num_output_tokens")


def finished(token_ids: list[int], log_probs: list[float] | None = None) -> EngineOutput:
    stats = RequestStats(arrival_ns=5, num_drafted=4, num_accepted=3, num_allocated_blocks=3, num_reused_blocks=1)
    return EngineOutput("r", token_ids, log_probs, FinishReason.LENGTH, stats=stats)


def test_unary_answer_has_every_requested_output_and_starts_with_the_prompt():
    parsed = parse(**{flag: one(True, bool) for flag in FLAGS})
    ids = TOKENIZER.encode(" naïve xyz")
    reply = Reply(parsed, ALL_OUTPUTS, TOKENIZER)
    reply.add(EngineOutput("r", ids[:2], [-0.5, -1.0]))
    reply.add(finished(ids[2:], [-1.0] * len(ids[2:])))
    rendered = reply.render()
    arrays = dict(rendered)
    prompt = TOKENIZER.encode("the fox")
    assert rendered[0][0] == "output_ids"
    assert set(arrays) == set(ALL_OUTPUTS) - {"sequence_index"}  # of one sequence
    assert arrays["output_ids"].tolist() == [[prompt + ids]] and arrays["output_ids"].dtype == np.int32
    assert arrays["sequence_length"].tolist() == [[len(prompt) + len(ids)]]
    assert arrays["text_output"].tolist() == ["the fox naïve xyz".encode()]
    assert arrays["output_log_probs"].shape == (1, 1, len(ids))
    assert arrays["cum_log_probs"][0, 0] == pytest.approx(-1.5 - len(ids[2:]))
    assert (arrays["num_input_tokens"][0, 0], arrays["num_output_tokens"][0, 0]) == (len(prompt), len(ids))
    assert arrays["arrival_time_ns"].dtype == np.int64
    assert arrays["acceptance_rate"][0, 0] == np.float32(0.75)
    assert arrays["kv_cache_alloc_new_blocks"][0, 0] == 2


def test_streamed_answers_carry_only_what_is_new():
    parsed = parse(stream=one(True, bool), return_num_output_tokens=one(True, bool))
    reply = Reply(parsed, ALL_OUTPUTS, TOKENIZER)
    reply.add(EngineOutput("r", TOKENIZER.encode("é")[:1]))
    first = dict(reply.render())
    reply.add(finished(TOKENIZER.encode("x")))
    last = dict(reply.render())
    assert [arrays["num_output_tokens"].tolist() for arrays in (first, last)] == [[[1]], [[1]]]
    assert first["output_ids"].shape == (1, 1, 1) and last["output_ids"].shape == (1, 1, 1)
    assert last["sequence_length"].tolist() == [[1]]


def test_context_logits_come_with_the_first_response_and_the_last():
    reply = Reply(parse(stream=one(True, bool)), ["context_logits", "output_ids"], TOKENIZER)
    logits, sent = np.ones((3, 4), np.float32), []
    for output in (EngineOutput("r", [5], context_logits=logits), EngineOutput("r", [6]), finished([7])):
        reply.add(output)
        sent.append(dict(reply.render()).get("context_logits"))
    assert sent[1] is None and all(np.array_equal(each, logits[None]) for each in (sent[0], sent[2]))


def test_half_a_character_is_not_sent():
    reply = Reply(parse(stream=one(True, bool)), ["text_output"], TOKENIZER)
    reply.add(EngineOutput("r", [TOKENIZER.token_bytes.index(b"\xe6")]))  # the first byte of a character
    assert not reply.has_new_output
    reply.add(finished([]))
    assert [(name, array.tolist()) for name, array in reply.render()] == [("text_output", ["\ufffd".encode()])]


def test_text_stop_across_tokens_cuts_ids_text_and_counts():
    parsed = parse(
        stop_words=text("fo"), return_num_output_tokens=one(True, bool), exclude_input_in_output=one(True, bool)
    )
    table = TOKENIZER.token_bytes
    reply = Reply(parsed, ALL_OUTPUTS, TOKENIZER)
    reply.add(EngineOutput("r", [table.index(bytes([byte])) for byte in b"a foX"]))
    assert reply.stream.is_stopped
    reply.add(finished([table.index(b"Y")]))
    arrays = dict(reply.render())
    assert arrays["text_output"].tolist() == [b"a fo"]
    assert arrays["num_output_tokens"][0, 0] == 4 and arrays["output_ids"].shape == (1, 1, 4)


def test_converters_round_trip_and_pad():
    rows = ["the fox", "x"]
    given = {"QUERY": np.array([[row.encode()] for row in rows], dtype=object)}
    stop = np.array([[b"fox"], [b""]], dtype=object)
    given |= {"REQUEST_OUTPUT_LEN": np.array([[3], [4]], np.int32), "STOP_WORDS_DICT": stop}
    arrays = dict(preprocess(given, MODEL))
    lengths = arrays["REQUEST_INPUT_LEN"]
    assert arrays["OUT_END_ID"].tolist() == [[END_ID]] * 2
    assert arrays["STOP_WORDS_IDS"].shape[:2] == (2, 2) and arrays["STOP_WORDS_IDS"][1, 1].max() == -1
    assert arrays["BAD_WORDS_IDS"].shape == (2, 2, 0) and arrays["EMBEDDING_BIAS"].shape == (2, 0)
    tensors = {"TOKENS_BATCH": arrays["INPUT_ID"][:, None], "SEQUENCE_LENGTH": lengths}
    assert [text.decode() for text in dict(postprocess(tensors, TOKENIZER))["OUTPUT"]] == rows
    with pytest.raises(RequestError, match=r"TOKENS_BATCH length = 1048577: must be at most 1048576 ids"):
        postprocess({"TOKENS_BATCH": np.zeros((1, 1, 2**20 + 1), np.int32), "SEQUENCE_LENGTH": one(2)}, TOKENIZER)
    with pytest.raises(RequestError, match=r"TOKENS_BATCH = .*token ids must lie in"):
        postprocess({"TOKENS_BATCH": np.full((1, 1, 2), VOCAB, np.int32), "SEQUENCE_LENGTH": one(2)}, TOKENIZER)
