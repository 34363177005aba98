"""The tensors of every served model: those of TensorRT-LLM's Triton models, and extensions.

One table per contract. `model_configs.py` writes config.pbtxt files from it; `contract.py`, `converters.py` and
`llmapi.py` read and answer requests that follow it. Tensors of unsupported features are declared too, so that a request
is refused by name, and only if it uses one (`contract.UNSUPPORTED`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

Tensors = Mapping[str, np.ndarray]


class TritonTensor(NamedTuple):
    """A tensor of a model: Triton's data type without its prefix, dimensions without the batch."""

    name: str
    data_type: str
    dims: tuple[int, ...] = (1,)
    is_optional: bool = True


def _specs(data_type: str, names: str, dims: tuple[int, ...] = (1,)) -> tuple[TritonTensor, ...]:
    return tuple(TritonTensor(name, data_type, dims) for name in names.split())


# -- inputs that text and token models share -----------------------------------------------------------------------
_SAMPLING = (
    *_specs("INT32", "end_id pad_id min_tokens min_length beam_width num_return_sequences num_draft_tokens"),
    *_specs("FP32", "temperature min_p repetition_penalty presence_penalty frequency_penalty"),
    *_specs("BOOL", "early_stopping"),
    *_specs("UINT64", "seed random_seed"),
)
_ANSWER = (
    *_specs("BOOL", "return_log_probs return_context_logits return_generation_logits return_perf_metrics"),
    *_specs("BOOL", "return_num_input_tokens return_num_output_tokens exclude_input_in_output stop"),
)
_ADAPTERS = (
    *_specs("UINT64", "lora_task_id"),
    *_specs("FP16", "lora_weights", (-1, -1)),
    *_specs("INT32", "lora_config", (-1, 3)),
    *_specs("STRING", "guided_decoding_guide_type guided_decoding_guide"),
    *_specs("FP16", "prompt_embedding_table", (-1, -1)),
    *_specs("INT32", "prompt_vocab_size"),
)

# -- `ensemble` and `tensorrt_llm_bls`: text in, text out ----------------------------------------------------------
TEXT_INPUTS = (
    *_specs("STRING", "text_input messages decoder_text_input"),
    TritonTensor("max_tokens", "INT32", is_optional=False),
    *_specs("STRING", "bad_words stop_words embedding_bias_words", (-1,)),
    *_specs("FP32", "embedding_bias_weights", (-1,)),
    *_specs("INT32", "top_k"),
    *_specs("FP32", "top_p length_penalty"),
    *_specs("BOOL", "stream use_draft_logits"),
    *_SAMPLING,
    *_ANSWER,
    *_ADAPTERS,
    *_specs("UINT64", "prompt_table_extra_id"),
    *_specs("FP16", "image_input", (-1, 3, -1, -1)),
    *_specs("UINT8", "image_bytes_input video_bytes_input", (-1, -1, -1, -1)),
    *_specs("STRING", "image_url_input"),
)

# -- `tensorrt_llm`: token ids in, token ids out -------------------------------------------------------------------
TOKEN_INPUTS = (
    *_specs("INT32", "input_ids", (-1,)),
    TritonTensor("input_lengths", "INT32", is_optional=False),
    TritonTensor("request_output_len", "INT32", is_optional=False),
    *_specs("INT32", "draft_input_ids decoder_input_ids encoder_input_ids", (-1,)),
    *_specs("INT32", "decoder_input_lengths encoder_output_lengths"),
    *_specs("FP32", "draft_logits", (-1, -1)),
    *_specs("FP32", "draft_acceptance_threshold"),
    *_specs("FP16", "encoder_input_features", (-1, -1)),
    *_specs("BOOL", "cross_attention_mask", (-1, -1)),
    *_specs("BOOL", "skip_cross_attn_blocks streaming return_context_log_probs"),
    *_specs("INT32", "stop_words_list bad_words_list", (2, -1)),
    *_specs("FP32", "embedding_bias", (-1,)),
    *_specs("INT32", "runtime_top_k runtime_top_p_reset_ids"),
    *_specs("FP32", "runtime_top_p runtime_top_p_min runtime_top_p_decay len_penalty beam_search_diversity_rate"),
    *_SAMPLING,
    *_ANSWER,
    *_ADAPTERS,
    *_specs("UINT64", "prompt_table_extra_ids", (-1,)),
    *_specs("FP32", "mrope_rotary_cos_sin", (-1,)),
    *_specs("INT64", "mrope_position_deltas"),
    *_specs("UINT8", "context_phase_params", (-1,)),
    *_specs("INT32", "retention_token_range_starts retention_token_range_ends", (-1,)),
    *_specs("INT32", "retention_token_range_priorities retention_token_range_durations_ms", (-1,)),
    *_specs("INT32", "retention_decode_priority retention_decode_duration_ms"),
    *_specs("INT32", "lookahead_window_size lookahead_ngram_size lookahead_verification_set_size"),
)

