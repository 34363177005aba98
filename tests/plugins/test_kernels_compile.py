"""Every kernel compiles to a cubin for three architectures within their limits, without a GPU."""

import re

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from faser_backend.core.config import MAX_LORA_RANK
from faser_backend.lab.gpu.kernel_cases import Shape, make_call
from faser_backend.plugins import add_adapters as adapters
from faser_backend.plugins import product, split_combine
from faser_backend.plugins import pruned_chunk_attention as attention
from faser_backend.plugins.add_rms_norm import add_rms_norm_kernel, num_warps
from faser_backend.plugins.attention_config import launch_config, padded_head_dim, shared_bytes, shared_limit
from faser_backend.plugins.exit_scores import BLOCK_C, exit_scores_kernel
from faser_backend.plugins.exit_scores import BLOCK_D as SCORE_BLOCK_D
from faser_backend.plugins.gated_silu import gated_silu_kernel
from faser_backend.plugins.perturb_logits import BLOCK_V, perturb_logits_kernel
from faser_backend.plugins.pruned_chunk_attention import pruned_chunk_attention_kernel
from faser_backend.plugins.rotate_heads import HEADS, rotate_heads_kernel
from faser_backend.plugins.split_combine import combine_splits_kernel
from faser_backend.plugins.tensorrt_aot import Compiled, compile_kernel, without_scratch_parameters
from tests.support.assembler import assemble, passes_its_parameters

CAPABILITIES = (80, 90, 120)
DRAFTED_BLOCK = 16  # rows that see each other
ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
RANKS = {"MAX_RANK": MAX_LORA_RANK, "BLOCK_RANK": adapters.BLOCK_RANK}


