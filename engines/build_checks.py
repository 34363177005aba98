"""What `build_engines` asks of its arguments before anything is read or written. Each raises CheckpointError."""

from __future__ import annotations

from pathlib import Path

from engines.arrays import CheckpointError
from faser_backend.core.model import ModelSpec
from faser_backend.manifest import DTYPES, MANIFEST_FILE
from faser_backend.runtime_spec import RUNTIMES


def check_choices(runtime: str, dtype: str, kv_block_size: int) -> None:
    for field, value, choices in (("runtime", runtime, RUNTIMES), ("dtype", dtype, DTYPES)):
        if value not in choices:
            raise CheckpointError(f"{field} = {value!r}: must be one of {', '.join(choices)}")
    if dtype not in (built := RUNTIMES[runtime].dtypes):
        raise CheckpointError(f"dtype = {dtype!r}: runtime {runtime!r} is built for {built[0]!r} alone")
    if not 1 <= kv_block_size <= 1024:
        raise CheckpointError(f"kv_block_size = {kv_block_size}: must lie in [1, 1024]")


def check_output(output: Path) -> None:
    """Refuses to replace anything but an engine directory or an empty one."""
    if not output.exists():
        return
    if not output.is_dir() or (any(output.iterdir()) and not (output / MANIFEST_FILE).is_file()):
        raise CheckpointError(f"output_dir = {output}: exists and is not an engine directory; name another")


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
