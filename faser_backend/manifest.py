"""`manifest.json`: the only contract between building engines and serving them.

`faser_backend.engines.build` writes it once. Each process that loads a directory verifies its texts. Weights are
verified where they are opened, once per start.

Tensors of a segment (T rows, B sequences, Q = most rows of one sequence, MB = block table columns,
R = logit rows, K = exit candidates). Integers are int64 unless noted.

Runtime "tensorrt_rtx", which supports no custom ops and writes nothing in place:
  in   token_ids or hidden; positions; pad_idx [B, Q], the row of each padded entry (padding repeats a valid
       row); unpad_idx [T], flat index into B * Q; block_table [B, MB]; columns [MB * kv_block_size] = 0, 1, 2, ...;
       context_lens [B], the tokens in the pool before this call; logit_rows; exit_candidates; k_pool.i,
       v_pool.i [Hkv, num_blocks, kv_block_size, head_dim] for each layer i
  out  hidden_out, logits, exit_scores; k_new.i, v_new.i [T, Hkv, head_dim], which the runner writes to the pool
Runtimes "tensorrt", "torch" and "llvm", whose attention is the project's kernel, which writes the pool:
  in   token_ids or hidden; positions; slot_mapping [T] int32, position of each new key and value (block *
       kv_block_size + offset), -1 for a row that is not written; cu_rows [B + 1] int32; context_lens [B] int32;
       block_table [B, MB] int32; logit_rows (last segment); exit_candidates; k_pool.i, v_pool.i
  out  hidden_out, logits, exit_scores; "tensorrt" also k_pool_out.i, v_pool_out.i, aliases of the inputs
The target of a head also has out aux_hidden.i [T, hidden_size], the input of layer i, for each of its feature_layers.
Heads have two segments. The first, without layers, joins hidden states at the rows' positions: in aux_hidden.i; out
hidden_out [T, hidden_size]. The second is the layer: in token_ids, hidden, and its runtime's inputs above; out logits,
hidden_out [R, hidden_size], of the logit rows only. Block drafters also have two: one writes keys and values, one runs
blocks, of which DSpark's also has out hidden_out [R, hidden_size], normalised.
Runtimes "torch" and "llvm" replace all aux_hidden.i by the pool that keeps them, features [num_blocks, kv_block_size,
number of feature_layers, hidden_size], by slot_mapping. They compile nothing ahead of time: all segments of a model
name its one safetensors file. For "llvm", matrices are in the layout of its kernels. Hidden states, keys and values
have the manifest's dtype, logits and exit scores are float32. In runtime "llvm", the pool's keys and values have the
kv_cache_dtype.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from faser_backend.core.errors import ManifestError
from faser_backend.core.model import COMPUTES, FLOAT32_WEIGHTS, TWO_PARTS, ModelSpec, WeightFormat
from faser_backend.files import MAX_NAME_BYTES, FileError, read_json, shown
from faser_backend.runtime_spec import RUNTIMES, RuntimeSpec

FORMAT_VERSION = 5
MANIFEST_FILE = "manifest.json"
MAX_MANIFEST_BYTES = 16 << 20
DTYPES = ("fp32", "fp16", "bf16")
CPU_KV_CACHE_DTYPES = ("fp32", "fp16")  # on a CPU; on a GPU, keys and values have the engine's dtype
HASH_BLOCK_BYTES = 64 << 20  # hashed between two reports


@dataclass(frozen=True, slots=True)
class FileSpec:
    """A file of the engine directory."""

    name: str
    sha256: str
    num_bytes: int
    mtime_ns: int = field(default=0, compare=False)  # when it was built; 0: not recorded

    @classmethod
    def of(cls, path: Path) -> FileSpec:
        return cls(path.name, file_sha256(path), path.stat().st_size, path.stat().st_mtime_ns)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output of a segment. A dimension is a number, or the name of a dynamic dimension."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """The calls that an optimisation profile of an engine is tuned for. A bucket's index is its profile's."""

    name: str
    # least, usual and largest value of each dynamic dimension; not hashed, as models are keys of dictionaries
    ranges: dict[str, tuple[int, int, int]] = field(hash=False)
    split: str = ""  # the SM split of the profile, e.g. "16/116"; "" for any share


@dataclass(frozen=True, slots=True)
class SegmentSpec:
    """Layers [first_layer, last_layer) of a model as one compiled graph."""

    file: FileSpec
    first_layer: int
    last_layer: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    buckets: tuple[BucketSpec, ...] = ()  # empty if the runtime accepts calls of any shape

    def most(self, dimension: str) -> int:
        """Returns the largest size of a dimension of its calls, such as "B"."""
        sizes = (each.ranges[dimension][2] for each in self.buckets if dimension in each.ranges)
        return max(sizes, default=sys.maxsize)

    @property
    def has_exit_scores(self) -> bool:
        return any(tensor.name == "exit_scores" for tensor in self.outputs)


@dataclass(frozen=True, slots=True)
class ModelEngine:
    """A built model: its segments in order, and the weight file that they share."""

    spec: ModelSpec
    weights: FileSpec | None  # None if each segment's file holds its own
    segments: tuple[SegmentSpec, ...]
    weight_format: WeightFormat = FLOAT32_WEIGHTS

    @property
    def files(self) -> tuple[FileSpec, ...]:
        """The files, each once, as segments may share one."""
        shared = () if self.weights is None else (self.weights,)
        return tuple(dict.fromkeys((*shared, *(segment.file for segment in self.segments))))

    @property
    def num_weight_bytes(self) -> int:
        """About how many bytes the loaded weights take."""
        return sum(file.num_bytes for file in self.files)


@dataclass(frozen=True, slots=True)
class EngineManifest:
    """The description of an engine directory, for a server."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 (not a field, but an option of `load`)

    runtime: str
    dtype: str
    kv_block_size: Annotated[int, Field(ge=1)]
    kv_cache_dtype: str  # of keys and values in the pool
    exit_layers: tuple[int, ...]
    target: ModelEngine
    draft: ModelEngine | None  # None: drafting by n-grams
    vocab_hash: str
    end_ids: tuple[int, ...]
    tokenizer: FileSpec
    tokenizer_config: FileSpec  # for AutoTokenizer in clients
    prompts: FileSpec  # chat template and special tokens
    builder_version: str
    format_version: int = FORMAT_VERSION
    compiler: str = ""  # name and version, if segments are compiled ahead of time
    compute: str = TWO_PARTS  # of products in runtime "llvm", one of COMPUTES
    compute_capabilities: tuple[str, ...] = ()  # compiled for, e.g. "8.9"; empty: the default

    @property
    def models(self) -> dict[str, ModelEngine]:
        """The target, and the draft if there is one, by name."""
        return {"target": self.target} | ({} if self.draft is None else {"draft": self.draft})

    @property
    def texts(self) -> tuple[FileSpec, ...]:
        return (self.tokenizer, self.tokenizer_config, self.prompts)

    @property
    def files(self) -> tuple[FileSpec, ...]:
        return (*self.texts, *(file for model in self.models.values() for file in model.files))

    @property
    def runtime_spec(self) -> RuntimeSpec:
        return RUNTIMES[self.runtime]

    def save(self, directory: Path) -> None:
        """Writes manifest.json atomically."""
        partial = directory / (MANIFEST_FILE + ".partial")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n")
        os.replace(partial, directory / MANIFEST_FILE)

    @classmethod
    def load(cls, directory: Path) -> EngineManifest:
        """Reads a directory; verifies its texts, and the sizes of its weights. Raises ManifestError with the reason."""
        path, fields = Path(directory) / MANIFEST_FILE, read_manifest_fields(directory)
        try:
            manifest = TypeAdapter(cls).validate_json(json.dumps(fields), strict=True)  # JSON: no lists as tuples else
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise ManifestError(f"{path}: malformed ({field} = {first['input']!r:.80}: {first['msg']})") from None
        manifest._check_fields(path)
        for file in manifest.files:
            _check_size(path.parent, file)
        for file in manifest.texts:
            _check_hash(path.parent, file)
        return manifest

    def verify_weights(
        self, directory: Path, *, is_full: bool = False, report: Callable[[int, int], None] = lambda done, total: None
    ) -> None:
        """Hashes each file of the models once. Raises ManifestError if one is not as built.

        is_full: even a file whose time stamp is as built; its size was checked on loading. report: called with the
        bytes hashed and their total.
        """
        models = dict.fromkeys(file for model in self.models.values() for file in model.files)
        hashed = [f for f in models if is_full or (directory / f.name).stat().st_mtime_ns != f.mtime_ns]
        done, total = 0, sum(file.num_bytes for file in hashed)
        for file in hashed:
            _check_hash(directory, file, lambda num_bytes, before=done: report(before + num_bytes, total))
            done += file.num_bytes

    def _check_fields(self, path: Path) -> None:
        _check_choice(path, "runtime", self.runtime, tuple(RUNTIMES))
        _check_choice(path, "dtype", self.dtype, DTYPES)
        kv_cache_dtypes = CPU_KV_CACHE_DTYPES if self.runtime_spec.is_cpu else (self.dtype,)
        _check_choice(path, "kv_cache_dtype", self.kv_cache_dtype, kv_cache_dtypes)
        _check_choice(path, "compute", self.compute, COMPUTES if self.runtime_spec.is_cpu else (TWO_PARTS,))
        sizes = [model.spec.vocab_size for model in self.models.values()]
        if sizes[0] != sizes[-1]:
            raise ManifestError(f"{path}: vocab_size of target = {sizes[0]} and of draft = {sizes[-1]} must be equal")
        for name, model in self.models.items():
            cuts = [0, *(segment.last_layer for segment in model.segments)]
            starts = [segment.first_layer for segment in model.segments]
            if cuts[:-1] != starts or cuts[-1] != model.spec.num_layers:
                raise ManifestError(
                    f"{path}: {name}.segments do not cover layers 0 to {model.spec.num_layers} in order"
                )
        for end_id in self.end_ids:
            if not 0 <= end_id < sizes[0]:
                raise ManifestError(f"{path}: end_ids = {end_id}: must lie in [0, {sizes[0] - 1}]")


