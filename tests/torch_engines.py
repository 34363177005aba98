"""Engines of runtime "torch" and their runners on torch's CPU device, where kernels run as their references."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from engines.checkpoint import open_checkpoint
from engines.families import read_spec
from engines.torch_build import write_torch_model
from engines.weights import ModelWeights
from faser_backend.core.batch import SamplingRows
from faser_backend.core.ports import DraftTokens
from faser_backend.device.cpu_runtime import OrtRuntime
from faser_backend.device.cuda.pool import CudaKvPool
from faser_backend.device.cuda.runner import CudaRunner
from faser_backend.device.cuda.segment import CallBounds
from faser_backend.device.cuda.torch_segment import TorchSegment
from faser_backend.device.cuda.torch_weights import load_weights
from faser_backend.device.partition import CorePartition
from faser_backend.device.runtime import ModelPair
from faser_backend.device.sampler import NumpySampler
from faser_backend.manifest import ModelEngine

torch.set_num_threads(1)

CPU = torch.device("cpu")
NUM_SMS = 132  # of the GPU that the tests pretend to size launches for


def write_torch_engine(
    source: Path, directory: Path, *, name: str = "target", exit_layers: tuple[int, ...] = (), dtype: str = "fp32"
) -> ModelEngine:
    """The checkpoint `source` as an engine of runtime torch in `directory`."""
    checkpoint = open_checkpoint(source)
    spec = read_spec(checkpoint)
    directory.mkdir(parents=True, exist_ok=True)
    cuts = (*exit_layers, spec.num_layers)
    return write_torch_model(name, spec, ModelWeights(checkpoint, spec), cuts, directory, dtype)


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
) -> CudaRunner:
    weights = load_weights(directory / model.segments[0].file.name, model.spec, dtype, device)
    programs = [TorchSegment(model.spec, segment, weights, NUM_SMS) for segment in model.segments]
    pool = pool or CudaKvPool(model.spec, num_blocks, block_size, dtype=dtype, device=device)
    return CudaRunner(model, programs, pool, device, limits=limits)


class HostSampler(NumpySampler):
    """The CPU's sampler on tensors: what a device array is read by where no sampler of the device's is wanted."""

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> np.ndarray:
        return super().sample(logits.numpy(), rows)

    def sample_draft(self, logits: torch.Tensor, rows: SamplingRows, num_candidates: int) -> DraftTokens:
        return super().sample_draft(logits.numpy(), rows, num_candidates)

    def candidate_margins(
        self, scores: torch.Tensor, candidates: np.ndarray, rows: SamplingRows, *, with_noise: bool
    ) -> np.ndarray:
        return super().candidate_margins(scores.numpy(), candidates, rows, with_noise=with_noise)

    def probabilities(self, logits: torch.Tensor, rows: SamplingRows) -> np.ndarray:
        return super().probabilities(logits.numpy(), rows)

    def log_probs(self, logits: torch.Tensor, token_ids: np.ndarray) -> np.ndarray:
        return super().log_probs(logits.numpy(), token_ids)


class TorchCpuRuntime(OrtRuntime):
    """Runtime torch on the CPU: the runners, pools and kernels' references behind a CPU's menu of partitions."""

    def __init__(self, engine_dir: Path, models: ModelPair, kv_block_size: int) -> None:
        super().__init__(engine_dir, models, kv_block_size)

    def open_pool(self, model: ModelEngine, num_blocks: int) -> CudaKvPool:
        return CudaKvPool(model.spec, num_blocks, self.kv_block_size, dtype="fp32", device=CPU)

    def open_runner(self, model: ModelEngine, share: CorePartition, pool: CudaKvPool) -> CudaRunner:
        return open_torch_runner(model, self._engine_dir, pool.num_blocks, self.kv_block_size, pool=pool)

    def open_sampler(self, vocab_size: int, max_num_seqs: int) -> HostSampler:
        return HostSampler(vocab_size, max_num_seqs)
