"""`manifest.json`: the only contract between building engines and serving them.

Plain frozen values, written once by `faser_backend.engines.build` and verified file by file when a server loads
them. Knows the formats of the directory, nothing of graphs, runtimes or text.

Tensors of a segment (T rows, B sequences, Q = most rows of one sequence, MB = block table columns,
R = logit rows, K = exit candidates). Integers are int64 unless it says otherwise.

Runtime "tensorrt_rtx", where no op of ours can be compiled and nothing is written in place:
  in   token_ids or hidden; positions; pad_idx [B, Q], the row of each padded entry (padding repeats a valid
       row); unpad_idx [T], flat index into B * Q; block_table [B, MB]; columns [MB * kv_block_size] = 0, 1, 2, ...;
       context_lens [B], how many tokens the pool held before this call; logit_rows; exit_candidates; k_pool.i,
       v_pool.i [Hkv, num_blocks, kv_block_size, head_dim] for each layer i
  out  hidden_out, logits, exit_scores; k_new.i, v_new.i [T, Hkv, head_dim], which the runner writes to the pool
Runtimes "tensorrt", "torch" and "llvm", whose attention is a kernel of ours and writes the pool itself:
  in   token_ids or hidden; positions; slot_mapping [T] int32, flat slot of each new key and value (block *
       kv_block_size + offset), -1 for a row that writes nothing; cu_rows [B + 1] int32; context_lens [B] int32;
       block_table [B, MB] int32; logit_rows (last segment); exit_candidates; k_pool.i, v_pool.i
  out  hidden_out, logits, exit_scores; "tensorrt" also k_pool_out.i, v_pool_out.i, aliases of the inputs
A target whose draft is a head: out aux_hidden.i [T, hidden_size], the input of layer i, for each of its feature_layers.
Draft heads have two segments. The first, of no layers, joins what lies at the rows' positions: in aux_hidden.i; out
hidden_out [T, hidden_size]. The second is the layer: in token_ids and hidden beside what its runtime has above; out
logits, hidden_out [R, hidden_size], of the logit rows alone.
Runtimes "torch" and "llvm" have in the place of all aux_hidden.i the pool that keeps them, features [num_blocks,
kv_block_size, number of feature_layers, hidden_size], by slot_mapping. They compile nothing ahead: all segments of a
model name its one weight file, safetensors; of "llvm" with matrices in the layout of its kernels.
Hidden states, keys and values have the manifest's dtype, logits and exit scores are float32; in the pool of runtime
"llvm" keys and values have its kv_cache_dtype.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from faser_backend.core.errors import ManifestError
from faser_backend.core.model import FLOAT32_WEIGHTS, ModelSpec, WeightFormat, check_spec
from faser_backend.files import MAX_NAME_BYTES, FileError, read_json, shown
from faser_backend.runtime_spec import RUNTIMES, RuntimeSpec
from faser_backend.vocabulary import read_vocabulary, vocab_hash

FORMAT_VERSION = 5
MANIFEST_FILE = "manifest.json"
MAX_MANIFEST_BYTES = 16 << 20
DTYPES = ("fp32", "fp16", "bf16")
CPU_KV_CACHE_DTYPES = ("fp32", "fp16")  # of a CPU; elsewhere keys and values have the engine's dtype


@dataclass(frozen=True, slots=True)
class FileSpec:
    """A file of the engine directory, by plain name."""

    name: str
    sha256: str
    num_bytes: int

    @classmethod
    def of(cls, path: Path) -> FileSpec:
        return cls(path.name, file_sha256(path), path.stat().st_size)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a segment; a dimension is a number or the name of a dynamic one."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """Calls that one optimisation profile of an engine was tuned for: a bucket's index is its profile's."""

    name: str
    # least, usual and most of each dynamic dimension; unhashed, since models are keys of what was loaded for them
    ranges: dict[str, tuple[int, int, int]] = field(hash=False)
    split: str = ""  # the SM split that the profile belongs to, e.g. "16/116"; "" where any share may run it


@dataclass(frozen=True, slots=True)
class SegmentSpec:
    """Layers [first_layer, last_layer) of a model as one compiled graph."""

    file: FileSpec
    first_layer: int
    last_layer: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    buckets: tuple[BucketSpec, ...] = ()  # empty where the runtime takes calls of any shape

    @property
    def has_exit_scores(self) -> bool:
        return any(tensor.name == "exit_scores" for tensor in self.outputs)


@dataclass(frozen=True, slots=True)
class ModelEngine:
    """A compiled model: its segments in order, and the one weight file that they share."""

    spec: ModelSpec
    weights: FileSpec | None  # None where each segment's file holds its own
    segments: tuple[SegmentSpec, ...]
    weight_format: WeightFormat = FLOAT32_WEIGHTS

    @property
    def files(self) -> tuple[FileSpec, ...]:
        """Each file once: segments may share one."""
        shared = () if self.weights is None else (self.weights,)
        return tuple(dict.fromkeys((*shared, *(segment.file for segment in self.segments))))

    @property
    def num_weight_bytes(self) -> int:
        """Bytes that weights take when they are loaded, about."""
        return sum(file.num_bytes for file in self.files)


@dataclass(frozen=True, slots=True)
class EngineManifest:
    """Everything that a server needs to know of an engine directory."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 (no field: how `load` reads a file)

    runtime: str
    dtype: str
    kv_block_size: int
    kv_cache_dtype: str  # of keys and values in the pool
    exit_layers: tuple[int, ...]
    target: ModelEngine
    draft: ModelEngine | None  # None: built to draft by n-grams of the text so far
    vocab_hash: str
    end_ids: tuple[int, ...]
    tokenizer: FileSpec
    tokenizer_config: FileSpec  # what AutoTokenizer of clients reads
    prompts: FileSpec  # chat template and special tokens
    builder_version: str
    format_version: int = FORMAT_VERSION
    compiler: str = ""  # name and version, where segments are compiled ahead of time
    compute_capabilities: tuple[str, ...] = ()  # what they were compiled for, e.g. "8.9"; empty: the compiler's choice

    @property
    def models(self) -> dict[str, ModelEngine]:
        """The target, and the draft where there is one, by name."""
        return {"target": self.target} | ({} if self.draft is None else {"draft": self.draft})

    @property
    def files(self) -> tuple[FileSpec, ...]:
        texts = (self.tokenizer, self.tokenizer_config, self.prompts)
        return (*texts, *(file for model in self.models.values() for file in model.files))

    @property
    def runtime_spec(self) -> RuntimeSpec:
        return RUNTIMES[self.runtime]

    def save(self, directory: Path) -> None:
        """Writes manifest.json; the rename makes it appear whole or not at all."""
        partial = directory / (MANIFEST_FILE + ".partial")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n")
        os.replace(partial, directory / MANIFEST_FILE)

    @classmethod
    def load(cls, directory: Path) -> EngineManifest:
        """Reads and verifies a directory. Raises ManifestError naming the file and the reason."""
        from pydantic import TypeAdapter, ValidationError  # not above: commands that only print their help do without

        path, fields = Path(directory) / MANIFEST_FILE, read_manifest_fields(directory)
        try:
            manifest = TypeAdapter(cls).validate_json(json.dumps(fields), strict=True)  # lists are tuples in JSON alone
            for model in manifest.models.values():
                check_spec(model.spec)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise ManifestError(f"{path}: malformed ({field} = {first['input']!r:.80}: {first['msg']})") from None
        except ValueError as error:
            raise ManifestError(f"{path}: malformed ({shown(str(error))})") from None
        manifest._check_fields(path)
        for file in manifest.files:
            _check_file(path.parent, file)
        tokenizer = path.parent / manifest.tokenizer.name
        tokenizer_hash = vocab_hash(read_vocabulary(tokenizer))
        if tokenizer_hash != manifest.vocab_hash:
            engines_hash = manifest.vocab_hash[:12]
            raise ManifestError(f"{tokenizer}: vocabulary {tokenizer_hash[:12]} is not the engines', {engines_hash}")
        return manifest

    def _check_fields(self, path: Path) -> None:
        _check_choice(path, "runtime", self.runtime, tuple(RUNTIMES))
        _check_choice(path, "dtype", self.dtype, DTYPES)
        kv_cache_dtypes = CPU_KV_CACHE_DTYPES if self.runtime_spec.is_cpu else (self.dtype,)
        _check_choice(path, "kv_cache_dtype", self.kv_cache_dtype, kv_cache_dtypes)
        if self.kv_block_size < 1:
            raise ManifestError(f"{path}: kv_block_size = {self.kv_block_size}: must be at least 1")
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
            for segment in model.segments:
                _check_buckets(path, segment)
        for end_id in self.end_ids:
            if not 0 <= end_id < sizes[0]:
                raise ManifestError(f"{path}: end_ids = {end_id}: must lie in [0, {sizes[0] - 1}]")


