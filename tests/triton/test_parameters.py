"""Options that a config.pbtxt gives, without a server."""

from __future__ import annotations

import subprocess
import sys

import pytest

from faser_backend.core.config import EngineConfig
from faser_backend.core.errors import ConfigError
from faser_backend.serving.parameters import ModelOptions, ServingOptions, given_parameters


def given(**values: str) -> dict[str, str]:
    return given_parameters({"parameters": {name: {"string_value": value} for name, value in values.items()}})


def test_parameters_left_in_place_are_unset():
    assert given(gpt_model_path="${engine_dir}", max_queue_size="", out_of_vocab="${out_of_vocab}") == {}


def test_what_a_command_line_gives_comes_back_from_a_configuration():
    config = EngineConfig.from_options(max_queue_size=7, enable_prefix_reuse=False, admission="guaranteed_no_evict")
    written = config.as_parameters()
    assert written.keys() == {"max_queue_size", "enable_kv_cache_reuse", "batch_scheduler_policy"}
    assert EngineConfig.from_parameters({**given(**written), "gpu_device_ids": "0"}) == config


@pytest.mark.parametrize(
    ("table", "name", "value", "limit"),
    [
        (EngineConfig, "max_queue_size", "many", "should be a valid integer"),
        (EngineConfig, "enable_kv_cache_reuse", "maybe", "should be a valid boolean"),
        (EngineConfig, "batch_scheduler_policy", "best", "should be 'max_utilization' or"),
        (ServingOptions, "out_of_vocab", "wrap", "should be 'reject' or 'clamp'"),
        (ServingOptions, "gpt_model_type", "V1", "should be 'inflight_batching' or"),
        (ModelOptions, "triton_max_batch_size", "0", "should be greater than or equal to 1"),
        (ModelOptions, "log_format", "xml", "should be 'text' or 'json'"),
    ],
)
def test_bad_parameters_are_named(table, name, value, limit):
    with pytest.raises(ConfigError, match=f"^{name} = '{value}': Input {limit}"):
        table.from_parameters(given(**{name: value}))


def test_the_former_names_of_the_command_and_of_the_models_still_work(tmp_path):
    command = [sys.executable, "-m", "faser_backend.serving.model_configs", str(tmp_path)]
    subprocess.run(command, capture_output=True, check=True, timeout=60)
    assert (tmp_path / "model_repo" / "ensemble" / "config.pbtxt").is_file()
    stub = "import sys, unittest.mock as m; sys.modules['triton_python_backend_utils'] = m.MagicMock()\n"
    code = stub + "from faser_backend.serving.triton_model import TextModel; print(TextModel.__module__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "faser_backend.triton.model\n"