def compile_attention(
    dtype: str, head_dim: int, group: int, max_rows: int, capability: int, *, is_split: bool = False
) -> Compiled:
    config = launch_config(ELEMENT_BYTES[dtype], head_dim, group, max_rows, capability)
    signature = dict.fromkeys(("q", "k_new", "v_new", "k_pool", "v_pool"), f"*{dtype}:16")
    signature |= dict.fromkeys(("block_table", "cu_rows", "context_lens", "slot_mapping", "table_width"), "*i32")
    signature |= dict.fromkeys(("q_stride", "k_stride", "v_stride"), "i32:16")
    signature |= dict.fromkeys(("num_blocks", "table_stride", "num_sequences", "num_rows", "num_splits"), "i32")
    constants = config.constants(num_kv_heads=8, group=group, head_dim=head_dim, kv_block_size=16)
    constants |= {"PART_TOKENS": 256, "ALIGNMENT": 16, "IS_CAUSAL": max_rows != DRAFTED_BLOCK}
    constants["BLOCK_B"] = 32 if max_rows < 48 else 512
    results = {"mixed_parts": "*fp32:16", "stat_parts": "*fp32:16"} if is_split else {"out": f"*{dtype}:16"}
    constants |= dict.fromkeys({"out", "mixed_parts", "stat_parts"} - set(results))
    return compile_kernel(
        pruned_chunk_attention_kernel,
        signature | results,
        constants,
        capability,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


SMALL_KERNELS = {  # kernel, constants
    kernel.__name__: (kernel, constants)
    for kernel, constants in (
        (combine_splits_kernel, {"HEAD_DIM": 128, "BLOCK_S": 4, "BLOCK_D": 128}),
        (exit_scores_kernel, {"BLOCK_C": BLOCK_C, "BLOCK_D": SCORE_BLOCK_D}),
        (add_rms_norm_kernel, {"BLOCK_D": 4096}),
        (rotate_heads_kernel, {"HALF": 64, "BLOCK_H": 64, "HEADS": HEADS}),
        (gated_silu_kernel, {"BLOCK": 1024}),
        (adapters.lower_rows_kernel, {**RANKS, "BLOCK_IN": adapters.BLOCK_IN}),
        (adapters.raise_rows_kernel, {**RANKS, "BLOCK_OUT": adapters.BLOCK_OUT}),
        (perturb_logits_kernel, {"LOG2_SIZE": 20, "BLOCK_V": BLOCK_V}),
    )
}
TYPES = {
    name: kind
    for kind, names in {
        "*bf16:16": ("hidden", "delta", "summed", "out", "qkv", "gate_up", "rows", "head"),
        "*fp32:16": ("mixed_parts", "stat_parts", "cos", "sin", "q_norm", "k_norm", "weight", "lowered", "logits"),
        "*i64:16": ("candidates", "positions", "adapters", "keys"),
        "i32:16": ("hidden_size", "size", "row_stride", "out_stride", "first_width", "other_width", "vocab_size"),
        "i32": ("num_sequences", "num_splits", "num_candidates", "num_heads", "num_rotated", "first_entry"),
        **{"*i32:16": ("table",), "*i32": ("cu_rows",), "fp32": ("eps",), "*fp32": ("scale", "is_random")},
    }.items()
    for name in names
}
FLOATS = {"exit_scores_kernel": ("hidden", "out"), "perturb_logits_kernel": ("out",)}


def small_kernel(name):
    """Returns a kernel, its signature and its constants."""
    kernel, constants = SMALL_KERNELS[name]
    types = TYPES | dict.fromkeys(FLOATS.get(name, ()), "*fp32:16")
    return kernel, {each: types[each] for each in kernel.arg_names if each not in constants}, constants


NUM_WARPS = {"combine_splits_kernel": 1, "add_rms_norm_kernel": num_warps(4096), "rotate_heads_kernel": 1}
# The first norm of a model adds nothing, and most models have no norms of heads.
OPTIONAL = {"add_rms_norm_kernel": ("delta", "summed"), "rotate_heads_kernel": ("q_norm", "k_norm")}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    "variant",
    [
        ("bf16", 128, 4, 1, False),  # decoding
        ("bf16", 128, 4, 1, True),
        ("bf16", 128, 4, 5, False),  # verification
        ("fp16", 128, 8, 5, True),
        ("fp16", 64, 7, 17, False),
        ("bf16", 128, 4, DRAFTED_BLOCK, False),
        ("bf16", 80, 1, 5, False),
        ("bf16", 256, 2, 5, False),
        ("bf16", 128, 4, 512, False),  # a prompt's chunk
        ("fp32", 32, 2, 5, False),
        ("fp32", 128, 4, 1, False),
    ],
)
def test_attention_compiles_within_its_device(capability, variant):
    dtype, head_dim, group, max_rows, is_split = variant
    compiled = compile_attention(dtype, head_dim, group, max_rows, capability, is_split=is_split)
    assert compiled.name == "pruned_chunk_attention_kernel"
    config = launch_config(ELEMENT_BYTES[dtype], head_dim, group, max_rows, capability)
    row_bytes = padded_head_dim(head_dim) * ELEMENT_BYTES[dtype]
    bound = shared_bytes(config.block_m, config.block_n, config.num_stages, row_bytes)
    assert compiled.shared_bytes <= min(bound, shared_limit(capability))
    spilled = assemble(compiled)[1]
    # With four warps 64 pairs spill a little, and take 0.64 of the time that eight warps need (on an H100).
    assert spilled <= (288 if config.block_m == 64 and config.num_warps == 4 else 96)
    assert "cp.async.cg.shared.global" in compiled.ptx  # 16 bytes at once
    assert dtype == "fp32" or "cp.async.ca" not in compiled.ptx  # never fewer
    tiles_ahead = [int(n, 0) for n in re.findall(r"cp\.async\.wait_group\s+(\w+)", compiled.ptx)]
    assert max(tiles_ahead) >= 2 * (config.num_stages - 2), "keys and values are not loaded ahead"
    products = "fma" if dtype == "fp32" else "mma"
    assert products in compiled.ptx


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", SMALL_KERNELS)
def test_small_kernels_compile(capability, name):
    kernel, signature, constants = small_kernel(name)
    compiled = compile_kernel(kernel, signature, constants, capability, num_warps=NUM_WARPS.get(name, 4))
    assert compiled.name == name and assemble(compiled)[1] == 0 and compiled.shared_bytes <= 48 * 1024
    assert f".version {'8.7' if capability == 120 else '8.4'}\n" in compiled.ptx, "old drivers take it"
    wide = r"ld\.global\.v" if name in {"rotate_heads_kernel", "gated_silu_kernel"} else "v4"
    assert re.search(wide, compiled.ptx), "wide loads"
    # Near 1, where noise is largest, a GPU's fast logarithm has almost no correct digit.
    assert "lg2.approx" not in compiled.ptx


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("dtype", "num_outputs", "size"),
    [("bf16", 6144, 1024), ("fp16", 1024, 3072), ("bf16", 960, 576), ("fp32", 64, 1024)],
)
def test_products_compile_within_their_device(capability, dtype, num_outputs, size):
    num_parts, _ = product.parts_of(num_outputs, size)
    for num_rows in (1, 64, 200, 2000):
        tile, is_split = product.tile_of(num_rows, num_outputs, num_parts, ELEMENT_BYTES[dtype], capability)
        signature = dict.fromkeys(("rows", "weight", "bias", "out"), f"*{dtype}:16") | {"num_rows": "i32"}
        signature |= dict.fromkeys(("row_stride", "num_outputs", "size", "part_length"), "i32:16")
        signature |= {"num_parts": "i32"} if num_parts > 1 else {}
        signature |= {"part_sums": "*fp32:16", "arrived": "*i32:16"} if is_split else {}
        constants = tile.constants(size, in_turn=num_parts > 1 and not is_split)
        constants |= dict.fromkeys({"part_sums", "arrived"} - set(signature))
        constants |= {"num_parts": 1} if num_parts == 1 else {}
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        compiled = compile_kernel(product.product_kernel, signature, constants, capability, **options)
        assert compiled.shared_bytes <= shared_limit(capability) and assemble(compiled)[1] <= 16
        assert "cp.async.cg.shared.global" in compiled.ptx and "cp.async.ca" not in compiled.ptx  # 16 bytes at once
        assert ("fma" if dtype == "fp32" else "wgmma" if capability == 90 else "mma.sync") in compiled.ptx
        tiles_ahead = [int(n, 0) for n in re.findall(r"cp\.async\.wait_group\s+(\w+)", compiled.ptx)]
        assert max(tiles_ahead) >= 2 * (tile.num_stages - 2), "rows and weights are not loaded ahead"