def read_manifest_fields(directory: Path) -> dict[str, Any]:
    """Returns the fields of manifest.json, checking only the version. Raises ManifestError naming the file."""
    path = Path(directory) / MANIFEST_FILE
    try:
        fields = read_json(path, MAX_MANIFEST_BYTES)
    except FileError as error:
        raise ManifestError(_not_an_engine(Path(directory)) or str(error)) from None
    version = fields.get("format_version") if isinstance(fields, dict) else None
    if version != FORMAT_VERSION:
        raise ManifestError(
            f"{path}: format_version = {version!r:.80}: this version reads {FORMAT_VERSION}; build again"
        )
    return fields


def _not_an_engine(directory: Path) -> str:
    """Returns what a path without a manifest is and which command builds it; "" if it has a manifest."""
    place, build = shown(directory), "faser build --target"
    is_model = (directory / "config.json").is_file() and any(directory.glob("*.safetensors"))
    if is_model or directory.suffix == ".gguf" or any(directory.glob("*.gguf")):
        path = shlex.quote(str(directory))
        return f"{place}: a checkpoint, no engine directory; run `faser serve {path}` or `{build} {path} --output DIR`"
    if directory.is_file():
        return f"{place}: a file, not an engine directory; `{build} CHECKPOINT --output DIR` makes one"
    if os.path.lexists(directory / MANIFEST_FILE):
        return ""
    if directory.is_dir() and any(directory.iterdir()):
        return f"{place}/{MANIFEST_FILE}: missing; `{build} CHECKPOINT --output DIR` makes an engine directory"
    return f"{place}/{MANIFEST_FILE}: missing; build engines into this directory first"


