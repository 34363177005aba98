"""Values that the conformance tests send and expect, by tensor, and the tables of docs/serving.md made from them.

`python -m tests.support.conformance_cases` writes the tables between their marks.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tritonclient.utils import triton_to_np_dtype

from faser_backend.triton import tensors
from faser_backend.triton.contract import UNSUPPORTED
from faser_backend.triton.model_configs import INFLIGHT_BATCHER, LLMAPI, ModelConfig
from faser_backend.triton.tensors import TritonTensor
from tests.support.clients import Arrays, ids, one, text, text_request, token_request

DOCS = Path(__file__).resolve().parents[2] / "docs" / "serving.md"
BEGIN, END = "<!-- conformance: written by tests/support/conformance_cases.py -->", "<!-- end of conformance -->"
# Declared and ignored: they concern beams, a top_p that decays, or padding.
WITHOUT_EFFECT = frozenset(
    {"length_penalty", "len_penalty", "early_stopping", "beam_search_diversity_rate", "pad_id"}
    | {"runtime_top_p_min", "runtime_top_p_reset_ids"}
)
MESSAGES = json.dumps([{"role": "user", "content": "x"}])
VOCAB_SIZE = 321  # of the served pair
_FLAGS = (
    *("stream", "streaming", "early_stopping", "exclude_input_in_output"),
    *("return_log_probs", "return_context_logits", "return_generation_logits", "return_perf_metrics"),
    *("return_num_input_tokens", "return_num_output_tokens", "return_context_log_probs"),
    *("return_finish_reason", "return_stop_reason", "return_cumulative_logprob"),
    *("sampling_param_exclude_input_from_output", "sampling_param_return_perf_metrics"),
)
# Features that work: added to a base request, or (None) replacing a part of it.
HONOURED: dict[str, dict[str, np.ndarray | None]] = {
    "messages": {"messages": text(MESSAGES), "text_input": None},
    "bad_words": {"bad_words": text("a")},
    "stop_words": {"stop_words": text("zz")},
    "embedding_bias_words": {"embedding_bias_words": text("x"), "embedding_bias_weights": one(1.0, np.float32)},
    "embedding_bias_weights": {"embedding_bias_words": text("x"), "embedding_bias_weights": one(1.0, np.float32)},
    "draft_input_ids": {"draft_input_ids": ids(3, 4)},
    "stop_words_list": {"stop_words_list": np.array([[[4, 5], [2, -1]]], np.int32)},
    "bad_words_list": {"bad_words_list": np.array([[[4, 5], [2, -1]]], np.int32)},
    "embedding_bias": {"embedding_bias": np.zeros((1, VOCAB_SIZE), np.float32)},
    "top_k": {"top_k": one(3)},
    "guided_decoding_guide_type": {"guided_decoding_guide_type": text("json"), "end_id": one(0)},
    "guided_decoding_guide": {
        "guided_decoding_guide_type": text("regex"),
        "guided_decoding_guide": text("[a-z]+"),
        "end_id": one(0),
    },
    "runtime_top_k": {"runtime_top_k": one(3)},
    "num_draft_tokens": {"num_draft_tokens": one(0)},
    "lora_task_id": {"lora_task_id": one(0, np.uint64)},  # none; test_adapters.py has some
    "lora_weights": {"lora_weights": np.zeros((1, 0, 0), np.float16)},
    "lora_config": {"lora_config": np.zeros((1, 0, 3), np.int32)},
    "lora_name": {"lora_name": np.array([b""], dtype=object)},
    "num_return_sequences": {"num_return_sequences": one(1)},
    "MESSAGES": {"MESSAGES": text(MESSAGES), "QUERY": None},
    "BAD_WORDS_DICT": {"BAD_WORDS_DICT": text("a")},
    "STOP_WORDS_DICT": {"STOP_WORDS_DICT": text("a")},
    "EMBEDDING_BIAS_WORDS": {"EMBEDDING_BIAS_WORDS": text("x"), "EMBEDDING_BIAS_WEIGHTS": one(1.0, np.float32)},
    "EMBEDDING_BIAS_WEIGHTS": {"EMBEDDING_BIAS_WORDS": text("x"), "EMBEDDING_BIAS_WEIGHTS": one(1.0, np.float32)},
    "sampling_param_stop": {"sampling_param_stop": np.array([b"zz"], dtype=object)},
    **{flag: {flag: one(flag not in ("stream", "streaming"), np.bool_)} for flag in _FLAGS},
}
_NEUTRAL_SCALARS = {"beam_width": 1, "runtime_top_p_decay": 1.0, "retention_decode_priority": 35}


def base_request(model: ModelConfig) -> Arrays:
    """Returns a valid request of this model without optional features."""
    if model in LLMAPI:
        return {"text_input": np.array([b"def f"], dtype=object), "sampling_param_max_tokens": np.array([4], np.int32)}
    return {
        "tensorrt_llm": token_request(5, 6, 7),
        "preprocessing": {"QUERY": text("def f"), "REQUEST_OUTPUT_LEN": one(4)},
        "postprocessing": {"TOKENS_BATCH": np.array([[[5, 6, 7]]], np.int32), "SEQUENCE_LENGTH": one(3)},
    }.get(model.name, text_request())


def used(model: ModelConfig, spec: TritonTensor) -> Arrays:
    """Returns a request that uses this input."""
    given: dict[str, np.ndarray | None] = {**base_request(model)}
    if spec.name in HONOURED:
        extra = HONOURED[spec.name]
        given |= {name: value[0] if _is_flat(model, value) else value for name, value in extra.items()}  # pyright: ignore[reportOptionalSubscript]
    elif spec.name not in given:
        number = 7 if spec.name in UNSUPPORTED else 1
        given[spec.name] = _filled(model, spec, 2, "x" if spec.data_type == "STRING" else number)
    return {name: value for name, value in given.items() if value is not None}


def neutral(model: ModelConfig, spec: TritonTensor) -> Arrays:
    """Returns a request that sends this unsupported input at its neutral value."""
    value = "" if spec.data_type == "STRING" else _NEUTRAL_SCALARS.get(spec.name, 0)
    return {**base_request(model), spec.name: _filled(model, spec, 0, value)}


def _is_flat(model: ModelConfig, value: np.ndarray | None) -> bool:
    return model in LLMAPI and value is not None and value.ndim > 1


def _filled(model: ModelConfig, spec: TritonTensor, size: int, value: object) -> np.ndarray:
    shape = [size if dim < 0 else dim for dim in spec.dims]
    shape = shape if model in LLMAPI else [1, *shape]
    if spec.data_type == "STRING":
        return np.full(shape, str(value).encode(), dtype=object)
    return np.full(shape, value, triton_to_np_dtype(spec.data_type))


class Output(NamedTuple):
    """How a tensor is sent. shape: of one prompt and one sequence; n tokens are new or, unary, the whole answer."""

    shape: str
    flag: str = ""  # the input that enables it; "" for always


_PERF = Output("[1, 1]", "return_perf_metrics")
OUTPUTS = {
    "text_output": Output("[1]"),
    "output_ids": Output("[1, 1, n]"),
    "sequence_length": Output("[1, 1]"),
    "cum_log_probs": Output("[1, 1]"),
    "output_log_probs": Output("[1, 1, n]", "return_log_probs"),
    "context_logits": Output("[1, p, V]", "return_context_logits"),
    "generation_logits": Output("[1, 1, n, V]", "return_generation_logits"),
    "context_log_probs": Output("[1, p-1, 6]", "return_context_log_probs"),
    "context_top_ids": Output("[1, p-1, 5]", "return_context_log_probs"),
    "batch_index": Output("[1, 1]"),
    "sequence_index": Output("[1, 1]", "num_return_sequences"),
    "num_input_tokens": Output("[1, 1]", "return_num_input_tokens"),
    "num_output_tokens": Output("[1, 1]", "return_num_output_tokens"),
    "context_phase_params": Output("never", "never"),
    **{spec.name: _PERF for spec in tensors.TEXT_OUTPUTS if spec.name.endswith(("_ns", "_blocks", "draft_tokens"))},
    "acceptance_rate": _PERF,
    "draft_token_mask": Output("[1, 1, n]", "return_perf_metrics"),
    "total_verification_steps": _PERF,
    "INPUT_ID": Output("[1, p]"),
    "DECODER_INPUT_ID": Output("[1, 1]"),
    "REQUEST_INPUT_LEN": Output("[1, 1]"),
    "REQUEST_DECODER_INPUT_LEN": Output("[1, 1]"),
    "REQUEST_OUTPUT_LEN": Output("[1, 1]"),
    "BAD_WORDS_IDS": Output("[1, 2, 0]"),
    "STOP_WORDS_IDS": Output("[1, 2, 0]"),
    "EMBEDDING_BIAS": Output("[1, 0]"),
    "OUT_END_ID": Output("[1, 1]"),
    "OUT_PAD_ID": Output("[1, 1]"),
    "OUTPUT": Output("[1]"),
}
_NEVER = Output("never", "never")
_LLMAPI_FLAGS = {
    "text_output": "",
    "finish_reason": "return_finish_reason",
    "stop_reason": "return_stop_reason",
    "cumulative_logprob": "return_cumulative_logprob",
}


def output_of(model: ModelConfig, spec: TritonTensor) -> Output:
    if model in LLMAPI:
        return Output("[1]", _LLMAPI_FLAGS.get(spec.name, "sampling_param_return_perf_metrics"))
    return OUTPUTS.get(spec.name, _NEVER)


def shape_of(output: Output, *, num_new: int, num_prompt: int) -> tuple[int, ...]:
    sizes = {"n": num_new, "p": num_prompt, "p-1": num_prompt - 1, "V": VOCAB_SIZE}
    return tuple(sizes[part] if part in sizes else int(part) for part in output.shape.strip("[]").split(", "))


# -- the tables -----------------------------------------------------------------------------------------------------
def meaning_of(spec: TritonTensor) -> str:
    if spec.name in UNSUPPORTED:
        return f"refused ({UNSUPPORTED[spec.name].feature})"
    return "no effect" if spec.name in WITHOUT_EFFECT else "works"


def sending_of(models: tuple[ModelConfig, ...], spec: TritonTensor) -> tuple[str, str]:
    """Returns when an output is sent, its type and its shape."""
    output = output_of(models[0], spec)
    sent = {"": "always", "never": "never"}.get(output.flag, f"with `{output.flag}`")
    return sent, spec.data_type + ("" if sent == "never" else output.shape.replace(" ", ""))


def table_lines() -> Iterator[str]:
    """Returns a row per set of models: tensors by their effect here, then by type and shape."""
    for title, models in (("inflight_batcher", INFLIGHT_BATCHER), ("llmapi", LLMAPI)):
        for side in ("inputs", "outputs"):
            yield f"| models | {side} of `{title}` (`tests/triton/test_conformance.py::test_{side[:-1]}`) |\n|---|---|"
            rows: dict[str, dict[str, dict[str, list[str]]]] = {}
            for spec, names in _by_spec(models, side):
                if side == "inputs":
                    meaning, kind = meaning_of(spec), f"{spec.data_type}[{','.join(map(str, spec.dims))}]"
                else:
                    meaning, kind = sending_of(models, spec)
                rows.setdefault(names, {}).setdefault(meaning, {}).setdefault(kind, []).append(f"`{spec.name}`")
            for names, meanings in rows.items():
                columns = [
                    f"{meaning}: " + "; ".join(f"{kind} {', '.join(found)}" for kind, found in kinds.items())
                    for meaning, kinds in meanings.items()
                ]
                yield f"| {names} | {'<br>'.join(columns)} |"
            yield ""


def _by_spec(models: tuple[ModelConfig, ...], side: str) -> Iterator[tuple[TritonTensor, str]]:
    """Returns each tensor once, with the models that have it."""
    found: dict[TritonTensor, list[str]] = {}
    for model in models:
        for spec in getattr(model, side):
            found.setdefault(spec, []).append(model.name.replace("tensorrt_llm_bls", "bls"))
    for spec, names in found.items():
        yield spec, "the three" if len(names) == 3 else ", ".join(names)


def written(docs: str, begin: str = BEGIN, lines: Iterable[str] | None = None, end: str = END) -> str:
    """Returns the page with the current lines between its marks, those of the tensors unless others are given."""
    between = "\n".join(table_lines() if lines is None else lines)
    return f"{docs.partition(begin)[0]}{begin}\n{between}{end}{docs.partition(end)[2]}"


if __name__ == "__main__":
    DOCS.write_text(written(DOCS.read_text(encoding="utf-8")), encoding="utf-8")
