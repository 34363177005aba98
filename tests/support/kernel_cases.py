"""The check that every implementation of an attention call must pass, and small tiles."""

from collections.abc import Callable

import numpy as np
import torch

from faser_backend.lab.gpu.kernel_cases import SENTINEL, Call
from faser_backend.plugins import reference
from faser_backend.plugins.attention_config import LaunchConfig

# (absolute, relative): float32 sums in another order; others round weights and results.
TOLERANCES = {torch.float32: (1e-5, 0.0), torch.float16: (2e-3, 2e-3), torch.bfloat16: (1.6e-2, 1.6e-2)}


def small_tiles(rng: np.random.Generator, group: int) -> LaunchConfig:
    """Returns tiles so small that short contexts take many iterations and chunks many programs."""
    pairs = 4 << (group - 1).bit_length()  # at least four rows
    return LaunchConfig(max(16, pairs), int(rng.choice([16, 32])), 4, 2)


def check(call: Call, run: Callable[[Call], None], *, is_causal: bool = True) -> None:
    """Asserts that `run` gives the reference's results and pool contents, and changes nothing else."""
    before = [tensor.clone() for tensor in call]
    expected, actual = call.with_own_results(), call.with_own_results()
    reference.pruned_chunk_attention(*expected, is_causal=is_causal)
    assert not expected.out.isnan().any()
    run(actual)
    absolute, relative = TOLERANCES[call.q.dtype]
    torch.testing.assert_close(actual.out, expected.out, atol=absolute, rtol=relative)
    assert (actual.out[int(call.cu_rows[-1]) :] == SENTINEL).all(), "padding rows were written"
    bits = torch.int32 if call.q.dtype == torch.float32 else torch.int16
    for name in ("k_pool", "v_pool"):
        assert torch.equal(getattr(actual, name).view(bits), getattr(expected, name).view(bits)), name
    for name, old, new in zip(Call._fields, before, call, strict=True):
        torch.testing.assert_close(new, old, atol=0, rtol=0, equal_nan=True, msg=f"{name} was changed")
