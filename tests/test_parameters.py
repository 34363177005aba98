"""Parameters of config.pbtxt, without a server."""

from __future__ import annotations

import pytest

from faser_backend.core.errors import ConfigError
from faser_backend.serving.parameters import Parameters, read_engine_config, read_serving_options


def parameters(**values: str) -> Parameters:
    return Parameters({"parameters": {name: {"string_value": value} for name, value in values.items()}})


def test_parameters_left_in_place_are_unset():
    unset = parameters(gpt_model_path="${engine_dir}", max_queue_size="", out_of_vocab="${out_of_vocab}")
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
        ({"gpt_model_type": "V1", "out_of_vocab": "clamp"}, "Invalid gpt_model_type 'V1': must be inflight_batching"),
    ],
)
def test_bad_parameters_are_named(values, message):
    read = read_serving_options if "out_of_vocab" in values else read_engine_config
    with pytest.raises(ConfigError, match=message):
        read(parameters(**values))
