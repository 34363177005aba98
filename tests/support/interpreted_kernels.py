"""Kernels against their references in the Triton-language interpreter, on the CPU.

A kernel is interpreted or not from its definition on, so the files interpreted_*.py run in their own processes, which
test_kernels.py starts with TRITON_INTERPRET=1.
"""

import itertools
import mmap

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from faser_backend.cpu.noise import noise_table
from faser_backend.cuda.call_shapes import ROW_COUNTS
from faser_backend.cuda.sampler import TorchNoise
from faser_backend.lab.gpu.kernel_cases import NAN, SENTINEL, Call, Shape, make_call, random_shape
from faser_backend.plugins import attention_tiles, reference
from faser_backend.plugins import product as products
from faser_backend.plugins import pruned_chunk_attention as attention
from faser_backend.plugins.add_adapters import add_adapters
from faser_backend.plugins.add_rms_norm import add_rms_norm
from faser_backend.plugins.attention_config import LaunchConfig
from faser_backend.plugins.exit_scores import exit_scores
from faser_backend.plugins.gated_silu import gated_silu
from faser_backend.plugins.perturb_logits import BLOCK_V, perturb_logits
from faser_backend.plugins.product import MatrixProduct
from faser_backend.plugins.rotate_heads import rotate_heads
from tests.support.kernel_cases import check, small_tiles

torch.set_num_threads(1)
CASES = [("fp32", torch.float32, 8), ("fp16", torch.float16, 4), ("bf16", torch.bfloat16, 4)]


@pytest.fixture(autouse=True)
def _bfloat16_products(monkeypatch):
    """Widens bfloat16 before `dot`: the interpreter (3.6.0) holds it as integers and multiplies these."""
    dot = interpreter.InterpreterBuilder.create_dot

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    monkeypatch.setattr(
        interpreter.InterpreterBuilder, "create_dot", lambda self, a, b, *rest: dot(self, widened(a), widened(b), *rest)
    )


@pytest.fixture(autouse=True)
def _parts_of_nan(monkeypatch):
    """Fills parts with NaN, so that an unwritten part shows when parts are joined."""
    make = attention.empty_parts
    monkeypatch.setattr(
        attention, "empty_parts", lambda *arguments: tuple(part.fill_(NAN) for part in make(*arguments))
    )


def run(call: Call, *, num_splits: int = 1, max_rows: int | None = None, **options) -> None:
    max_rows = max_rows or max(1, int(call.cu_rows.diff().max()))
    options = {"part_tokens": 128} | options
    attention.pruned_chunk_attention(*call, max_rows=max_rows, num_splits=num_splits, **options)


