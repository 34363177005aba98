"""What `build_engines` asks of its arguments before anything is read or written. Each raises CheckpointError."""

from __future__ import annotations

import math
from pathlib import Path

from engines.arrays import CheckpointError
from engines.weight_formats import ENDS
from engines.weights import ModelWeights
from faser_backend import files
from faser_backend.core.model import ModelSpec, WeightFormat
from faser_backend.manifest import DTYPES, MANIFEST_FILE
from faser_backend.runtime_spec import RUNTIMES

# Of a number, the scales of a quantised one included.
BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5}


def check_choices(runtime: str, dtype: str, kv_block_size: int) -> None:
    for field, value, choices in (("runtime", runtime, RUNTIMES), ("dtype", dtype, DTYPES)):
        if value not in choices:
            raise CheckpointError(f"{field} = {value!r}: must be one of {', '.join(choices)}")
    if dtype not in (built := RUNTIMES[runtime].dtypes):
        raise CheckpointError(f"dtype = {dtype!r}: runtime {runtime!r} is built for {built[0]!r} alone")
    if not 1 <= kv_block_size <= 1024:
        raise CheckpointError(f"kv_block_size = {kv_block_size}: must lie in [1, 1024]")


def check_output(output: Path) -> None:
    """Refuses to replace anything but an engine directory or an empty one, and to write where nobody may."""
    check_room(output, 0)
    if not output.exists():
        return
    if not output.is_dir() or (any(output.iterdir()) and not (output / MANIFEST_FILE).is_file()):
        raise CheckpointError(
            f"output_dir = {output}: holds something else than engines, which stays; name a new or empty directory"
        )


def num_bytes_of(weights: ModelWeights, weight_format: WeightFormat, dtype: str) -> int:
    """About how many bytes the arrays of a model take in its files."""
    formats = dict(zip(ENDS, weight_format.formats[1:], strict=True))
    names = (formats.get(name, weight_format.name if dtype == "fp32" else dtype) for name in weights)
    return round(sum(BYTES[form] * math.prod(weights.shape(name)) for form, name in zip(names, weights, strict=True)))


def check_room(output: Path, num_bytes: int) -> None:
    """Raises CheckpointError where the engine directory cannot be written or the disk has too little room."""
    try:
        files.check_room(output.parent, num_bytes, "the engine directory")
    except files.FileError as error:
        raise CheckpointError(f"output_dir = {error}") from None


def check_experts(runtime: str, specs: dict[str, ModelSpec]) -> None:
    for name, spec in specs.items():
        if spec.num_experts and not RUNTIMES[runtime].has_experts:
            raise CheckpointError(f"runtime = {runtime!r}: has no kernels for experts ({name}: {spec.family})")


def check_exit_layers(exit_layers: tuple[int, ...], spec: ModelSpec, *, has_draft: bool) -> None:
    if exit_layers and not has_draft:
        raise CheckpointError(f"exit_layers = {list(exit_layers)}: an exit scores the candidates of a draft model")
    for layer in exit_layers:
        if not 1 <= layer < spec.num_layers:
            raise CheckpointError(f"exit_layers = {layer}: must lie in [1, {spec.num_layers - 1}]")
    if list(exit_layers) != sorted(set(exit_layers)):
        raise CheckpointError(f"exit_layers = {list(exit_layers)}: must rise")
