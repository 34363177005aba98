"""Writes config.pbtxt of every served model from the tensor tables.

`python -m faser_backend.triton.model_configs` wrote the files in model_repo/ and model_repo_llmapi/, as a test checks.
They load as they are: a parameter left as `${name}` is unset. max_batch_size and the transaction policy, which NVIDIA's
templates leave open, are parameters too: `launch_text` or the model's `auto_complete_config` fills them in.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from faser_backend.core.config import EngineConfig
from faser_backend.serving.parameters import ModelOptions, ServingOptions
from faser_backend.triton import tensors
from faser_backend.triton.tensors import TritonTensor

BATCH_SIZE_KEY, DECOUPLED_KEY = "triton_max_batch_size", "decoupled_mode"
# Parameters whose name differs from the key that fills them, as in TensorRT-LLM's files.
_RENAMED = {"gpt_model_path": "engine_dir", "gpt_model_type": "batching_strategy"}
_ENGINE_KEYS = " ".join([*ServingOptions.keys().values(), *EngineConfig.keys().values()])
# Accepted without effect, for configurations written for TensorRT-LLM (docs/serving.md).
_ENGINE_KEYS_WITHOUT_EFFECT = (
    "triton_backend max_beam_width executor_worker_path tokenizer_dir encoder_engine_dir max_queue_delay_microseconds "
    "logits_datatype encoder_input_features_data_type prompt_embedding_table_data_type max_attention_window_size "
    "sink_token_length kv_cache_free_gpu_mem_fraction cross_kv_cache_fraction kv_cache_host_memory_bytes "
    "kv_cache_onboard_blocks enable_trt_overlap iter_stats_max_iterations request_stats_max_iterations "
    "normalize_log_probs enable_chunked_context gpu_device_ids participant_ids num_nodes "
    "lora_cache_optimal_adapter_size lora_cache_max_adapter_size lora_cache_gpu_memory_fraction "
    "lora_prefetch_dir decoding_mode lookahead_window_size lookahead_ngram_size "
    "lookahead_verification_set_size medusa_choices eagle_choices gpu_weights_percent enable_context_fmha_fp32_acc "
    "multi_block_mode cuda_graph_mode cuda_graph_cache_size speculative_decoding_fast_logits guided_decoding_backend "
    "xgrammar_tokenizer_info_path"
)
_REPORTING_KEYS = "log_format otlp_endpoint"  # of models that answer requests
_CONVERTER_KEYS = "log_format tokenizer_dir max_queue_delay_microseconds max_queue_size"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model: its tensors, the class that serves it, and the names of its parameters."""

    name: str
    comment: str
    python_class: str
    inputs: tuple[TritonTensor, ...]
    outputs: tuple[TritonTensor, ...]
    parameters: tuple[str, ...]


def _names(*keys: str) -> tuple[str, ...]:
    return tuple(name for group in keys for name in group.split())


INFLIGHT_BATCHER = (
    ModelConfig(
        "ensemble",
        "Text in, text out. Its transaction policy is that of tensorrt_llm.",
        "TextModel",
        tensors.TEXT_INPUTS,
        tensors.TEXT_OUTPUTS,
        _names(BATCH_SIZE_KEY, DECOUPLED_KEY, _REPORTING_KEYS, "logits_datatype"),
    ),
    ModelConfig(
        "tensorrt_llm",
        "Token ids in, token ids out. Draft and target live in this model's process, and only here.",
        "EngineModel",
        tensors.TOKEN_INPUTS,
        tensors.TOKEN_OUTPUTS,
        _names(BATCH_SIZE_KEY, DECOUPLED_KEY, _ENGINE_KEYS, _REPORTING_KEYS, _ENGINE_KEYS_WITHOUT_EFFECT),
    ),
    ModelConfig(
        "tensorrt_llm_bls",
        "Text in, text out, with num_draft_tokens as a cap on speculation per request (0 opts out).",
        "TextModel",
        tensors.TEXT_INPUTS,
        tensors.TEXT_OUTPUTS,
        _names(
            BATCH_SIZE_KEY,
            DECOUPLED_KEY,
            _REPORTING_KEYS,
            "accumulate_tokens bls_instance_count tensorrt_llm_model_name tensorrt_llm_draft_model_name",
            "multimodal_encoders_name logits_datatype prompt_embedding_table_data_type",
        ),
    ),
    ModelConfig(
        "preprocessing",
        "Text, or messages written by the chat template -> token ids, for clients that call it themselves.",
        "PreprocessingModel",
        tensors.PREPROCESSING_INPUTS,
        tensors.PREPROCESSING_OUTPUTS,
        _names(
            BATCH_SIZE_KEY,
            "add_special_tokens",
            _CONVERTER_KEYS,
            "preprocessing_instance_count multimodal_model_path gpt_model_path max_num_images hf_model_path",
        ),
    ),
    ModelConfig(
        "postprocessing",
        "Token ids -> text, for clients that call it themselves.",
        "PostprocessingModel",
        tensors.POSTPROCESSING_INPUTS,
        tensors.POSTPROCESSING_OUTPUTS,
        _names(BATCH_SIZE_KEY, "skip_special_tokens", _CONVERTER_KEYS, "postprocessing_instance_count"),
    ),
)
LLMAPI = (
    ModelConfig(
        "tensorrt_llm",
        "The llmapi contract: text in, text out, no batch dimension; draft and target live in this model's process.",
        "LlmApiModel",
        tensors.LLMAPI_INPUTS,
        tensors.LLMAPI_OUTPUTS,
        _names(
            DECOUPLED_KEY,
            _ENGINE_KEYS,
            _REPORTING_KEYS,
            "max_beam_width executor_worker_path",
            "kv_cache_free_gpu_mem_fraction enable_chunked_context normalize_log_probs gpu_device_ids tokenizer_dir",
        ),
    ),
)
CONTRACTS = {  # name -> the models that clients call
    "inflight_batcher": tuple(model.name for model in INFLIGHT_BATCHER),
    "llmapi": tuple(model.name for model in LLMAPI),
}
# Values that TensorRT-LLM's tools read in a model's configuration, which `faser serve` fills in for this engine.
TRUTHS = {"batching_strategy": "inflight_fused_batching", "max_beam_width": "1", "executor_worker_path": "none"}


