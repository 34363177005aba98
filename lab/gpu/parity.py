"""Compares a runtime with the CPU on the demo pair: logits row by row, and whole answers through the engine.

Both read the same tokens: prompts in one ragged chunk, then verifications of 1 to 5 rows along the reference's greedy
answers. Every stage (build, load, run) is noted before it begins, so that a crash names its stage.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from faser_backend.core.batch import RowBatch
from faser_backend.core.config import EngineConfig
from faser_backend.core.request import Request, Sampling
from faser_backend.device.runtime import ModelPair, OpenRunner
from faser_backend.engines.build import build_engines
from faser_backend.lab.drive import write_all
from faser_backend.lab.gpu.harness import Context, Result
from faser_backend.lab.gpu.pairs import checked_device, write_untrained_head
from faser_backend.lab.prompts import DEMO_PROMPTS
from faser_backend.manifest import EngineManifest
from faser_backend.pipeline.rows import run_model
from faser_backend.plugins.tensorrt_import import Flavour, TensorRtError, import_tensorrt
from faser_backend.serving.compose import build_engine
from faser_backend.serving.model_source import DEMO_PAIR
from faser_backend.serving.runtimes import AnyRuntime, open_runtime
from faser_backend.text.prompts import read_prompts

EXIT_LAYERS = (2,)
# A different token is a near-tie if the reference's two best logits are at most this far apart.
TIES = {"fp32": 1e-3, "fp16": 5e-2, "bf16": 4e-1}
ANSWER_TOKENS = 24
RUNS = (("none", 0.0), ("fixed:4", 0.0), ("fixed:4", 0.8))  # policies and temperatures


class Build(NamedTuple):
    """An engine directory to compare. has_head: an untrained head replaces the demo draft."""

    dtype: str
    has_head: bool = False

    @property
    def row(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "options": "--draft HEAD" if self.has_head else ""}


def torch_runtime(context: Context) -> Result:
    checked_device(context)
    return compare(context, "torch", (Build("fp32"), Build("bf16"), Build("fp16")))


# Heads on TensorRT are compared in one dtype, last.
def rtx_runtime(context: Context) -> Result:
    return _compare_compiled(context, "tensorrt_rtx", "rtx", (Build("fp16"), Build("fp32"), Build("fp16", True)))


def tensorrt_runtime(context: Context) -> Result:
    return _compare_compiled(context, "tensorrt", "full", (Build("fp16"), Build("fp16", True)))


def _compare_compiled(context: Context, runtime: str, flavour: Flavour, builds: tuple[Build, ...]) -> Result:
    try:
        title = import_tensorrt(flavour).title
    except TensorRtError as error:
        return {"runtime": runtime, "dtypes": [{**builds[0].row, "stage": "import", "error": str(error)}]}
    return {"title": title, **compare(context, runtime, builds)}


def compare(context: Context, runtime: str, builds: tuple[Build, ...]) -> Result:
    """Compares each build, one row each in "dtypes". A tiny check compares only the first, and the one with a head."""
    found: Result = {"runtime": runtime, "dtypes": []}
    if context.is_tiny:
        builds = (builds[0], *(build for build in builds[1:] if build.has_head))
    with tempfile.TemporaryDirectory(prefix="faser-parity-") as folder:
        reference_dir = Path(folder) / "llvm"
        exact: dict[str, Any] = {"weights": "fp32", "draft_weights": "fp32", "kv_cache_dtype": "fp32"}
        build_engines(DEMO_PAIR / "target", DEMO_PAIR / "draft", reference_dir, exit_layers=EXIT_LAYERS, **exact)
        prompts = _prompts(reference_dir, 2 if context.is_tiny else 8)
        num_tokens = 6 if context.is_tiny else ANSWER_TOKENS
        reference = _reference(reference_dir, prompts, num_tokens)
        for index, build in enumerate(builds):
            row: dict[str, Any] = {**build.row, "stage": "build"}
            found["dtypes"].append(row)
            context.save(found)
            try:
                _check(context, found, row, build, Path(folder) / f"{runtime}-{index}", reference)
            except Exception as error:
                row |= {"error": f"{type(error).__name__}: {error}"[:600], "is_right": False}
            context.save(found)
    return found


@dataclass(frozen=True, slots=True)
class Reference:
    """The answers of runtime llvm: texts [prompt + answer], and the logits of each answer's rows."""

    engine_dir: Path
    prompts: list[np.ndarray]
    texts: list[np.ndarray]
    num_tokens: int
    logits: dict[str, np.ndarray]  # by model, [prompts, num_tokens, V]


def _reference(engine_dir: Path, prompts: list[np.ndarray], num_tokens: int) -> Reference:
    texts = answers(engine_dir, prompts, num_tokens, policy="none")
    with _opened(engine_dir) as (runtime, models):
        named = zip(ModelPair._fields, models, strict=True)
        logits = {name: forced_logits(runtime, model, prompts, texts) for name, model in named}
    return Reference(engine_dir, prompts, texts, num_tokens, logits)