def file_sha256(path: Path, report: Callable[[int], None] = lambda num_bytes: None) -> str:
    """Returns a file's hash. report: called with the bytes read so far."""
    digest, block = hashlib.sha256(), memoryview(bytearray(min(HASH_BLOCK_BYTES, path.stat().st_size + 1)))
    with path.open("rb", buffering=0) as file:
        while num_bytes := file.readinto(block):
            digest.update(block[:num_bytes])
            report(file.tell())
    return digest.hexdigest()


def _check_choice(path: Path, field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ManifestError(f"{path}: {field} = {value!r:.80}: must be one of {', '.join(choices)}")


def _check_size(directory: Path, file: FileSpec) -> None:
    path = directory / file.name
    is_plain = Path(file.name).name == file.name and file.name not in ("", ".", "..")
    if not is_plain or len(file.name.encode(errors="replace")) > MAX_NAME_BYTES:
        raise ManifestError(
            f"{directory / MANIFEST_FILE}: file name = {file.name!r:.80}: must be a plain name of at most "
            f"{MAX_NAME_BYTES} bytes"
        )
    if not path.is_file():
        raise ManifestError(f"{path}: missing")
    num_bytes = path.stat().st_size
    if num_bytes != file.num_bytes:
        reason = "truncated" if num_bytes < file.num_bytes else "changed"
        raise ManifestError(f"{path}: {reason}: {num_bytes} bytes instead of {file.num_bytes}")


def _check_hash(directory: Path, file: FileSpec, report: Callable[[int], None] = lambda num_bytes: None) -> None:
    path = directory / file.name
    digest = file_sha256(path, report)
    if digest != file.sha256:
        raise ManifestError(f"{path}: changed since it was built: sha256 {digest[:12]} instead of {file.sha256[:12]}")