@pytest.mark.parametrize("tile", [product.SMALL_TILE, product.USUAL_TILE, product.WIDE_TILE])
def test_products_of_many_rows_are_read_by_descriptors(tile):
    kernel, sizes = product.described_product_kernel, dict.fromkeys(("num_outputs", "size", "part_length"), "i32")
    blocks = {"rows": (tile.block_t, tile.block_k), "weight": (tile.block_n, tile.block_k)}
    blocks["out"] = (tile.block_t, tile.block_n)
    described = {name: f"tensordesc<bf16[{rows}, {columns}]>" for name, (rows, columns) in blocks.items()}
    given = {"bias": "*bf16", **sizes, **described}
    source = ASTSource(kernel, {name: given.get(name, "constexpr") for name in kernel.arg_names}, tile.blocks)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "ptx_version": 84}
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert built.metadata.shared <= shared_limit(90) and "wgmma" in built.asm["ptx"]
    assert built.asm["ptx"].count("cp.async.bulk.tensor.2d.shared") >= 2 * (tile.num_stages - 1)
    compiled = Compiled(built.metadata.name, (), built.asm["ptx"], built.metadata.shared, tile.num_warps, 90)
    assert assemble(compiled)[1] <= (208 if tile is product.WIDE_TILE else 0), "spilled between parts"


@pytest.mark.parametrize("name", OPTIONAL)
def test_kernels_compile_without_what_is_optional(name):
    kernel, signature, constants = small_kernel(name)
    kept = {parameter: kind for parameter, kind in signature.items() if parameter not in OPTIONAL[name]}
    assert assemble(compile_kernel(kernel, kept, constants | dict.fromkeys(OPTIONAL[name]), 90))[0] > 0