_COMMON_OUTPUTS = (
    *_specs("FP32", "cum_log_probs", (-1,)),
    *_specs("FP32", "output_log_probs", (-1, -1)),
    *_specs("FP32", "context_logits", (-1, -1)),
    *_specs("FP32", "generation_logits", (-1, -1, -1)),
    *_specs("INT32", "batch_index sequence_index"),
    *_specs("INT32", "kv_cache_alloc_new_blocks kv_cache_reused_blocks kv_cache_alloc_total_blocks"),
    *_specs("INT64", "arrival_time_ns first_scheduled_time_ns first_token_time_ns last_token_time_ns"),
    *_specs("FP32", "acceptance_rate"),
    *_specs("INT32", "total_accepted_draft_tokens total_draft_tokens num_input_tokens num_output_tokens"),
)
TEXT_OUTPUTS = (*_specs("STRING", "text_output", (-1,)), *_COMMON_OUTPUTS)
TOKEN_OUTPUTS = (
    *_specs("INT32", "output_ids", (-1, -1)),
    *_specs("INT32", "sequence_length", (-1,)),
    *_COMMON_OUTPUTS,
    *_specs("BOOL", "draft_token_mask", (-1, -1)),
    *_specs("FP32", "context_log_probs", (-1, -1)),
    *_specs("INT32", "context_top_ids", (-1, -1)),
    *_specs("INT32", "total_verification_steps"),
    *_specs("UINT8", "context_phase_params", (-1,)),
)

# -- `preprocessing` and `postprocessing` --------------------------------------------------------------------------
PREPROCESSING_INPUTS = (
    *_specs("STRING", "QUERY MESSAGES DECODER_QUERY IMAGE_URL"),
    TritonTensor("REQUEST_OUTPUT_LEN", "INT32", is_optional=False),
    *_specs("STRING", "BAD_WORDS_DICT STOP_WORDS_DICT EMBEDDING_BIAS_WORDS IMAGES", (-1,)),
    *_specs("FP32", "EMBEDDING_BIAS_WEIGHTS", (-1,)),
    *_specs("INT32", "END_ID PAD_ID"),
    *_specs("UINT64", "PROMPT_TABLE_EXTRA_ID"),
    *_specs("UINT8", "IMAGE_BYTES VIDEO_BYTES", (-1, -1, -1, -1)),
)
PREPROCESSING_OUTPUTS = (  # those from OUT_PROMPT_TABLE_EXTRA_IDS on belong to models with images and are never sent
    *_specs("INT32", "INPUT_ID", (-1,)),
    *_specs("INT32", "DECODER_INPUT_ID", (-1,)),
    *_specs("INT32", "BAD_WORDS_IDS STOP_WORDS_IDS", (2, -1)),
    *_specs("INT32", "REQUEST_INPUT_LEN REQUEST_DECODER_INPUT_LEN"),
    *_specs("INT32", "REQUEST_OUTPUT_LEN", (-1,)),
    *_specs("FP32", "EMBEDDING_BIAS", (-1,)),
    *_specs("INT32", "OUT_END_ID OUT_PAD_ID"),
    *_specs("UINT64", "OUT_PROMPT_TABLE_EXTRA_IDS", (-1,)),
    *_specs("FP16", "PIXEL_VALUES", (-1, -1, -1, -1)),
    *_specs("INT64", "ASPECT_RATIO_IDS ATTENTION_MASK", (-1,)),
    *_specs("INT64", "ASPECT_RATIO_MASK", (-1, -1)),
    *_specs("INT64", "CROSS_ATTENTION_MASK", (-1, -1, -1)),
    *_specs("INT64", "IMAGE_SIZES", (-1, 2)),
    *_specs("BOOL", "IS_VIDEO_INPUT"),
    *_specs("INT64", "IMAGE_GRID_THW", (3,)),
    *_specs("INT32", "VISION_INPUT_ID", (-1,)),
)
POSTPROCESSING_INPUTS = (
    TritonTensor("TOKENS_BATCH", "INT32", (-1, -1), is_optional=False),
    TritonTensor("SEQUENCE_LENGTH", "INT32", (-1,), is_optional=False),
)
POSTPROCESSING_OUTPUTS = _specs("STRING", "OUTPUT", (-1,))

# -- `tensorrt_llm` of the llmapi contract, which has no batch dimension -------------------------------------------
LLMAPI_INPUTS = (
    *_specs("STRING", "text_input", (-1,)),
    *_specs("STRING", "messages"),
    *_specs("STRING", "image_url sampling_param_stop", (-1,)),
    *_specs("BOOL", "streaming stop return_finish_reason return_stop_reason return_cumulative_logprob"),
    *_specs("BOOL", "sampling_param_exclude_input_from_output sampling_param_return_perf_metrics"),
    *_specs("INT32", "sampling_param_best_of sampling_param_max_tokens sampling_param_top_k"),
    *_specs("FP32", "sampling_param_temperature sampling_param_top_p"),
    *_specs("FP32", "sampling_param_frequency_penalty sampling_param_presence_penalty"),
    *_specs("UINT64", "sampling_param_seed lora_id"),
    *_specs("STRING", "sampling_param_logits_post_processor_name lora_name lora_path lora_ckpt_source"),
)
LLMAPI_OUTPUTS = (
    *_specs("STRING", "text_output finish_reason stop_reason", (-1,)),
    *_specs("FP32", "cumulative_logprob", (-1,)),
    *_specs("INT32", "kv_cache_reused_block kv_cache_missed_block", (-1,)),
    *_specs("INT32", "kv_cache_alloc_new_blocks kv_cache_alloc_total_blocks", (-1,)),
    *_specs("FP32", "kv_cache_hit_rate", (-1,)),
    *_specs("INT64", "arrival_time_ns first_scheduled_time_ns first_token_time_ns last_token_time_ns"),
    *_specs("FP32", "acceptance_rate"),
    *_specs("INT32", "total_accepted_draft_tokens total_draft_tokens"),
)
