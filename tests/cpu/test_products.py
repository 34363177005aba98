# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""Products of rows and stored matrices on a CPU: right, with the same bits in any batch, and cached on disk."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import ml_dtypes
import numba
import numpy as np
import pytest
from llvmlite import ir

from faser_backend.core.model import COMPUTES
from faser_backend.cpu.kernels import compilation, matrix_units, vector_products
from faser_backend.cpu.kernels.compilation import f32, i64
from faser_backend.cpu.kernels.layouts import (
    FORMATS,
    LANES,
    LAYOUTS,
    num_blocks,
    store_groups,
    store_matrix,
    stored_bytes,
)
from faser_backend.cpu.kernels.matrix_units import PRODUCTS
from faser_backend.cpu.kernels.products import (
    STORED,
    multiply_rows,
    pack,
    packed_size,
    read_column,
    score_columns,
    scratch_size,
)
from faser_backend.cpu.kernels.segment import plain_code
from faser_backend.cpu.kernels.vector_products import most_tile_rows
from tests.support.cpu_products import restore_matrix

ROOT = Path(__file__).resolve().parents[2]
SHAPES = [(576, 200), (96, 40), (100, 33), (31, 16), (1, 1)]  # inputs, outputs


@cache
def product_and_scores(code: int):
    """Returns one kernel for both, because the tiles that they share are most of what is compiled.

    It is kept on disk, for other files of tests.
    """
    sizes = [numba.int64] * 4
    floats = f32[2], f32[2], f32[1], STORED
    signature = numba.void(*floats, *sizes, numba.boolean, f32[1], f32[1], i64[1])

    def kernel(y, x, packed, weights, offset, first, last, num_rows, adds, scratch, scores, candidates):
        if candidates.size:
            score_columns(code, scores, x[:1], weights, offset, candidates, scratch)
        else:
            pack(code, packed, x, 0, num_rows)
            multiply_rows(code, y, x, packed, weights, offset, first, last, num_rows, adds, scratch)

    return compilation.compile_kernel(kernel, signature)


@cache
def column_reader(code: int):
    @numba.njit(nogil=True)
    def read(out, weights, offset, column):
        read_column(code, out, weights, offset, column)

    return read


class Matrix:
    """A random matrix, stored after 64 other bytes of a file."""

    def __init__(
        self, weight_format: str, num_inputs: int, num_outputs: int, compute: str = COMPUTES[0], *, seed: int = 0
    ):
        self.rng = np.random.default_rng(seed)
        self.shape, self.code = (num_inputs, num_outputs), plain_code(weight_format, compute)
        stored = store_matrix(self.rng.standard_normal(self.shape).astype(np.float32), weight_format)
        self.restored = restore_matrix(stored, num_inputs, num_outputs, weight_format)
        self.weights = np.concatenate([np.full(64, 255, np.uint8), stored])
        self.weights.flags.writeable = False

    def rows(self, num_rows: int) -> np.ndarray:
        return self.rng.standard_normal((num_rows, self.shape[0])).astype(np.float32)

    def times(self, x, *, blocks=None, y=None) -> np.ndarray:
        """Computes x @ W in a range of blocks, by default all, and adds it to y."""
        first, last = blocks or (0, num_blocks(self.shape[1]))
        adds, y = y is not None, np.full((len(x), self.shape[1]), np.nan, np.float32) if y is None else y
        scratch = np.full(scratch_size(self.shape[0]), np.nan, np.float32)
        packed = np.full(packed_size(self.shape[0], len(x)), np.nan, np.float32)
        run, sizes = product_and_scores(self.code), (64, first, last, len(x), adds)
        run(y, x, packed, self.weights, *sizes, scratch, y[0], np.zeros(0, np.int64))
        return y

    def scores(self, x_row, candidates) -> np.ndarray:
        """Computes x_row @ W[:, candidates]."""
        scores, scratch = (
            np.empty(len(candidates), np.float32),
            np.full(scratch_size(self.shape[0]), np.nan, np.float32),
        )
        run, x = product_and_scores(self.code), x_row[None]
        run(x, x, scratch, self.weights, 64, 0, 0, 1, False, scratch, scores, candidates)
        return scores


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("shape", [*SHAPES, (40, 1100)])
def test_matrices_come_back_as_the_format_has_them(weight_format: str, shape: tuple[int, int]):
    weight = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    stored = store_matrix(weight, weight_format)
    assert stored.dtype == np.uint8 and stored.shape == (stored_bytes(*shape, weight_format),)
    restored = restore_matrix(stored, *shape, weight_format)
    floats = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}
    if weight_format in floats:
        np.testing.assert_array_equal(restored, weight.astype(floats[weight_format]).astype(np.float32))
        return
    for first in range(0, shape[0], 32):
        group, error = weight[first : first + 32], np.abs(restored - weight)[first : first + 32]
        step = np.abs(group).max(axis=0) / 127 if weight_format == "int8" else np.ptp(group, axis=0) / 15
        assert (error <= step * 0.57 + 2e-3).all(), "half a step, and what halves round of scale and minimum"


