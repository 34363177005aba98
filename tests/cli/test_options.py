"""Options are declared once, in tables that agree with command line and config.pbtxt; help is short and imperative."""

import re
from typing import Any

import pytest
import typer

from faser_backend.cli.main import app
from faser_backend.core.config import EngineConfig, Option
from faser_backend.core.errors import ConfigError
from faser_backend.serving.parameters import ModelOptions, ServingOptions, given_parameters
from faser_backend.triton.model_configs import INFLIGHT_BATCHER, LLMAPI

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
# Namesakes with another meaning: a checkpoint, limits to compile for, a file, a share of positions, a learning rate.
NAMESAKES = {f"build --{name}" for name in ("draft", "max-num-seqs", "max-prefill-tokens")}
NAMESAKES |= {"replay --output", "simulate --acceptance", "train-head --rate"}
NO_VERB = (
    r"\w+([^s]s|ed|ing)|a|an|the|of|with|for|in|on|by|at|from|as|what|who|when|where|which|whether|how|if|its?|this|auto|"
    r"default|address|port|file|path|number|text|json|csv|kv"
)


def taken_options() -> dict[str, Option | None]:
    """Returns the declaration of every option of every command, by "command --flag"."""
    return {
        f"{name} {param.opts[0]}": getattr(command.callback, "options", {}).get(param.name)
        for name, command in COMMANDS.items()
        for param in command.params
        if param.param_type_name == "option" and param.name != "help"
    }


def badly_declared(options: dict[str, Option | None]) -> list[str]:
    """Returns the options that no table declares, or whose help is not the object that another command shows."""
    helps = {name.split()[1]: option.help for name, option in options.items() if option is not None}
    return [name for name, option in options.items() if not option or option.help is not helps[name.split()[1]]]


def is_good_help(text: str) -> bool:
    """Whether a text is sentences of at most ten words, of which the first is an imperative."""
    has_verb = re.match(r"[A-Z][a-z]+ ", text) is not None and not re.match(rf"({NO_VERB}) ", text.lower())
    return has_verb and all(len(each.split()) <= 10 and each[-1] == "." for each in re.split(r"(?<=\.)\s+", text))


def test_every_option_is_declared_once():
    options = taken_options()
    assert all(options.pop(name) for name in NAMESAKES) and len(options) > 100 and badly_declared(options) == []
    again = Option("".join(["Set the random ", "seed."]))
    assert badly_declared({"x --top": None, "x --seed": again, **options}) == ["x --top", "x --seed"]


def test_help_is_imperative_sentences_of_at_most_ten_words():
    helps = {name: command.help for name, command in COMMANDS.items()}
    helps |= {f"{name} {each.name}": each.help for name, command in COMMANDS.items() for each in command.params}
    assert {name: text for name, text in helps.items() if not is_good_help(text)} == {}
    eleven = "Kill a process that has made no progress for ten seconds."
    for text in ("", "KV blocks.", "Of the head.", "Seconds to take.", "Listens on this port.", "Set it", eleven):
        assert not is_good_help(text), text


def test_configurations_have_the_keys_of_the_tables():
    for model in (INFLIGHT_BATCHER[1], LLMAPI[0]):
        assert {*EngineConfig.keys().values(), *ServingOptions.keys().values()} <= set(model.parameters)
    served = set(COMMANDS["serve"].callback.options)
    tables = EngineConfig.options() | ServingOptions.options()
    assert {name for name, option in tables.items() if option.help} <= served


def given(**values: str) -> dict[str, str]:
    return given_parameters({"parameters": {name: {"string_value": value} for name, value in values.items()}})


def test_parameters_left_in_place_are_unset():
    assert given(gpt_model_path="${engine_dir}", max_queue_size="", out_of_vocab="${out_of_vocab}") == {}


def test_what_a_command_line_gives_comes_back_from_a_configuration():
    config = EngineConfig.from_options(max_queue_size=7, enable_prefix_reuse=False, admission="guaranteed_no_evict")
    written = config.as_parameters()
    assert written.keys() == {"max_queue_size", "enable_kv_cache_reuse", "batch_scheduler_policy"}
    assert EngineConfig.from_parameters({**given(**written), "gpu_device_ids": "0"}) == config
    assert EngineConfig.from_options(policy="file:mine.py").policy.startswith("file:/")


@pytest.mark.parametrize(
    ("table", "name", "value", "limit"),
    [
        (EngineConfig, "enable_kv_cache_reuse", "maybe", "should be a valid boolean"),
        (EngineConfig, "max_gap_ms", "-1", "should be greater than or equal to 0"),
        (ServingOptions, "out_of_vocab", "wrap", "should be 'reject' or 'clamp'"),
        (ModelOptions, "triton_max_batch_size", "0", "should be greater than or equal to 1"),
    ],
)
def test_bad_parameters_are_named(table, name, value, limit):
    with pytest.raises(ConfigError, match=f"^{name} = '{value}': Input {limit}"):
        table.from_parameters(given(**{name: value}))
