"""Metrics that dashboards and TensorRT-LLM's own tests read."""

import json
import re
import time
import urllib.request
from pathlib import Path

from faser_backend.pipeline.engine import STEP_KINDS
from tests.support.clients import infer_http, text_request, token_request
from tests.support.processes import wait_until
from tests.support.served import Served, serve

ROOT = Path(__file__).parents[2]
OURS = ("price", "drafted_tokens", "wasted_tokens")
PROMPT = "def größe(x):\n"


def metrics_of(served: Served) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{served.metrics_port}/metrics") as answer:
        return answer.read().decode()


def check_labels(lines: str) -> None:
    """Asserts the lines that dashboards select."""
    for line in (
        'nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="active",version="1"} ',
        'nv_trt_llm_runtime_memory_metrics{memory_type="cpu",model="tensorrt_llm",version="1"} ',
        'nv_trt_llm_runtime_memory_metrics{memory_type="gpu",model="tensorrt_llm",version="1"} ',
        'nv_trt_llm_runtime_memory_metrics{memory_type="pinned",model="tensorrt_llm",version="1"} ',
        'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"} 16',
        'nv_trt_llm_disaggregated_serving_metrics{disaggregated_serving_type="request_count",model="tensorrt_llm",',
        'nv_trt_llm_inflight_batcher_metrics{inflight_batcher_specific_metric="micro_batch_id",model="tensorrt_llm",',
        'nv_llm_input_token_len_bucket{model="tensorrt_llm",response_metric_type="total_input_tokens",version="1",le="10"}',
        'nv_llm_output_token_len_bucket{model="tensorrt_llm",response_metric_type="total_output_tokens",version="1",le="50"}',
    ):
        assert line in lines, line
    found = re.search(
        r'nv_trt_llm_general_metrics{general_type="timestamp",model="tensorrt_llm",version="1"} (\S+)', lines
    )
    assert found is not None and abs(float(found[1]) / 1e6 - time.time()) < 60 and float(found[1]).is_integer()


def check_dashboard(lines: str) -> None:
    """Asserts that the server has every metric of the dashboard, and that they add up."""
    shown = {line.partition("{")[0] for line in lines.splitlines() if line and not line.startswith("#")}
    panels = json.loads((ROOT / "deploy" / "grafana.json").read_text())["panels"]
    queries = " ".join(target["expr"] for panel in panels for target in panel["targets"])
    asked = set(re.findall(r"[a-z_:]+(?=\{)", queries))
    assert len(asked) > 12 and asked <= shown
    labels = set(re.findall(r'(\w+_type|\w+_metric)="(\w+)"', queries))
    assert all(f'{label}="{value}"' in lines for label, value in labels)
    assert {value for _, value in labels} > {"price", "wasted_tokens"}
    number = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines.splitlines() if line[:1] != "#"}

    def total(family: str) -> float:
        return sum(value for name, value in number.items() if name.partition("{")[0] == family)

    assert total("gen_ai_server_time_to_first_token_seconds_count") == total("vllm:request_success_total") >= 3
    assert total("gen_ai_server_request_duration_seconds_sum") >= total("vllm:request_queue_time_seconds_sum") > 0
    accepted = total("vllm:spec_decode_num_accepted_tokens_total")
    assert 0 < total("vllm:spec_decode_num_accepted_tokens_per_pos_total") <= accepted
    drafted = total("vllm:spec_decode_num_draft_tokens_total")
    assert accepted <= drafted
    ours = 'nv_trt_llm_speculative_decoding_metrics{model="tensorrt_llm",speculative_decoding_type='
    told = {kind: number[f'{ours}"{kind}",version="1"}}'] for kind in OURS}
    assert told["price"] > 0 and told["wasted_tokens"] == drafted - accepted == told["drafted_tokens"] - accepted
    steps = "faser:steps_total{mode="
    modes = {mode: number[f'{steps}"{mode}",model="tensorrt_llm",version="1"}}'] for mode in STEP_KINDS}
    assert sum(modes.values()) == total("faser:steps_total") > 0 and modes["serial"] > 0 == modes["ping_pong"]


def counters_of(served: Served) -> dict[str, dict[str, int]]:
    """Returns the nv_inference counters by model, read as TensorRT-LLM's own test reads them."""
    found: dict[str, dict[str, int]] = {}
    for line in metrics_of(served).splitlines():
        if line.startswith("nv_inference") and "reason=" not in line:
            name, labels, value = line.replace("{", " {").split()
            found.setdefault(labels.split('"')[1], {})[name.removeprefix("nv_inference_")] = int(value)
    return found


def test_all_four_models_count_alike_and_lines_have_the_labels_that_dashboards_select(engine_dir: Path):
    names = ["ensemble", "preprocessing", "tensorrt_llm", "postprocessing"]
    with serve("--engine-dir", engine_dir, "--num-threads", 1, "--no-decoupled") as served:
        for length in (3, 5, 8):
            infer_http(served.http_port, "ensemble", text_request(PROMPT, length))
        wait_until(lambda: counters_of(served)["postprocessing"]["request_success"] >= 3, "the ensemble's requests")
        counters = counters_of(served)
        assert set(counters) == {*names, "tensorrt_llm_bls"}
        for counter in ("request_success", "count", "exec_count", "pending_request_count"):
            assert len({counters[name][counter] for name in names}) == 1, counter
        for part in ("request", "compute_input", "compute_infer", "compute_output"):
            parts = [counters[name][f"{part}_duration_us"] for name in names[1:]]
            assert sum(parts) > 0 and counters["ensemble"][f"{part}_duration_us"] > 0
        # The same unit: one that counted nanoseconds or milliseconds would be a thousandfold off. (No closer: a model's
        # account ends when its answer has left, the ensemble's when the client's has, and load stretches either.)
        whole = counters["ensemble"]["request_duration_us"]
        assert whole / 50 < sum(counters[name]["request_duration_us"] for name in names[1:]) < 50 * whole
        deadline = time.monotonic() + 30
        while not re.search(r"accepted_tokens_per_pos_total{.*} [1-9]", metrics_of(served)):  # the policy may wait
            assert time.monotonic() < deadline, "no draft token is accepted"
            infer_http(served.http_port, "ensemble", text_request(PROMPT, 40))
            time.sleep(0.3)
        time.sleep(1.0)  # periods of all metrics: they then cover the last step and all requests
        check_labels(metrics_of(served))
        check_dashboard(metrics_of(served))
        num_before = counters_of(served)["tensorrt_llm"]["request_success"]
        infer_http(served.http_port, "tensorrt_llm", token_request(5, 6))
        wait_until(lambda: counters_of(served)["tensorrt_llm"]["request_success"] > num_before, "a direct request")