@pytest.mark.parametrize(
    ("dtype", "seed"), [pytest.param(dtype, seed, id=f"{name}-{seed}") for name, dtype, n in CASES for seed in range(n)]
)
def test_attention_of_random_ragged_calls(monkeypatch, dtype, seed):
    rng = np.random.default_rng(1000 + seed)
    shape = random_shape(rng, dtype)
    if seed % 2:
        tiles = small_tiles(rng, shape.group)
        monkeypatch.setattr(attention, "launch_config", lambda *_: tiles)
    num_results = sum(shape.rows) * shape.num_kv_heads * shape.group  # the interpreter joins parts one by one
    num_splits = int(rng.choice([1, 2, 4], p=[0.4, 0.3, 0.3])) if num_results <= 24 else 1
    bound = max(1, *shape.rows) + int(rng.integers(0, 3))  # the host may know only a bound
    num_sms = 1 + seed % 3  # few programs, which take many items in turn
    options = {"num_splits": num_splits, "max_rows": bound, "num_sms": num_sms, "part_tokens": 32 if seed % 2 else 128}
    check(make_call(shape, seed), lambda call: run(call, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(3))
def test_attention_of_blocks_whose_rows_see_each_other(monkeypatch, dtype, seed):
    """The control is causal. Blocks have more rows than a tile, and one row more or less than a column tile."""
    rng = np.random.default_rng(seed)
    tiles, group = small_tiles(rng, 3), int(rng.integers(1, 4))
    monkeypatch.setattr(attention, "launch_config", lambda *_: tiles)
    shape = Shape(
        rows=(int(rng.integers(2, 7)), 0, 15 + seed), contexts=(int(rng.integers(60)), 3, 0), num_kv_heads=1,
        group=group, head_dim=16, dtype=dtype, num_padding_rows=seed, pruned_writes=0.3,
    )  # fmt: skip
    call, options = make_call(shape, seed), {"num_splits": 1 + seed % 2, "num_sms": 1 + seed, "part_tokens": 32}
    check(call, lambda call: run(call, is_causal=False, **options), is_causal=False)
    with pytest.raises(AssertionError):
        check(call, lambda call: run(call, **options), is_causal=False)


@pytest.mark.parametrize(
    ("context", "num_splits"), [*itertools.product((0, 1, 7, 8, 15, 16, 17, 64, 65), (1, 3)), (570, 1), (570, 26)]
)
def test_attention_at_block_and_tile_borders(monkeypatch, context, num_splits):
    monkeypatch.setattr(attention, "launch_config", lambda *_: LaunchConfig(16, 16, 4, 2))
    shape = Shape(rows=(1, 17 if num_splits == 1 else 3), contexts=(context, context), num_kv_heads=1, head_dim=16)
    check(make_call(shape, context), lambda call: run(call, num_splits=num_splits, part_tokens=16))


def shuffle(monkeypatch, seed: int) -> None:
    """Lets the programs of every grid run in a random order."""
    builder, rng, order = interpreter.interpreter_builder, np.random.default_rng(seed), {}
    set_dim, set_index = builder.set_grid_dim, builder.set_grid_idx

    def set_grid_dim(*grid) -> None:
        set_dim(*grid)
        indices = list(np.ndindex(*grid))
        order.update(zip(indices, (indices[index] for index in rng.permutation(len(indices))), strict=True))

    monkeypatch.setattr(builder, "set_grid_dim", set_grid_dim)
    monkeypatch.setattr(builder, "set_grid_idx", lambda *index: set_index(*order[index]))


@triton.jit
def last_program_kernel(out):
    tl.store(out, tl.program_id(0))


def test_no_order_of_programs_changes_a_bit(monkeypatch):
    monkeypatch.setattr(attention, "launch_config", lambda *_: LaunchConfig(16, 16, 4, 2))
    shape, rows, found = Shape(rows=(3, 1, 5), contexts=(40, 9, 0), head_dim=16), torch.randn(9, 64), []
    for _ in range(2):
        calls = [make_call(shape, 0) for _ in range(2)]
        for num_splits, call in zip((1, 3), calls, strict=True):  # with parts, they are joined too
            run(call, num_splits=num_splits, num_sms=3, part_tokens=16)
        last, silu, normed = torch.zeros(1, dtype=torch.int32), torch.empty(9, 32), torch.empty(9, 64)
        gated_silu(rows, silu)
        add_rms_norm(rows, None, torch.ones(64), 1e-5, None, normed)
        last_program_kernel[(64,)](last)  # the control, whose order shows
        found.append((last, silu, normed, *(tensor.nan_to_num() for call in calls for tensor in call)))
        shuffle(monkeypatch, 0)
    assert [torch.equal(*pair) for pair in zip(*found, strict=True)] == [False] + [True] * (len(found[0]) - 1)


@pytest.mark.parametrize("num_padding_rows", [0, 4])
def test_attention_where_everything_was_pruned(num_padding_rows):
    check(make_call(Shape(rows=(0, 0, 0), contexts=(9, 0, 16), num_padding_rows=num_padding_rows), 0), run)


def test_few_programs_start_and_most_have_work(monkeypatch):
    """Counts the programs of launches as runtime torch's on 20 SMs, and the items of work that they find.

    The control is one program for each item that the rows and parts of the shape may need.
    """
    rng, grids, items, on_grid = np.random.default_rng(0), [], [], attention.on_grid

    def counted(*arguments, **constants):
        items.append(arguments[9])
        return tuple(tl.zeros([arguments[n] for n in sizes], tl.float32) for sizes in ((17,), (17,), (17, 19)))

    monkeypatch.setattr(attention, "attend_tokens", counted)
    monkeypatch.setattr(attention, "combine_splits", lambda *_: None)
    monkeypatch.setattr(attention, "on_grid", lambda kernel, *grid: grids.append(grid) or on_grid(kernel, *grid))
    rows, contexts = rng.integers(1, 6, 10), rng.integers(0, 2000, 10)
    call = make_call(Shape(tuple(rows), tuple(contexts), group=4, head_dim=16, kv_block_size=16), 0)
    count = next(count for count in ROW_COUNTS if count >= rows.sum())
    graph, width = padded(call, count, count, 256)
    wanted = 2 * int((-(-rows // 8) * -(-(contexts + rows) // 256)).sum())  # in two KV heads
    control = 2 * 8 * attention.num_tiles(count, count, 8)
    run(graph, num_splits=8, max_rows=8, part_tokens=256, table_width=width, num_sms=20)
    started = sum(map(np.prod, grids))
    assert len(items) == wanted and started <= 1.3 * wanted < control / 2, (started, control)


@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_attention_of_nine_heads_and_three_kv_heads(head_dim):
    """Checks SmolLM2's heads; one sequence has no rows, another no context."""
    shape = Shape(rows=(2, 0, 1), contexts=(9, 20, 0), num_kv_heads=3, group=3, head_dim=head_dim, num_padding_rows=1)
    check(make_call(shape, head_dim), run)


def padded(call: Call, num_rows: int, num_sequences: int, num_columns: int) -> tuple[Call, torch.Tensor]:
    """Returns the call as a captured graph for more rows and sequences gets it, and its table's width.

    The table's rows lie without gaps; unused entries are garbage.
    """
    rows, num, (height, width) = call.q.shape[0], int(call.cu_rows[-1]), call.block_table.shape

    def longer(tensor: torch.Tensor, size: int, filler: float) -> torch.Tensor:
        return torch.cat([tensor, torch.full((size - tensor.shape[0], *tensor.shape[1:]), filler, dtype=tensor.dtype)])

    table = torch.full((num_sequences * num_columns,), 2**30, dtype=torch.int32)
    table[: height * width] = call.block_table.flatten()
    changed = {name: longer(getattr(call, name), num_rows, NAN) for name in ("q", "k_new", "v_new")}
    lists = {"slot_mapping": longer(call.slot_mapping, num_rows, -1), "out": longer(call.out, num_rows, SENTINEL)}
    lists |= {"cu_rows": longer(call.cu_rows, num_sequences + 1, num)}
    lists |= {"context_lens": longer(call.context_lens, num_sequences, 0)}
    assert rows <= num_rows
    result = call._replace(**changed, **lists, block_table=table.view(num_sequences, num_columns))
    return result, torch.tensor([width], dtype=torch.int32)


@pytest.mark.parametrize("rows", [(1,), (8,), (1, 1, 1, 1, 1), (2, 0, 4, 1), (5, 3)])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_graph_of_eight_rows_takes_any_sequences(monkeypatch, rows, num_splits):
    """Rows, lengths and table width are read on the device, so one launch serves any split of rows."""
    monkeypatch.setattr(attention, "launch_config", lambda *_: LaunchConfig(16, 16, 4, 2))
    contexts = (70, 0, 15, 32, 41)[: len(rows)]
    call = make_call(Shape(rows=rows, contexts=contexts, num_kv_heads=1, group=4, head_dim=16), 3)
    graph, width = padded(call, 8, 8, 40)
    expected = call.with_own_results()
    reference.pruned_chunk_attention(*expected)
    by_reference = graph.with_own_results()
    reference.pruned_chunk_attention(*by_reference, width)
    run(graph, num_splits=num_splits, max_rows=8, part_tokens=32, table_width=width)
    count = sum(rows)
    for out in (graph.out, by_reference.out):
        torch.testing.assert_close(out[:count], expected.out[:count], atol=1e-5, rtol=0)
        assert (out[count:] == SENTINEL).all(), "padding rows were written"
    assert torch.equal(graph.k_pool.view(torch.int32), expected.k_pool.view(torch.int32))


def sparse_pool(*shape: int) -> torch.Tensor:
    """Returns zeros of which only touched pages take memory."""
    numel = int(np.prod(shape, dtype=np.int64))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, 2 * numel, flags), dtype=torch.float16).view(shape)


def test_pools_beyond_two_to_the_thirty_one_elements():
    num_blocks = 2**19 + 5  # of 16 tokens of 256 dimensions: one KV head more than 2^31 elements
    small = make_call(Shape(rows=(3,), contexts=(20,), head_dim=256, kv_block_size=16, dtype=torch.float16), 0)
    shift = num_blocks - small.k_pool.shape[1]
    pools = [sparse_pool(2, num_blocks, 16, 256) for _ in range(2)]
    for pool, tensor in zip(pools, (small.k_pool, small.v_pool), strict=True):
        pool[:, shift:] = tensor
    assert pools[0][0].numel() > 2**31
    large = small.with_own_results()._replace(
        k_pool=pools[0],
        v_pool=pools[1],
        block_table=small.block_table + shift,
        slot_mapping=(small.slot_mapping + shift * 16).to(torch.int32),
    )
    run(large)
    reference.pruned_chunk_attention(*small)
    torch.testing.assert_close(large.out, small.out, atol=2e-3, rtol=2e-3)
    for pool, tensor in zip(pools, (small.k_pool, small.v_pool), strict=True):
        assert torch.equal(pool[:, shift:].contiguous().view(torch.int16), tensor.view(torch.int16))
        assert not pool[:, :2].any(), "an index that wrapped"


def changed(name: str, index: int, change, module=attention):
    """Returns a step whose argument at `index` is changed."""
    step = getattr(module, name)
    return module, name, lambda *a, **constants: step(*a[:index], change(a[index]), *a[index + 1 :], **constants)


@pytest.mark.parametrize(
    "broken",
    [
        changed("attend_tokens", 12, lambda last_seen: last_seen + 1),
        changed("attend_tokens", 11, lambda context: context + 1),
        changed("attend_tokens", 9, lambda part: part + 1),
        changed("attend_tokens", 4, lambda num_blocks: 1),  # the clamp then leads to block 0 only
        changed("join", 4, lambda part_sum: 2 * part_sum, attention_tiles),
        changed("write_rows", 2, lambda slot: slot + 1),
    ],
)
def test_the_check_fails_a_broken_kernel(monkeypatch, broken):
    monkeypatch.setattr(attention, "launch_config", lambda *_: LaunchConfig(16, 16, 4, 2))
    call = make_call(Shape(rows=(18, 1), contexts=(11, 20), num_padding_rows=1), 5)
    check(call, lambda call: run(call, part_tokens=16))
    monkeypatch.setattr(*broken)
    with pytest.raises(AssertionError):
        check(call, lambda call: run(call, part_tokens=16))


def ascending_dot(self, a, b, d, *_):
    """Adds products to d in ascending order, as tensor cores do for any tile; numpy's order depends on sizes."""
    total = d.data.copy()
    for k in range(a.data.shape[-1]):
        total += a.data[:, k, None].astype(np.float32) * b.data[k].astype(np.float32)
    return interpreter.TensorHandle(total, d.dtype.scalar)


def test_a_rows_bits_do_not_depend_on_its_call(monkeypatch):
    """A last row alone, verified, as a prompt, in parts, with other tiles, beside others. The control: other parts."""
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", ascending_dot)
    whole, length = make_call(Shape(rows=(90,), contexts=(0,), num_kv_heads=1, group=2, head_dim=16), 0), 90
    run(whole)  # writes all keys and values to the pool

    def last_row(num_rows: int, others: int, block_m: int, tokens: int = 32, **options) -> torch.Tensor:
        monkeypatch.setattr(attention, "launch_config", lambda *_: LaunchConfig(block_m, 16, 4, 2))
        # The others are sequences of the first token, in the same blocks.
        picked = torch.cat([torch.arange(length - num_rows, length), torch.zeros(others, dtype=torch.int64)])
        new = {name: getattr(whole, name)[picked] for name in ("q", "k_new", "v_new", "slot_mapping", "out")}
        lens = torch.tensor([length - num_rows, *[0] * others], dtype=torch.int32)
        ends = torch.tensor([0, *range(num_rows, num_rows + others + 1)], dtype=torch.int32)
        table = whole.block_table.expand(1 + others, -1).contiguous()
        call = whole.with_own_results()._replace(**new, context_lens=lens, cu_rows=ends, block_table=table)
        run(call, part_tokens=tokens, **options)
        return call.out[num_rows - 1]

    alone = last_row(1, 0, 16)
    for num_rows, others, block_m in ((1, 3, 16), (25, 1, 32), (90, 2, 64)):
        for options in ({}, {"num_splits": 3, "num_sms": 2}):
            assert torch.equal(last_row(num_rows, others, block_m, **options), alone), (num_rows, others, options)
    assert not torch.equal(last_row(1, 0, 16, 16), alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_rows", "num_candidates", "hidden_size"), [(1, 1, 16), (5, 8, 48), (3, 5, 1100), (0, 4, 16), (4, 0, 16)]
)
def test_exit_scores(dtype, num_rows, num_candidates, hidden_size):
    generator = torch.Generator().manual_seed(num_rows)
    hidden = torch.randn(num_rows, hidden_size, generator=generator).to(dtype)
    head = torch.randn(50, hidden_size, generator=generator).to(dtype)
    head[7] = NAN  # no candidate
    candidates = torch.randint(8, 50, (num_rows, num_candidates), generator=generator)
    expected, actual = torch.full((2, num_rows, num_candidates), SENTINEL)
    reference.exit_scores(hidden, head, candidates, expected)
    exit_scores(hidden, head, candidates, actual)
    torch.testing.assert_close(actual, expected, atol=1e-5 * hidden_size**0.5, rtol=1e-5)


# -- row kernels of a decoder layer ------------------------------------------------------------------------------------
DTYPES = (torch.float32, torch.bfloat16)
# Sums in another order, and one rounding to the type; for bfloat16 two, as the interpreter truncates the sum too.
ROW_TOLERANCES = {torch.float32: (2e-6, 2e-6), torch.float16: (1e-3, 1e-3), torch.bfloat16: (1.6e-2, 1.6e-2)}
EPS = 1e-5


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    atol, rtol = ROW_TOLERANCES[wanted.dtype]
    torch.testing.assert_close(got, wanted, atol=atol, rtol=rtol)
    assert wanted.abs().max() > 0.1, "a comparison of nothing"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_size", [8, 100, 640])
@pytest.mark.parametrize("has_delta", [False, True])
def test_add_rms_norm(dtype, hidden_size, has_delta):
    torch.manual_seed(0)
    hidden, delta = (torch.randn(5, hidden_size).to(dtype) for _ in range(2))
    weight = torch.rand(hidden_size) + 0.5
    results = []
    for implementation in (add_rms_norm, reference.add_rms_norm):
        summed, out = (torch.full_like(hidden, 77.0) for _ in range(2))
        given = (delta, summed) if has_delta else (None, None)
        implementation(hidden, given[0], weight, EPS, given[1], out)
        results.append((summed, out))
    (summed, out), (wanted_sum, wanted) = results
    # The interpreter truncates bfloat16; a GPU rounds.
    torch.testing.assert_close(summed, wanted_sum, atol=0, rtol=8e-3 if dtype == torch.bfloat16 else 0)
    close(out, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 8), (3, 3, 20), (8, 1, 64)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_rotate_heads(dtype, num_heads, num_kv_heads, head_dim, has_norm):
    torch.manual_seed(1)
    num_rows, num_all = 5, num_heads + 2 * num_kv_heads
    wide = torch.randn(num_rows, (num_all + 3) * head_dim).to(dtype)  # a stride greater than the row length
    qkv = wide[:, : num_all * head_dim].unflatten(1, (num_all, head_dim))
    angles = torch.rand(40, head_dim // 2) * 6
    positions = torch.tensor([0, 39, 7, 7, 1])
    norms = {"q_norm": torch.rand(head_dim) + 0.5, "k_norm": torch.rand(head_dim) + 0.5} if has_norm else {}
    out, wanted = (torch.full((num_rows, num_heads + num_kv_heads, head_dim), 77.0, dtype=dtype) for _ in range(2))
    tables = positions, angles.cos(), angles.sin()
    rotate_heads(qkv, *tables, out, num_heads=num_heads, eps=EPS, **norms)
    weights = norms.get("q_norm"), norms.get("k_norm")
    reference.rotate_heads(qkv, *tables, *weights, EPS, num_heads, wanted)
    close(out, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [3, 48, 1500])
def test_gated_silu(dtype, size):
    torch.manual_seed(2)
    gate_up = torch.randn(4, 2 * size).to(dtype) * 3
    out, wanted = (torch.full((4, size), 77.0, dtype=dtype) for _ in range(2))
    gated_silu(gate_up, out)
    reference.gated_silu(gate_up, wanted)
    close(out, wanted)


PRODUCT = MatrixProduct(torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "num_outputs", "size"), [(0, 3, 8), (3, 70, 1100), (65, 129, 1100), (530, 3, 8)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products(dtype, num_rows, num_outputs, size, has_bias):
    torch.manual_seed(3)
    rows, weight = torch.randn(num_rows, size + 8).to(dtype)[:, :size], torch.randn(num_outputs, size).to(dtype) / 32
    bias = torch.randn(num_outputs).to(dtype) if has_bias else None
    for kind in {dtype, torch.float32}:
        out, wanted = (torch.full((num_rows, num_outputs), NAN, dtype=kind) for _ in range(2))
        PRODUCT(rows, weight, bias, out)
        reference.product(rows, weight, bias, wanted)
        if num_rows:
            close(out, wanted)
    assert not PRODUCT.arrived.any()


def test_rows_of_products_have_the_same_bits_in_every_call(monkeypatch):
    """Also in any order of programs, and read by descriptors where these can have the rows."""
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", ascending_dot)
    torch.manual_seed(4)
    given, weight, bias, found = torch.randn(300, 1104).half(), torch.randn(72, 1104).half(), torch.randn(72).half(), []
    unaligned, described = torch.empty(300, 1105).half()[:, :1104].copy_(given), []
    describe = products.can_describe
    monkeypatch.setattr(products, "can_describe", lambda *each: described.append(describe(*each)) or described[-1])
    for rows, num_rows in ((given, 300), (unaligned, 300), *((given, count) for count in (193, 70, 33, 16, 5, 1))):
        found.append(torch.full((num_rows, 72), NAN).half())
        PRODUCT(rows[:num_rows], weight, bias, found[-1])
        shuffle(monkeypatch, num_rows)
    assert products.parts_of(72, 1104) == (2, 640) and described == [True, False, True]
    assert all(torch.equal(each, found[0][: len(each)]) for each in found)
    monkeypatch.setattr(products, "parts_of", lambda *_: (1, 1152))
    PRODUCT(given[:1], weight, bias, found[-1])
    assert not torch.equal(found[-1], found[0][:1]), "the control, whose parts show"
    PRODUCT(given, weight, bias, torch.empty(300, 72))
    assert described[-1] is False, "an output of floats"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rank", "size", "widths"), [(1, 5, [3]), (17, 600, [40, 7, 7]), (70, 33, [300, 300])])
def test_a_row_with_an_adapter_has_the_bits_of_itself_alone(dtype, rank, size, widths):
    torch.manual_seed(3)
    sizes = [each for width in widths for each in (size, width)]
    matrices = [[torch.randn(rank * each).half() * each**-0.5 for each in sizes] for _ in range(2)]
    addresses = [[part.data_ptr() for part in parts] for parts in matrices]
    addresses[1][-2:] = 0, 0  # no such matrix
    tables = [torch.tensor([rank, 0, 0, *each]) for each in addresses]
    adapters = torch.tensor([table.data_ptr() for table in (*tables, tables[0])] + [0])
    rows, before = torch.randn(4, size).to(dtype), torch.randn(4, sum(widths)).to(dtype)
    out, wanted = before.clone(), before.clone()
    add_adapters(rows, adapters, 1, widths, 128, out)
    reference.add_adapters(rows, adapters, 1, widths, wanted)
    close(out, wanted)
    assert torch.equal(out[3], before[3]) and (wanted - before)[[0, 2]].abs().amax(1).min() > 0.05
    assert torch.equal(out[1, -widths[-1] :], before[1, -widths[-1] :])
    for row in range(4):
        alone = before[[row]]
        add_adapters(rows[[row]], adapters[[row]], 1, widths, 128, alone)
        assert torch.equal(alone[0], out[row])


# -- temperature and noise ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("vocab_size", [1, 5, BLOCK_V - 1, BLOCK_V, 2 * BLOCK_V + 3])
def test_scores_are_those_of_the_definition(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    num_rows = 6
    table, log2_size = noise_table(vocab_size)
    keys = torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, num_rows))
    keys[0], keys[1] = -1, -(2**63)
    positions = torch.from_numpy(rng.integers(0, 2**40, num_rows))
    logits = torch.from_numpy(rng.normal(0, 3, (num_rows, vocab_size)).astype(np.float32))
    logits[:, rng.integers(vocab_size)] = -torch.inf
    logits[3, 0] = torch.nan
    scale = torch.tensor([1.0, 2.0, 1.0, 0.3, 1.7, 1.0])
    weight = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    expected = TorchNoise(vocab_size, torch.device("cpu")).perturbed(logits, keys, positions, scale, weight)
    out, fixed = torch.full_like(logits, torch.nan), (torch.tensor(table.view(np.int32)), log2_size)
    given = *fixed, keys, positions, scale, weight
    perturb_logits(logits, *given, out)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert torch.equal(out[2], logits[2]) and torch.equal(out[5], logits[5])
    perturb_logits(logits, *given, logits)
    torch.testing.assert_close(logits, out, rtol=0, atol=0, equal_nan=True)
    perturb_logits(logits[:0], *fixed, keys[:0], positions[:0], scale[:0], weight[:0], out[:0])
