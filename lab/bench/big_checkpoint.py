"""Peak memory of building a checkpoint that is larger than it may need: the proof that weights are streamed.

    python -m lab.bench.big_checkpoint [--num-layers N] [--dtype BF16] [--ranks N] [--runtime R] [--engine-dtype D]

Writes a random checkpoint (at least 2 GB) in shards to a temporary folder, builds it in a fresh process and
prints the process's peak resident memory: mapped pages of the checkpoint count, the system's cache does not.
Exits with 1 where the peak is above 1.5x the largest layer in the checkpoint's format plus BASE_MIB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from engines.safetensors_file import DTYPES, write_safetensors
from engines.weights import weight_sources
from faser_backend.core.model import ModelSpec
from lab.places import ROOT

MIB = 1 << 20
BASE_MIB = 160  # Python, numpy, onnx, rotary tables, two blocks that are being converted
VOCAB_SIZE = 4096

CHILD = """
import sys
from pathlib import Path
from engines.build import build_engines
def peak():
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) >> 10
before = peak()
target, draft, output, runtime, dtype = sys.argv[1:]
build_engines(target, draft, output, runtime=runtime, dtype=dtype)
print(before, peak())
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--dtype", choices=DTYPES, default="F32", help="of the checkpoint")
    parser.add_argument("--ranks", type=int, default=0, help="of a TensorRT-LLM checkpoint; 0: Hugging Face's layout")
    parser.add_argument("--runtime", choices=["onnxruntime", "llvm", "torch"], default="onnxruntime")
    parser.add_argument("--engine-dtype", default="fp32")
    args = parser.parse_args()
    spec = spec_of(args.num_layers, args.hidden_size)
    with tempfile.TemporaryDirectory() as folder:
        target, draft = Path(folder, "target"), Path(folder, "draft")
        started_s = time.perf_counter()
        num_bytes = write_checkpoint(target, spec, args.dtype)
        if args.ranks:
            num_bytes = write_ranks(target, spec, args.dtype, args.ranks)
        write_checkpoint(draft, spec_of(1, 64), args.dtype)
        print(f"checkpoint {num_bytes / MIB:.0f} MiB, written in {time.perf_counter() - started_s:.0f} s")
        started_s = time.perf_counter()
        options = [str(target), str(draft), str(Path(folder, "engine")), args.runtime, args.engine_dtype]
        done = subprocess.run(
            [sys.executable, "-c", CHILD, *options], cwd=ROOT, capture_output=True, text=True, check=True
        )
        seconds = time.perf_counter() - started_s
    base_mib, peak_mib = map(int, done.stdout.split())
    layer_mib = layer_bytes(spec, args.dtype) / MIB
    limit_mib = 1.5 * layer_mib + BASE_MIB
    print(f"largest layer {layer_mib:.0f} MiB; built in {seconds:.0f} s")
    print(f"peak {peak_mib} MiB, {base_mib} MiB of it before the build; limit {limit_mib:.0f} MiB")
    return int(peak_mib > limit_mib)


def spec_of(num_layers: int, hidden_size: int) -> ModelSpec:
    head_dim = min(hidden_size // 2, 128)
    num_heads = hidden_size // head_dim
    return ModelSpec(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        intermediate_size=4 * hidden_size,
        vocab_size=VOCAB_SIZE,
        max_context=4096,
        rope_theta=10000.0,
        rms_eps=1e-6,
        tie_word_embeddings=False,
    )


def layer_bytes(spec: ModelSpec, dtype: str) -> int:
    """Of the largest of: a decoder layer, the embedding."""
    sources = weight_sources(spec)
    sizes = {name: int(np.prod(source.shape)) * DTYPES[dtype].itemsize for name, source in sources.items()}
    layer = sum(size for name, size in sizes.items() if name.startswith("layers.0."))
    return max(layer, sizes["embedding"])


def write_checkpoint(directory: Path, spec: ModelSpec, dtype: str) -> int:
    """A Hugging Face directory with one shard per layer and one for the rest; returns the bytes of its weights."""
    directory.mkdir()
    shards: dict[str, dict[str, tuple[np.dtype, tuple[int, ...]]]] = {}
    for name, source in weight_sources(spec).items():
        shard = f"model-{name.split('.')[1] if name.startswith('layers.') else 'rest'}.safetensors"
        shards.setdefault(shard, {}).update({part: (DTYPES[dtype], shape) for part, shape in source.parts})
    for shard, formats in shards.items():
        write_safetensors(directory / shard, formats, random_arrays(formats))
    weight_map = {name: shard for shard, formats in shards.items() for name in formats}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = {
        "model_type": "llama",
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_heads,
        "intermediate_size": spec.intermediate_size,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_context,
    }
    (directory / "config.json").write_text(json.dumps(config))
    vocabulary = {f"token{i}": i for i in range(spec.vocab_size)}
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    return sum((directory / shard).stat().st_size for shard in shards)


def write_ranks(directory: Path, spec: ModelSpec, dtype: str, num_ranks: int) -> int:
    """Puts TensorRT-LLM's layout in place of the other; returns the bytes of its weights."""
    hidden, inner, part = spec.hidden_size, spec.intermediate_size, spec.hidden_size // num_ranks
    layer = {
        "input_layernorm.weight": (hidden,),
        "attention.qkv.weight": (3 * part, hidden),
        "attention.dense.weight": (hidden, part),
        "post_layernorm.weight": (hidden,),
        "mlp.fc.weight": (inner // num_ranks, hidden),
        "mlp.gate.weight": (inner // num_ranks, hidden),
        "mlp.proj.weight": (hidden, inner // num_ranks),
    }
    shapes = {f"transformer.layers.{i}.{name}": shape for i in range(spec.num_layers) for name, shape in layer.items()}
    shapes |= {"transformer.vocab_embedding.weight": (VOCAB_SIZE, hidden), "transformer.ln_f.weight": (hidden,)}
    shapes["lm_head.weight"] = (VOCAB_SIZE // num_ranks, hidden)
    formats = {name: (DTYPES[dtype], shape) for name, shape in shapes.items()}
    for path in directory.glob("model*"):
        path.unlink()
    for rank in range(num_ranks):
        write_safetensors(directory / f"rank{rank}.safetensors", formats, random_arrays(formats))
    config = json.loads((directory / "config.json").read_text())
    del config["model_type"]
    config |= {"architecture": "LlamaForCausalLM", "mapping": {"world_size": num_ranks, "tp_size": num_ranks}}
    (directory / "config.json").write_text(json.dumps(config))
    return sum(path.stat().st_size for path in directory.glob("rank*"))


def random_arrays(formats: dict[str, tuple[np.dtype, tuple[int, ...]]]) -> Iterator[tuple[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    for name, (_, shape) in formats.items():
        yield name, rng.random(shape, np.float32) - np.float32(0.5)


if __name__ == "__main__":
    sys.exit(main())