def test_parameters_are_those_that_a_launch_passes():
    compiled = compile_attention("bf16", 64, 4, 1, 90)
    assert [name for name, _ in compiled.parameters] == [
        *("q", "k_new", "v_new", "k_pool", "v_pool", "block_table", "cu_rows", "context_lens", "slot_mapping"),
        *("table_width", "q_stride", "k_stride", "v_stride", "num_blocks", "table_stride", "num_sequences"),
        *("num_rows", "num_splits", "out"),
    ]
    assert passes_its_parameters(compiled)


class DriverOfNoDevice:
    """A fake GPU driver, which the compiler queries before a launch."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 99  # binaries are cached by device: an unused number

    def get_current_stream(self, _device: int) -> int:
        return 0


@pytest.fixture
def launches(monkeypatch) -> list[tuple[str, tuple[int, ...], str]]:
    """Records (kernel, grid, hash of its binary) of launches: arguments are bound and compiled, nothing runs."""
    launched = []

    def on_grid(kernel, *grid):
        def bind(*arguments, **constants):
            compiled = kernel.warmup(*arguments, grid=grid, **constants)
            launched.append((kernel.__name__, grid, compiled.hash))

        return bind

    for module in (attention, split_combine):
        monkeypatch.setattr(module, "on_grid", on_grid)
    monkeypatch.setattr(attention, "runs_kernel", lambda *_: True)
    monkeypatch.setattr(driver, "_active", DriverOfNoDevice())
    return launched


@pytest.mark.parametrize("num_splits", [1, 3])
def test_one_binary_serves_calls_of_other_lengths(launches, num_splits):
    small = make_call(Shape(rows=(3, 1), contexts=(8, 8), dtype=torch.bfloat16), 0)
    large = make_call(Shape(rows=(2, 3, 1, 1, 0), contexts=(80, 8, 1, 0, 7), dtype=torch.bfloat16), 1)
    shifted = torch.cat([large.slot_mapping[:1], large.slot_mapping])[1:]  # not at a multiple of 16 bytes
    for call, parts in ((small, num_splits), (large._replace(slot_mapping=shifted), 2 * num_splits - 1)):
        attention.pruned_chunk_attention(*call, max_rows=3, num_splits=parts)
    attends = [launch for launch in launches if launch[0] == "pruned_chunk_attention_kernel"]
    joins = [launch for launch in launches if launch[0] == "combine_splits_kernel"]
    assert [grid for _, grid, _ in attends] == [(2 * num_splits, 2), (5 * (2 * num_splits - 1), 2)]
    assert [grid for _, grid, _ in joins] == ([(4, 4), (7, 4)] if num_splits > 1 else [])
    assert len({binary for _, _, binary in attends}) == 1


def test_a_kernel_that_reads_its_scratch_keeps_it():
    ptx = ".visible .entry k(.param .u64 k_param_0, .param .u64 k_param_1, .param .u64 k_param_2)\n{ ld [k_param_%d]; }"
    assert "k_param_1" not in without_scratch_parameters(ptx % 0, 1)
    with pytest.raises(ValueError, match="k: reads k_param_2"):
        without_scratch_parameters(ptx % 2, 1)
    with pytest.raises(ValueError, match="3 PTX parameters, expected 2 and scratch"):
        without_scratch_parameters(ptx % 0, 2)


@triton.jit
def add_one_kernel(x, count, y, BLOCK: tl.constexpr):
    cells = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + cells, tl.load(x + cells, mask=cells < count) + 1, mask=cells < count)


def test_signature_and_constants_name_every_parameter():
    pointers = {"x": "*fp32:16", "y": "*fp32:16"}
    assert assemble(compile_kernel(add_one_kernel, pointers | {"count": "i32"}, {"BLOCK": 128}, 80))[0] > 0
    assert len(compile_kernel(add_one_kernel, pointers, {"BLOCK": 128, "count": 1024}, 80).parameters) == 2
    with pytest.raises(
        ValueError, match="add_one_kernel: signature and constants must together name x, count, y, BLOCK"
    ):
        compile_kernel(add_one_kernel, pointers, {"BLOCK": 128}, 80)