def config_text(model: ModelConfig) -> str:
    """Returns a model's configuration as it is shipped."""
    parameters = (
        f'parameters {{ key: "{name}" value {{ string_value: "${{{_RENAMED.get(name, name)}}}" }} }}\n'
        for name in model.parameters
    )
    return (
        f"# {model.comment}\n"
        "# Written by `python -m faser_backend.triton.model_configs`. A parameter left as ${name} is unset;\n"
        "# docs/serving.md says what each means. max_batch_size and the transaction policy come from the parameters.\n"
        f'name: "{model.name}"\n'
        'backend: "python"\n'
        f"input [\n{_tensor_lines(model.inputs, are_inputs=True)}\n]\n"
        f"output [\n{_tensor_lines(model.outputs, are_inputs=False)}\n]\n"
        "instance_group [ { count: 1 kind: KIND_CPU } ]\n" + "".join(parameters)
    )


def _tensor_lines(specs: Iterable[TritonTensor], *, are_inputs: bool) -> str:
    lines = []
    for spec in specs:
        dims = ", ".join(map(str, spec.dims))
        optional = " optional: true" if are_inputs and spec.is_optional else ""
        lines.append(f'  {{ name: "{spec.name}" data_type: TYPE_{spec.data_type} dims: [ {dims} ]{optional} }}')
    return ",\n".join(lines)


def launch_text(text: str, *, is_decoupled: bool, parameters: Mapping[str, str]) -> str:
    """Returns a shipped file with parameters, batch size and transaction policy, for a server that completes none."""
    given = {_RENAMED.get(name, name): value for name, value in parameters.items()}
    values = {**TRUTHS, DECOUPLED_KEY: str(is_decoupled).lower(), **given}
    has_batch = f"${{{BATCH_SIZE_KEY}}}" in text
    for name, value in values.items():
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        text = text.replace(f'"${{{name}}}"', f'"{escaped}"')
    if has_batch:
        text += f"max_batch_size: {ModelOptions.from_parameters(values).triton_max_batch_size}\n"
    if f'key: "{DECOUPLED_KEY}"' in text:
        text += f"model_transaction_policy {{ decoupled: {str(is_decoupled).lower()} }}\n"
    return text


def known_keys() -> frozenset[str]:
    """Returns all parameters of models, by their names and by the keys that fill them."""
    names = {name for model in (*INFLIGHT_BATCHER, *LLMAPI) for name in model.parameters}
    return frozenset(names | {_RENAMED[name] for name in names & _RENAMED.keys()})


MODEL_FILE = """\
import os
import sys

sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))  # which Triton's interpreter ignores

from faser_backend.triton.model import {} as TritonPythonModel  # noqa: E402

__all__ = ["TritonPythonModel"]
"""


def write_repositories(root: Path) -> list[Path]:
    """Writes every config.pbtxt and model.py below root. Returns the configurations."""
    written = []
    for folder, models in (("model_repo", INFLIGHT_BATCHER), ("model_repo_llmapi", LLMAPI)):
        for model in models:
            version = root / folder / model.name / "1"
            version.mkdir(parents=True, exist_ok=True)
            (version / "model.py").write_text(MODEL_FILE.format(model.python_class))
            written.append(version.parent / "config.pbtxt")
            written[-1].write_text(config_text(model))
    return written


if __name__ == "__main__":
    from faser_backend.places import data_folder

    parser = argparse.ArgumentParser(description="Writes the model repositories.")
    parser.add_argument("folder", type=Path, nargs="?", default=data_folder(), help="default: where the package's lie")
    for path in write_repositories(parser.parse_args().folder):
        print(path)
