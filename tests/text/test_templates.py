"""The shipped configurations: what writes them, and what becomes of them when they are filled like NVIDIA's.

The server is started here as in NVIDIA's container, without `faser serve`.
"""

import json
import os
import shutil
import signal
import string
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from faser_backend.places import MODEL_REPO, data_folder
from faser_backend.triton import server
from faser_backend.triton.model_configs import write_repositories
from tests.support.clients import ids_of, infer_grpc, stream_grpc, text_of, text_request, token_request
from tests.support.served import on_free_ports

# The values that guides to TensorRT-LLM's backend fill in, by model.
KEYS = {
    "ensemble": "triton_max_batch_size logits_datatype",
    "preprocessing": "triton_max_batch_size tokenizer_dir preprocessing_instance_count add_special_tokens engine_dir "
    "multimodal_model_path max_num_images max_queue_delay_microseconds max_queue_size hf_model_path",
    "postprocessing": "triton_max_batch_size tokenizer_dir postprocessing_instance_count skip_special_tokens",
    "tensorrt_llm_bls": "triton_max_batch_size decoupled_mode bls_instance_count accumulate_tokens logits_datatype "
    "tensorrt_llm_model_name tensorrt_llm_draft_model_name",
    "tensorrt_llm": "triton_backend triton_max_batch_size decoupled_mode engine_dir batching_strategy max_beam_width "
    "max_tokens_in_paged_kv_cache max_attention_window_size kv_cache_free_gpu_mem_fraction exclude_input_in_output "
    "enable_kv_cache_reuse max_queue_delay_microseconds max_queue_size encoder_input_features_data_type "
    "logits_datatype normalize_log_probs enable_chunked_context gpu_device_ids decoding_mode participant_ids "
    "lora_cache_optimal_adapter_size batch_scheduler_policy cancellation_check_period_ms stats_check_period_ms",
}
VALUES = {
    "triton_max_batch_size": "3",
    "decoupled_mode": "False",
    "batching_strategy": "inflight_fused_batching",
    "exclude_input_in_output": "True",
    "accumulate_tokens": "True",
    "logits_datatype": "TYPE_FP32",
    "add_special_tokens": "False",
}


def fill(config: Path, values: dict[str, str]) -> None:
    """Fills a template like NVIDIA's script: every key must exist, and other keys keep their values."""
    text = config.read_text()
    missing = [key for key in values if f"${{{key}}}" not in text]
    assert missing == []
    config.write_text(string.Template(text).safe_substitute({"max_queue_size": 0, **values}))


@contextmanager
def tritonserver(folder: Path) -> Iterator[tuple[int, int]]:
    """Starts tritonserver itself on folder/model_repo, as in a container. Yields its HTTP and gRPC ports."""
    install, options, log = server.find_triton(), on_free_ports(), (folder / "log").open("w")
    command = [word for word in server.server_command(install, folder, options) if "auto-complete" not in word]
    common = {"env": server.server_environment(install), "stdout": log, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, **common, process_group=0)  # with its stubs, which an abort leaves behind
    try:
        deadline = time.monotonic() + 240  # eight processes load Python, on a machine that may be busy
        while True:
            if process.poll() == -6:  # aborted by the race of server.LOCK_ERROR
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process = subprocess.Popen(command, **common, process_group=0)
            assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{options.http_port}/v2/health/ready", timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield options.http_port, options.grpc_port
    finally:
        process.terminate()
        process.wait(40)


def test_shipped_configurations_are_those_of_the_tables(tmp_path):
    for written in write_repositories(tmp_path):
        shipped = data_folder() / written.relative_to(tmp_path)
        assert shipped.read_text() == written.read_text(), "run python -m faser_backend.triton.model_configs"
        assert (shipped.parent / "1" / "model.py").read_text() == (written.parent / "1" / "model.py").read_text()


def test_filled_templates_are_honoured(engine_dir: Path, tmp_path: Path):
    shutil.copytree(MODEL_REPO, tmp_path / "model_repo")
    for model, keys in KEYS.items():
        values = {key: VALUES.get(key, "") for key in keys.split()}
        if model == "tensorrt_llm":
            values["engine_dir"] = str(engine_dir)
        fill(tmp_path / "model_repo" / model / "config.pbtxt", values)
    with tritonserver(tmp_path) as (http, grpc):
        for model in KEYS:
            with urllib.request.urlopen(f"http://127.0.0.1:{http}/v2/models/{model}/config") as answer:
                config = json.loads(answer.read())
            assert config["max_batch_size"] == 3
            assert not config.get("model_transaction_policy", {}).get("decoupled", False)
        assert len(ids_of(infer_grpc(grpc, "tensorrt_llm", token_request(5, 6, 7)))) == 4  # without the prompt
        four = {name: np.concatenate([array] * 4) for name, array in token_request(5, 6).items()}
        with pytest.raises(InferenceServerException, match="batch-size must be <= 3"):
            infer_grpc(grpc, "tensorrt_llm", four)
        assert text_of(infer_grpc(grpc, "ensemble", text_request()))


def test_accumulated_tokens_and_shipped_files_as_they_are(engine_dir: Path, tmp_path: Path):
    """Streams with only the engine and the accumulation of tensorrt_llm_bls filled in."""
    for model in ("tensorrt_llm", "tensorrt_llm_bls", "ensemble"):
        shutil.copytree(MODEL_REPO / model, tmp_path / "model_repo" / model)
    fill(tmp_path / "model_repo" / "tensorrt_llm" / "config.pbtxt", {"engine_dir": str(engine_dir)})
    fill(tmp_path / "model_repo" / "tensorrt_llm_bls" / "config.pbtxt", {"accumulate_tokens": "true"})
    with tritonserver(tmp_path) as (_, grpc):
        arrays = text_request(max_tokens=200, stream=np.array([[True]]))
        deltas = [text_of(each) for each in stream_grpc(grpc, "ensemble", arrays, ["text_output"])]
        whole = [text_of(each) for each in stream_grpc(grpc, "tensorrt_llm_bls", arrays, ["text_output"], at_least=2)]
        assert whole[-1] == "".join(deltas)
        assert all(later.startswith(earlier) for earlier, later in pairwise(whole))
