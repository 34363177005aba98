"""Names and defaults of the llmapi contract, without a server."""

from dataclasses import replace

import numpy as np
import pytest

from faser_backend.core.errors import RequestError
from faser_backend.core.request import EngineOutput, FinishReason, RequestStats
from faser_backend.triton.llmapi import LlmApiContract
from tests.triton.test_contract import HANDSHAKE, TOKENIZER

OUTPUTS = ["text_output", "finish_reason", "stop_reason", "cumulative_logprob", "acceptance_rate"]


def parse(**tensors):
    given = {"text_input": np.array([b"the fox"], dtype=object), **tensors}
    (parsed,) = LlmApiContract().parse(given, "r", HANDSHAKE, is_decoupled=True)
    return parsed


def test_defaults():
    parsed = parse()
    assert parsed.request.max_tokens == 32 and parsed.request.sampling.is_greedy
    assert parsed.excludes_input and not parsed.includes_stop


def test_sampling_parameters_arrive():
    request = parse(
        sampling_param_temperature=np.array([0.5], np.float32),
        sampling_param_top_k=np.array([7], np.int32),
        sampling_param_presence_penalty=np.array([0.25], np.float32),
        sampling_param_seed=np.array([9], np.uint64),
        lora_name=np.array([b"red"], dtype=object),
    ).request
    sampling = request.sampling
    assert request.lora_name == "red"
    assert (sampling.temperature, sampling.top_k, sampling.presence_penalty, sampling.seed) == (0.5, 7, 0.25, 9)


@pytest.mark.parametrize(
    ("tensors", "temperature"),
    [({"temperature": 0.5}, 0.5), ({"temperature": 0.5, "top_p": 0.0}, 0.0), ({"top_p": 1.0}, 1.0), ({}, 0.0)],
)
def test_a_temperature_alone_samples(tensors, temperature):
    given = {f"sampling_param_{name}": np.array([value], np.float32) for name, value in tensors.items()}
    assert parse(**given).request.sampling.temperature == pytest.approx(temperature)
    if temperature:
        assert parse(**given).request.sampling.seed != parse(**given).request.sampling.seed


def test_cache_use_has_the_names_of_the_llm_api():
    parsed = parse(sampling_param_return_perf_metrics=np.array([True]))
    names = ["kv_cache_reused_block", "kv_cache_missed_block", "kv_cache_hit_rate", "kv_cache_alloc_new_blocks"]
    reply = LlmApiContract().reply(replace(parsed, num_prompt_blocks=4), names, TOKENIZER)
    stats = RequestStats(num_allocated_blocks=5, num_reused_blocks=3)
    reply.add(EngineOutput("r", [], finish_reason=FinishReason.LENGTH, stats=stats))
    assert {name: array.item() for name, array in reply.render()} == dict(zip(names, (3, 1, 0.75, 2), strict=True))


def test_a_wrong_value_is_blamed_under_the_clients_name():
    with pytest.raises(RequestError, match=r"text_input = \[2\]: one prompt per request"):
        parse(text_input=np.array([b"a", b"b"], dtype=object))
    with pytest.raises(RequestError, match=r"^sampling_param_temperature = -1.0: must lie in \[0, 100\]"):
        parse(sampling_param_temperature=np.array([-1.0], np.float32))
