"""Tensors of unary and streamed replies and of the two converters, without a server."""

import numpy as np
import pytest

from faser_backend.core.errors import RequestError
from faser_backend.core.request import EngineOutput, FinishReason, RequestStats
from faser_backend.triton.converters import postprocess, preprocess
from faser_backend.triton.tensor_io import Reply
from faser_backend.triton.tensors import TEXT_OUTPUTS
from tests.support.serving_pair import END_ID
from tests.triton.test_contract import MODEL, TOKENIZER, VOCAB, number, parse, text

ALL_OUTPUTS = ["output_ids", "sequence_length", *(spec.name for spec in TEXT_OUTPUTS if "logits" not in spec.name)]
FLAGS = ("return_log_probs", "return_perf_metrics", "return_num_input_tokens", "return_num_output_tokens")


def finished(token_ids: list[int], log_probs: list[float] | None = None) -> EngineOutput:
    stats = RequestStats(arrival_ns=5, num_drafted=4, num_accepted=3, num_allocated_blocks=3, num_reused_blocks=1)
    return EngineOutput("r", token_ids, log_probs, FinishReason.LENGTH, stats=stats)


def test_unary_answer_has_every_requested_output_and_starts_with_the_prompt():
    parsed = parse(**{flag: number(True, bool) for flag in FLAGS})
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
    parsed = parse(stream=number(True, bool), return_num_output_tokens=number(True, bool))
    reply = Reply(parsed, ALL_OUTPUTS, TOKENIZER)
    reply.add(EngineOutput("r", TOKENIZER.encode("é")[:1]))
    first = dict(reply.render())
    reply.add(finished(TOKENIZER.encode("x")))
    last = dict(reply.render())
    assert [arrays["num_output_tokens"].tolist() for arrays in (first, last)] == [[[1]], [[1]]]
    assert first["output_ids"].shape == (1, 1, 1) and last["output_ids"].shape == (1, 1, 1)
    assert last["sequence_length"].tolist() == [[1]]


def test_context_logits_come_with_the_first_response_and_the_last():
    reply = Reply(parse(stream=number(True, bool)), ["context_logits", "output_ids"], TOKENIZER)
    logits, sent = np.ones((3, 4), np.float32), []
    for output in (EngineOutput("r", [5], context_logits=logits), EngineOutput("r", [6]), finished([7])):
        reply.add(output)
        sent.append(dict(reply.render()).get("context_logits"))
    assert sent[1] is None and all(np.array_equal(each, logits[None]) for each in (sent[0], sent[2]))


def test_half_a_character_is_not_sent():
    reply = Reply(parse(stream=number(True, bool)), ["text_output"], TOKENIZER)
    half = TOKENIZER.token_bytes.index(b"\xe6")
    reply.add(EngineOutput("r", [half]))
    assert not reply.has_new_output
    reply.add(finished([]))
    assert [(name, array.tolist()) for name, array in reply.render()] == [("text_output", ["\ufffd".encode()])]


def test_text_stop_across_tokens_cuts_ids_text_and_counts():
    parsed = parse(
        stop_words=text("fo"), return_num_output_tokens=number(True, bool), exclude_input_in_output=number(True, bool)
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
        postprocess({"TOKENS_BATCH": np.zeros((1, 1, 2**20 + 1), np.int32), "SEQUENCE_LENGTH": number(2)}, TOKENIZER)
    with pytest.raises(RequestError, match=r"TOKENS_BATCH = .*token ids must lie in"):
        postprocess({"TOKENS_BATCH": np.full((1, 1, 2), VOCAB, np.int32), "SEQUENCE_LENGTH": number(2)}, TOKENIZER)