def read_manifest_fields(directory: Path) -> dict[str, Any]:
    """The fields of manifest.json, with nothing verified but the version. Raises ManifestError naming the file."""
    path = Path(directory) / MANIFEST_FILE
    try:
        fields = read_json(path, MAX_MANIFEST_BYTES)
    except FileError as error:
        raise ManifestError(_not_an_engine(Path(directory)) or str(error)) from None
    version = fields.get("format_version") if isinstance(fields, dict) else None
    if version != FORMAT_VERSION:
        raise ManifestError(
            f"{path}: format_version = {version!r:.80}: this version reads {FORMAT_VERSION}; build anew"
        )
    return fields


def _not_an_engine(directory: Path) -> str:
    """Says what a place without a manifest is, and which command makes engines of it; "" where it has a manifest."""
    place, build = shown(directory), "faser build --target"
    is_model = (directory / "config.json").is_file() and any(directory.glob("*.safetensors"))
    if is_model or directory.suffix == ".gguf" or any(directory.glob("*.gguf")):
        output = f"{directory.absolute().name.removesuffix('.gguf')}-engine"
        command = f"{build} {shlex.quote(str(directory))} --output {shlex.quote(output)}"
        return f"{place}: a checkpoint, not an engine directory; run `{command}` and name {shlex.quote(output)} here"
    if directory.is_file():
        return f"{place}: a file, not an engine directory; `{build} CHECKPOINT --output DIR` makes one"
    if os.path.lexists(directory / MANIFEST_FILE):
        return ""
    if directory.is_dir() and any(directory.iterdir()):
        return f"{place}/{MANIFEST_FILE}: missing; `{build} CHECKPOINT --output DIR` makes an engine directory"
    return f"{place}/{MANIFEST_FILE}: missing; build engines into this directory first"


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_choice(path: Path, field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ManifestError(f"{path}: {field} = {value!r:.80}: must be one of {', '.join(choices)}")


def _check_buckets(path: Path, segment: SegmentSpec) -> None:
    for bucket in segment.buckets:
        for dimension, (least, usual, most) in bucket.ranges.items():
            if not 0 <= least <= usual <= most:
                raise ManifestError(
                    f"{path}: bucket {bucket.name} of {segment.file.name}: {dimension} = {least}, {usual}, {most}: "
                    f"must rise from at least 0"
                )


def _check_file(directory: Path, file: FileSpec) -> None:
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
    digest = file_sha256(path)
    if digest != file.sha256:
        raise ManifestError(f"{path}: changed since it was built: sha256 {digest[:12]} instead of {file.sha256[:12]}")
