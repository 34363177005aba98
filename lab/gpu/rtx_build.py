"""Compiles a checkpoint for TensorRT-RTX on this machine, which needs no GPU: how long, how much memory, how large.

    python -m lab.gpu.rtx_build --target FILE.gguf

Takes minutes, so it is run by hand. What comes out is an engine directory that a GPU has yet to run.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

from engines.build import build_engines
from faser_backend.manifest import EngineManifest
from lab import environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="checkpoint or GGUF file")
    parser.add_argument("--draft", type=Path, help="with one, the target may be cut; default: n-grams draft")
    parser.add_argument("--exit-layers", default="", help="target layers to cut at, e.g. 10,20; needs a draft")
    args = parser.parse_args()
    exits = tuple(int(layer) for layer in args.exit_layers.split(",") if layer)
    with tempfile.TemporaryDirectory(prefix="faser-rtx-") as folder:
        output, start = Path(folder) / "engine", time.monotonic()
        build_engines(
            args.target,
            args.draft,
            output,
            runtime="tensorrt_rtx",
            dtype="fp16",
            exit_layers=exits,
            progress=lambda what, done, total: print(f"[{done}/{total}] {what}", file=sys.stderr),
        )
        seconds = time.monotonic() - start
        num_bytes = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
        segments = len(EngineManifest.load(output).target.segments)
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    versions = environment.installed_versions(("tensorrt-rtx-cu13-libs",))
    print(
        f"{args.target.name} for TensorRT-RTX {versions['tensorrt-rtx-cu13-libs']}, fp16, {segments} segments: "
        f"{seconds:.0f} s, {peak / 2**20:.1f} GiB of memory at its peak, {num_bytes / 2**20:.0f} MiB of engines"
    )


if __name__ == "__main__":
    main()
