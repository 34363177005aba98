"""TensorRT's launches of the kernels in the Triton-language interpreter, against the op's reference.

test_kernels.py starts this file, as interpreted_kernels.py.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from faser_backend.lab.gpu.kernel_cases import NAN, Call, Shape, make_call, random_shape
from faser_backend.plugins.attention_config import LaunchConfig
from faser_backend.plugins.tensorrt_aot import (
    attend_constants,
    attend_splits_kernel,
    combine_constants,
    combine_parts_kernel,
)
from faser_backend.plugins.tensorrt_contract import Geometry, attend_launch, combine_launch, part_rows
from tests.support.fake_tensorrt_plugin import WHOLE_NUMBERS
from tests.support.kernel_cases import check

torch.set_num_threads(1)
SMALL = LaunchConfig(16, 16, 4, 2)


def geometry_of(shape: Shape) -> Geometry:
    return Geometry(
        num_heads=shape.num_kv_heads * shape.group,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        kv_block_size=shape.kv_block_size,
        tile_rows=8,
        num_sms=132,
        capability=90,
    )


def run(
    call: Call, geometry: Geometry, config: LaunchConfig, num_splits: int | None = None, num_combined: int | None = None
) -> None:
    """Runs both kernels on the contract's grids and arguments. num_splits replaces the contract's; num_combined
    replaces num_splits for joining."""
    num_rows, num_heads, head_dim = call.q.shape
    table_shape = tuple(call.block_table.shape)
    parts = part_rows(num_rows)
    mixed = torch.full((parts, num_heads, head_dim), NAN)
    stat = torch.full((parts, num_heads, 2), NAN)
    grid, scalars = attend_launch(
        geometry, config, WHOLE_NUMBERS, num_rows, table_shape, num_blocks=call.k_pool.shape[1]
    )
    constants = attend_constants(geometry, config)
    if num_splits is not None:
        scalars, constants["PART_TOKENS"] = (*scalars[:-1], num_splits), config.block_n
    pools = (call.k_pool, call.v_pool)
    attend_splits_kernel[grid](*call[:9], *scalars, mixed, stat, *pools, **constants)
    grid, (num_sequences, splits) = combine_launch(geometry, config, WHOLE_NUMBERS, num_rows, table_shape)
    splits = num_combined or num_splits or splits
    inputs = (mixed, stat, call.q, call.block_table, call.cu_rows)
    combine_parts_kernel[grid](*inputs, num_sequences, splits, call.out, **combine_constants(geometry))


@pytest.mark.parametrize("seed", range(6))
def test_random_ragged_calls(seed: int) -> None:
    rng = np.random.default_rng(500 + seed)
    dtype = torch.float16 if seed % 3 == 2 else torch.float32
    shape = replace(random_shape(rng, dtype), is_fused=False)  # TensorRT's tensors are contiguous
    geometry = geometry_of(shape)
    config = SMALL if seed % 2 and shape.group <= 4 else geometry.launch_config("fp16")
    check(make_call(shape, seed), lambda call: run(call, geometry, config, int(rng.choice([1, 2, 5]))))


def test_a_call_of_the_menu_is_padded_by_contents() -> None:
    """Sequences without rows, rows of no sequence, a table for the longest context; the contract's number of parts."""
    shape = Shape((2, 1, 0, 0), contexts=(600, 9, 0, 0), num_kv_heads=1, head_dim=16, num_padding_rows=5)
    call = make_call(shape, 0)
    call = call._replace(block_table=torch.nn.functional.pad(call.block_table, (0, 200)))
    table_shape, geometry = call.block_table.shape, geometry_of(shape)
    assert attend_launch(geometry, SMALL, WHOLE_NUMBERS, 8, table_shape, num_blocks=9).scalars[-1] >= 3
    check(call, lambda call: run(call, geometry, SMALL))


def test_more_sequences_than_are_read_together() -> None:
    shape = Shape(rows=(1, 0) * 33, contexts=(3, 17) * 33, num_kv_heads=1, group=1, head_dim=16)
    check(make_call(shape, 0), lambda call: run(call, replace(geometry_of(shape), num_sms=4), SMALL, 2))


def test_a_wrong_number_of_parts_fails_the_check() -> None:
    """Negative control: the second kernel must know the number of parts from the first."""
    shape = Shape(rows=(2,), contexts=(40,), num_kv_heads=1, head_dim=16)
    geometry = geometry_of(shape)
    with pytest.raises(AssertionError):
        check(make_call(shape, 0), lambda call: run(call, geometry, SMALL, 3, 2))


@pytest.mark.parametrize("seed", range(4))
def test_meaningless_contents_touch_nothing_else(seed: int) -> None:
    """TensorRT times layers on arbitrary contents: guards around the pools must stay intact."""
    rng = np.random.default_rng(seed)
    shape = Shape(rows=(3, 1), contexts=(9, 20), head_dim=16)
    call, geometry = make_call(shape, seed), geometry_of(shape)
    spread = [3, 50, 5000, 2**31 - 1][seed % 4]

    def garbage(tensor: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(rng.integers(-spread, spread, tensor.shape).astype(np.int32))

    guarded = [torch.full((3, *pool.shape), 77.0) for pool in (call.k_pool, call.v_pool)]
    indices = {name: garbage(getattr(call, name)) for name in call._fields[5:9]}
    if seed % 2:  # valid lengths, so that tables and the slot mapping are read
        indices |= {"cu_rows": call.cu_rows, "context_lens": call.context_lens}
    run(call._replace(k_pool=guarded[0][1], v_pool=guarded[1][1], **indices), geometry, SMALL, 2)
    assert all((pool[[0, 2]] == 77.0).all() for pool in guarded)
