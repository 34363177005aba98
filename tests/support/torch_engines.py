"""Engines of runtime "torch" and their runners on torch's CPU device, where kernels run as their references."""

from pathlib import Path

import torch

from faser_backend.core.model import FLOAT32_WEIGHTS
from faser_backend.core.ports import GraphCounts
from faser_backend.cuda.call_shapes import CallBounds
from faser_backend.cuda.graphs import GraphCapturer
from faser_backend.cuda.pool import CudaKvPool
from faser_backend.cuda.runner import CudaAdaptableRunner
from faser_backend.cuda.torch_programs import TorchSegment
from faser_backend.cuda.torch_weights import load_weights
from faser_backend.engines.families import read_spec
from faser_backend.engines.pairs import open_checkpoint
from faser_backend.engines.weights import ModelWeights
from faser_backend.engines.weights_build import WeightsBuilder
from faser_backend.manifest import ModelEngine

torch.set_num_threads(1)

CPU = torch.device("cpu")
NUM_SMS = 132  # of the GPU for which tests size launches


def write_torch_engine(
    source: Path, directory: Path, *, name: str = "target", exit_layers: tuple[int, ...] = (), dtype: str = "fp32"
) -> ModelEngine:
    """Writes the checkpoint `source` as an engine of runtime torch."""
    checkpoint = open_checkpoint(source)
    spec = read_spec(checkpoint.fields)
    directory.mkdir(parents=True, exist_ok=True)
    cuts = (*exit_layers, spec.num_layers)
    builder = WeightsBuilder("torch", dtype, {name: FLOAT32_WEIGHTS}, print)
    return builder.write_model(name, spec, ModelWeights(checkpoint, spec), cuts, directory)


def open_torch_runner(
    model: ModelEngine,
    directory: Path,
    num_blocks: int,
    block_size: int,
    *,
    dtype: str = "fp32",
    device: torch.device = CPU,
    pool: CudaKvPool | None = None,
    limits: CallBounds | None = None,
    capturer: GraphCapturer | None = None,
) -> CudaAdaptableRunner:
    """Opens a runner. capturer: by default one on a GPU and none on a CPU."""
    weights = load_weights(directory / model.segments[0].file.name, model.spec, dtype, device)
    programs = [TorchSegment(model.spec, segment, weights, NUM_SMS) for segment in model.segments]
    pool = pool or CudaKvPool(model.spec, num_blocks, block_size, dtype=dtype, device=device)
    if capturer is None and device.type == "cuda":
        capturer = GraphCapturer(GraphCounts())
    return CudaAdaptableRunner(model, programs, pool, device, limits=limits, capturer=capturer)