def _check(  # noqa: PLR0917
    context: Context, found: Result, row: dict[str, Any], build: Build, engine_dir: Path, reference: Reference
) -> None:
    """Fills the row, stage by stage."""

    def begin(stage: str) -> None:
        row["stage"] = stage
        context.save(found)

    target, draft = DEMO_PAIR / "target", DEMO_PAIR / "draft"
    if build.has_head:
        draft = write_untrained_head(target, engine_dir.with_name("head"), context.seed)
    start = time.monotonic()
    build_engines(target, draft, engine_dir, runtime=found["runtime"], dtype=build.dtype, exit_layers=EXIT_LAYERS)
    row["build_s"] = time.monotonic() - start
    begin("load")
    start = time.monotonic()
    with _opened(engine_dir) as (runtime, models):
        row["load_s"] = time.monotonic() - start
        for name, model in zip(ModelPair._fields, models, strict=True):
            if model is None or model.spec.reads_target:
                continue  # a head reads the target's states, so it does not run alone
            begin(f"run {name}")
            logits = forced_logits(runtime, model, reference.prompts, reference.texts)
            row[name] = compare_logits(logits, reference.logits[name], TIES[build.dtype])
    for policy, temperature in RUNS:
        begin(f"engine, {policy}, temperature {temperature:g}")
        expected = reference.texts
        if temperature:
            expected = answers(
                reference.engine_dir, reference.prompts, reference.num_tokens, policy="none", temperature=temperature
            )
        texts = answers(engine_dir, reference.prompts, reference.num_tokens, policy=policy, temperature=temperature)
        equal = [np.array_equal(*pair) for pair in zip(texts, expected, strict=True)]
        answer = {"policy": policy, "temperature": temperature, "num_answers": len(equal), "num_equal": sum(equal)}
        row.setdefault("answers", []).append(answer)
    judged = [row[name] for name in ModelPair._fields if name in row]
    row["is_right"] = all(each["num_different"] == each["num_near_ties"] for each in judged)
    begin("done")


def compare_logits(found: np.ndarray, expected: np.ndarray, tie: float) -> dict[str, float]:
    """Returns errors of logits [..., V], how often the best token differs, and how often that is a near-tie."""
    differs = found.argmax(axis=-1) != expected.argmax(axis=-1)
    best = np.sort(expected, axis=-1)[..., -2:]
    is_tie = best[..., 1] - best[..., 0] <= tie
    error = np.abs(found - expected)
    return {
        "num_rows": int(differs.size),
        "max_error": float(error.max()),
        "mean_error": float(error.mean()),
        "largest_logit": float(np.abs(expected).max()),
        "num_different": int(differs.sum()),
        "num_near_ties": int((differs & is_tie).sum()),
    }


def forced_logits(runtime: AnyRuntime, model: Any, prompts: list[np.ndarray], texts: list[np.ndarray]) -> np.ndarray:
    """Returns the rows that yield each answer's tokens, fed in chunks of 1 to 5 rows: [prompts, answer tokens, V]."""
    runtime.bind_step_thread()
    size, block_size = len(texts), runtime.kv_block_size
    each = -(-max(text.size for text in texts) // block_size)
    pool = runtime.open_pool(model, size * each)
    tables = np.arange(size * each).reshape(size, each)
    with closing(runtime.open_runner(model, runtime.menu.whole, pool)) as runner:
        lens = np.array([prompt.size - 1 for prompt in prompts])
        _feed(runner, texts, np.zeros(size, np.int64), lens, tables, with_logits=False)
        ends = np.array([text.size - 1 for text in texts])
        rows: list[list[np.ndarray]] = [[] for _ in texts]
        for step in range(10_000):
            alive = np.flatnonzero(lens < ends)
            if not alive.size:
                break
            counts = np.minimum(1 + (step + alive) % 5, (ends - lens)[alive])
            logits = _feed(
                runner, [texts[i] for i in alive], lens[alive], lens[alive] + counts, tables[alive], with_logits=True
            )
            for index, part in zip(alive, np.split(logits, np.cumsum(counts)[:-1]), strict=True):
                rows[index].append(part)
            lens[alive] += counts
    return np.stack([np.concatenate(parts) for parts in rows])


def _feed(
    runner: OpenRunner,
    texts: list[np.ndarray],
    starts: np.ndarray,
    stops: np.ndarray,
    tables: np.ndarray,
    *,
    with_logits: bool,
) -> np.ndarray:
    """Feeds tokens [start, stop) of each text. Returns logits of all rows or of none, copied to the host."""
    tokens = np.concatenate([text[a:b] for text, a, b in zip(texts, starts, stops, strict=True)])
    rows = RowBatch(
        token_ids=tokens,
        cu_rows=np.concatenate([[0], np.cumsum(stops - starts)]),
        context_lens=starts.copy(),
        block_tables=tables,
        logit_rows=np.arange(tokens.size if with_logits else 0),
    )
    logits: Any = run_model(runner, rows)
    return np.array(logits.float().cpu().numpy() if hasattr(logits, "cpu") else logits)


def answers(
    engine_dir: Path, prompts: list[np.ndarray], num_tokens: int, *, policy: str, temperature: float = 0.0
) -> list[np.ndarray]:
    """Returns prompt and answer of each, through a whole engine, all requests at once."""
    config = EngineConfig.from_options(policy=policy, max_num_seqs=max(2, len(prompts)))
    requests = [
        Request(str(index), prompt, num_tokens, Sampling(temperature=temperature, seed=index))
        for index, prompt in enumerate(prompts)
    ]
    with closing(build_engine(engine_dir, config)) as engine:
        written = write_all(engine, requests)
    return [np.append(prompt, written[str(index)]) for index, prompt in enumerate(prompts)]


@contextmanager
def _opened(engine_dir: Path) -> Iterator[tuple[AnyRuntime, ModelPair]]:
    manifest = EngineManifest.load(engine_dir)
    with closing(open_runtime(engine_dir, manifest, EngineConfig())) as runtime:
        yield runtime, ModelPair(manifest.target, manifest.draft)


def _prompts(engine_dir: Path, count: int) -> list[np.ndarray]:
    """Returns held-out prompts of up to 96 tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(engine_dir / "tokenizer.json"))
    prompts = read_prompts(DEMO_PROMPTS)[:count]
    return [np.array(tokenizer.encode(prompt.text).ids[-96:], np.int64) for prompt in prompts]