def test_a_matrix_of_bfloat16_is_stored_without_rounding():
    weight = np.random.default_rng(2).standard_normal((70, 20)).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(
        restore_matrix(store_matrix(weight, "bf16"), 70, 20, "bf16"), weight.astype(np.float32)
    )


@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_integers_that_are_quantised_already_are_kept(weight_format: str):
    rng = np.random.default_rng(3)
    scales = rng.uniform(0.01, 1, (3, 1050)).astype(np.float16)
    minimums = -8 * scales if weight_format == "int4" else None
    kind, bounds = (np.int8, (-128, 128)) if weight_format == "int8" else (np.uint8, (0, 16))
    numbers = rng.integers(*bounds, (96, 1050)).astype(kind)
    restored = restore_matrix(store_groups(numbers, scales, minimums, weight_format), 96, 1050, weight_format)
    expected = numbers.astype(np.float32) * scales.astype(np.float32).repeat(32, axis=0)
    if minimums is not None:
        expected += minimums.astype(np.float32).repeat(32, axis=0)
    np.testing.assert_array_equal(restored, expected)


def test_what_a_format_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="too large for fp16"):
        store_matrix(np.full((32, 16), 1e5, np.float32), "fp16")
    with pytest.raises(ValueError, match="not finite"):
        store_matrix(np.full((32, 16), np.nan, np.float32), "int8")
    with pytest.raises(ValueError, match="not finite"):
        store_groups(np.zeros((32, 16), np.int8), np.full((1, 16), np.inf, np.float16), None, "int8")


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_right(weight_format: str, shape: tuple[int, int]):
    matrix = Matrix(weight_format, *shape)
    x = matrix.rows(45)
    assert_right(matrix, x, matrix.times(x), error=error_of(weight_format))


def error_of(weight_format: str) -> float:
    """Returns the error relative to an input: two bfloat16 numbers leave this out, and fp16 weights the same again.

    The numbers of int4 are larger than their weights with minimums.
    """
    if weight_format not in PRODUCTS[2] or not matrix_units.has_matrix_units():
        return 1e-6
    return {"int4": 2**-15, "fp16": 2**-15}.get(weight_format, 2**-17)


def assert_right(matrix: Matrix, x, y, *, error: float) -> None:
    """Asserts equality. error: of an input, relative."""
    exact, sizes = x.astype(np.float64) @ matrix.restored, np.abs(x).astype(np.float64) @ np.abs(matrix.restored)
    assert (np.abs(y - exact) <= error * sizes + 1e-30).all()


@pytest.mark.skipif(not matrix_units.has_matrix_units(), reason="needs a CPU with AMX")
def test_both_parts_of_an_input_count():
    """Control: with the nearest bfloat16 alone, results would be a hundred times further off."""
    matrix = Matrix("bf16", 576, 200)
    x = matrix.rows(20)
    rounded = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert_right(matrix, x, matrix.times(x), error=2**-17)
    with pytest.raises(AssertionError):
        assert_right(matrix, x, matrix.times(rounded), error=2**-13)


@pytest.mark.skipif(not vector_products.HAS_WORDS, reason="needs a CPU with AVX2, without AVX-512")
@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_words_are_of_a_groups_largest_input(weight_format: str):
    """Beside an input of 1e6 others of its group are lost, those of other groups are not; tiny ones are kept."""
    matrix = Matrix(weight_format, 576, 200, COMPUTES[1])
    x = matrix.rows(4)
    assert_right(matrix, x, matrix.times(x), error=2**-13)  # of int4's numbers, larger than their weights
    with pytest.raises(AssertionError):
        assert_right(matrix, x, matrix.times(x), error=1e-6)
    x[1, 5], x[2], x[3] = 1e6, 1e-20 * x[0], 0.0
    alone = np.where(np.arange(576) // 32 == 0, 0.0, x[:1])
    found, rest = matrix.times(x), matrix.times(alone.astype(np.float32))
    np.testing.assert_allclose(found[1] - 1e6 * matrix.restored[5], rest[0], atol=1e6 * 2**-16 * 32 * 4)
    np.testing.assert_allclose(found[2], 1e-20 * found[0], rtol=1e-4, atol=1e-24)
    assert not found[3].any() and (found[0] != rest[0]).any()


def test_the_environment_can_switch_matrix_units_off():
    code = "from faser_backend.cpu.kernels.matrix_units import has_matrix_units; print(has_matrix_units())"
    environment = {**os.environ, "FASER_MATRIX_UNITS": "off", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_any_company(weight_format: str, compute: str, shape: tuple[int, int]):
    matrix = Matrix(weight_format, *shape, compute)
    x = matrix.rows(128)
    together = matrix.times(x)
    assert not np.isnan(together).any()
    for num_rows in (*range(1, 20), 31, 64, 127):
        np.testing.assert_array_equal(matrix.times(x[:num_rows]), together[:num_rows])
        np.testing.assert_array_equal(matrix.times(x[-num_rows:]), together[-num_rows:])


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("weight_format", FORMATS)
def test_ranges_of_blocks_give_the_bits_of_the_whole_and_touch_nothing_else(weight_format: str, compute: str):
    matrix = Matrix(weight_format, 96, 200, compute)
    for num_rows in (1, 2, 3, 6, 9, 25):
        x = matrix.rows(num_rows)
        whole = matrix.times(x)
        for first, last in ((0, 13), (0, 1), (12, 13), (3, 11), (5, 5), (1, 6), (6, 13)):
            part, columns = matrix.times(x, blocks=(first, last)), slice(first * LANES, last * LANES)
            np.testing.assert_array_equal(part[:, columns], whole[:, columns])
            part[:, columns] = np.nan
            assert np.isnan(part).all(), "columns of other blocks are left alone"


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("num_rows", [1, 4, 40])
def test_what_is_added_is_the_finished_sum(weight_format: str, compute: str, num_rows: int):
    matrix = Matrix(weight_format, 100, 72, compute)
    x = matrix.rows(num_rows)
    before = matrix.rng.standard_normal((num_rows, 72)).astype(np.float32)
    np.testing.assert_array_equal(matrix.times(x, y=before.copy()), before + matrix.times(x))


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_columns_and_scores_have_the_bits_of_weights_and_products(
    weight_format: str, compute: str, shape: tuple[int, int]
):
    matrix = Matrix(weight_format, *shape, compute)
    candidates = matrix.rng.integers(0, shape[1], 50)
    x = matrix.rows(1)
    column = np.empty(shape[0], np.float32)
    np.testing.assert_array_equal(matrix.scores(x[0], candidates), matrix.times(x)[0, candidates])
    for candidate in candidates[:10]:
        column_reader(matrix.code)(column, matrix.weights, 64, candidate)
        np.testing.assert_array_equal(column, matrix.restored[:, candidate])


def test_other_orders_have_other_bits():
    """Control: if sums were exact or the data too simple, the tests of bits would prove nothing."""
    matrix = Matrix("fp32", 576, 200)
    x = matrix.rows(6)
    straight = matrix.times(x)
    backwards = Matrix("fp32", 576, 200)
    backwards.weights = np.concatenate([np.zeros(64, np.uint8), store_matrix(matrix.restored[::-1], "fp32")])
    assert (backwards.times(np.ascontiguousarray(x[:, ::-1])) != straight).any()
    assert (x @ matrix.restored != straight).any()


# numba keeps compiled code per process: another CPU is another process.
ANOTHER_CPU = """
import re, sys
import numpy as np
from faser_backend.cpu.kernels import vector_products
vector_products.TILE_ROWS = int(sys.argv[1])
from tests.cpu.test_products import FORMATS, Matrix, product_and_scores
results = {}
for name in sys.argv[3:]:
    matrix = Matrix(name, 100, 200)
    x = matrix.rows(45)
    for num_rows in (1, 2, 5, 8, 45):
        results[f"{name}.{num_rows}"] = matrix.times(x[-num_rows:])
    code = "".join(product_and_scores(matrix.code).inspect_llvm().values())
    tiles = {int(rows) for rows in re.findall(rf"row_tile_{name}_x2_(\\d+)", code)}
    assert tiles == set(range(1, vector_products.TILE_ROWS + 1)), tiles
np.savez(sys.argv[2], **results)
"""


def products_elsewhere(path: Path, tile_rows: int, *formats: str) -> dict[str, np.ndarray]:
    """Returns, by format and rows, the last of 45 rows of Matrix(format, 100, 200) without matrix units."""
    changes = {"FASER_MATRIX_UNITS": "off", "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(path.parent)}
    command = [sys.executable, "-c", ANOTHER_CPU, str(tile_rows), str(path), *formats]
    done = subprocess.run(
        command, env={**os.environ, **changes}, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(np.load(path))


def test_tiles_of_another_cpu_give_the_same_bits(tmp_path: Path):
    most_rows = most_tile_rows({"sse2": True, "avx": True, "avx512f": vector_products.TILE_ROWS != 8})
    assert most_rows != vector_products.TILE_ROWS
    elsewhere = products_elsewhere(tmp_path / "other.npz", most_rows, *FORMATS)
    here = (
        {}
        if not matrix_units.has_matrix_units()
        else products_elsewhere(tmp_path / "own.npz", vector_products.TILE_ROWS, *PRODUCTS[2])
    )
    for weight_format in FORMATS:
        matrix = Matrix(weight_format, 100, 200)
        x = matrix.rows(45)
        for num_rows in (1, 2, 5, 8, 45):
            found = elsewhere[f"{weight_format}.{num_rows}"]
            own = here.get(f"{weight_format}.{num_rows}")
            np.testing.assert_array_equal(found, matrix.times(x[-num_rows:]) if own is None else own)
            assert_right(matrix, x[-num_rows:], found, error=1e-6)


@pytest.mark.skipif(matrix_units.has_matrix_units(), reason="matrix units have other codes")
@pytest.mark.parametrize("weight_format", FORMATS)
def test_arithmetics_share_a_kernel_where_they_have_the_same_code(weight_format: str):
    codes = []
    for num_parts in (1, 2):
        layout, module = replace(LAYOUTS[weight_format], num_parts=num_parts), ir.Module()
        vector_products.blocks_function(module, layout)
        vector_products.prepare_function(module, layout)
        codes.append(str(module).replace(layout.title, weight_format))
    is_shared = plain_code(weight_format, COMPUTES[0]) == plain_code(weight_format, COMPUTES[1])
    assert (codes[0] == codes[1]) == is_shared


def test_tiles_leave_registers_for_weights_and_inputs():
    for features, registers_per_sum, num_registers in (
        ({"sse2": True}, 4, 16),
        ({"sse2": True, "avx": True}, 2, 16),
        ({"sse2": True, "avx": True, "avx512f": True}, 1, 32),
        ({"neon": True}, 4, 32),
    ):
        assert 1 <= most_tile_rows(features) * registers_per_sum < num_registers - 2


CACHED = """
from faser_backend.cpu.kernels.segment import segment_kernel
kernel = segment_kernel(8, "fp32", ("fp32", "fp32", "fp32"), "bf16")
print(sum(kernel.stats.cache_hits.values()))
"""


def test_a_segments_kernel_is_kept_on_disk_for_other_processes():
    """The first compiles it, unless an earlier test did."""
    command, environment = [sys.executable, "-c", CACHED], {**os.environ, "PYTHONPATH": str(ROOT)}
    num_loaded = [subprocess.check_output(command, env=environment, timeout=120, text=True) for _ in range(2)]
    assert num_loaded[1] == "1\n"
