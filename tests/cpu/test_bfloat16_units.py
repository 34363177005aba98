"""Products on units of bfloat16: vectors by their contract bit by bit, and AMX's tiles on an emulation in numpy."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from llvmlite import binding, ir

from faser_backend.core.model import ONE_PART, TWO_PARTS
from faser_backend.cpu.kernels import matrix_units, vector_products
from faser_backend.cpu.kernels.layouts import GROUP_SIZE, store_matrix
from faser_backend.cpu.kernels.vectors import INT64
from tests.cpu.test_products import Matrix, assert_right

ROOT = Path(__file__).resolve().parents[2]
needs_dots = pytest.mark.skipif(not vector_products.HAS_DOTS or matrix_units.has_matrix_units(), reason="other units")
DENORMAL = np.float32(1e-40)


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


@needs_dots
@pytest.mark.parametrize("shape", [(576, 40), (100, 33), (1, 1)])
def test_a_lane_adds_the_odd_and_then_the_even_number_of_each_pair(shape: tuple[int, int]):
    matrix = Matrix("bf16", *shape, ONE_PART)
    x = matrix.rows(11)
    products = (rounded(x)[:, :, None] * matrix.restored).astype(np.float32)  # exact: 8 bits times 8
    sums = np.zeros((11, shape[1]), np.float32)
    for first in range(0, shape[0], 2):
        for k in (first + 1, first):
            if k < shape[0]:
                sums += products[:, k]
    np.testing.assert_array_equal(matrix.times(x), sums)


@needs_dots
def test_denormal_numbers_count_as_zero_where_pairs_are_multiplied():
    for weight, x, exact in ((DENORMAL, 1.0, DENORMAL), (1.0, DENORMAL, DENORMAL), (1e-20, 1e-20, DENORMAL)):
        for compute, expected in ((ONE_PART, 0), (TWO_PARTS, exact)):
            matrix = Matrix("bf16", 2, 1, compute)
            matrix.weights = np.concatenate([
                np.zeros(64, np.uint8), store_matrix(np.array([[weight], [0]], np.float32), "bf16")
            ])  # fmt: skip
            found = matrix.times(np.array([[x, 0]], np.float32))
            np.testing.assert_allclose(found, [[expected]], rtol=0.1)


@pytest.mark.parametrize("compute", [ONE_PART, TWO_PARTS])
@pytest.mark.parametrize("weight_format", ["fp32", "fp16", "bf16", "int8", "int4"])
def test_infinite_inputs_and_nan_reach_the_result(weight_format: str, compute: str):
    matrix = Matrix(weight_format, 64, 16, compute)
    x = matrix.rows(9)
    x[1, 5], x[2, 5], x[3, 5] = np.inf, np.nan, np.uint32(0x7F800001).view(np.float32)
    with np.errstate(invalid="ignore"):
        found = matrix.times(x)
        alone = np.concatenate([matrix.times(row[None]) for row in x])
    np.testing.assert_array_equal(found, alone)
    assert not np.isfinite(found[1]).any() and np.isnan(found[2:4]).all() and np.isfinite(found[[0, 4, 8]]).all()
    if matrix.restored[5].all() and weight_format in {"fp32", "fp16", "bf16"} and not matrix_units.has_matrix_units():
        np.testing.assert_array_equal(found[1], np.sign(matrix.restored[5]) * np.inf)


class EmulatedTiles:
    """Palette 1 of AMX in numpy; `unit` replaces matrix_units.unit."""

    def __init__(self) -> None:
        self.tiles = np.zeros((8, 16, 64), np.uint8)
        self.rows, self.line_bytes = np.zeros(8, int), np.zeros(8, int)
        kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
        operations = {
            "ldtilecfg": self.configure, "tilezero": self.clear, "tileloadd64": self.load, "tilestored64": self.store,
            "tdpbf16ps": self.multiply, "tilerelease": self.release,
        }  # fmt: skip
        self.calls = {name: kind(operation) for name, operation in operations.items()}

    def unit(self, builder, name: str, *values) -> None:
        numbers = [INT64(value) if isinstance(value, int) else value for value in values]
        numbers = [builder.ptrtoint(value, INT64) if value.type.is_pointer else value for value in numbers]
        address = INT64(ctypes.cast(self.calls[name], ctypes.c_void_p).value)
        function = builder.inttoptr(address, ir.FunctionType(ir.VoidType(), [INT64] * 4).as_pointer())
        builder.call(function, numbers + [INT64(0)] * (4 - len(numbers)))

    def configure(self, address: int, *_) -> None:
        shapes = np.frombuffer(ctypes.string_at(address, 64), np.uint8)
        assert shapes[0] == 1
        self.line_bytes, self.rows = shapes[16:32].view(np.uint16).astype(int), shapes[48:56].astype(int)
        assert (self.line_bytes <= 64).all() and (self.rows <= 16).all()
        self.tiles[:] = 0

    def release(self, *_) -> None:
        self.rows[:] = 0

    def clear(self, tile: int, *_) -> None:
        assert self.rows[tile] > 0
        self.tiles[tile] = 0

    def load(self, tile: int, address: int, stride: int, _) -> None:
        self.clear(tile)
        for row in range(self.rows[tile]):
            line = ctypes.string_at(address + row * stride, self.line_bytes[tile])
            self.tiles[tile, row, : len(line)] = np.frombuffer(line, np.uint8)

    def store(self, tile: int, address: int, stride: int, _) -> None:
        for row in range(self.rows[tile]):
            ctypes.memmove(address + row * stride, self.tiles[tile, row].tobytes(), self.line_bytes[tile])

    def multiply(self, sums: int, left: int, right: int, _) -> None:
        num_rows = self.rows[sums]
        assert self.rows[left] == num_rows and self.rows[right] == self.line_bytes[left] // 4
        a, b = (self.tiles[tile].view(ml_dtypes.bfloat16).astype(np.float32) for tile in (left, right))
        total = self.tiles[sums].view(np.float32)
        total[:num_rows] += dot_of_units(a[:num_rows], b.reshape(16, 16, 2).transpose(0, 2, 1).reshape(32, 16))


def dot_of_units(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a [R, 32] @ b [32, 16] in the order of TDPBF16PS: a chain of even and one of odd numbers, then their sum."""
    chains = np.zeros((2, len(a), b.shape[1]), np.float32)
    for k in range(len(b)):
        chains[k % 2] += a[:, k, None] * b[k]
    return chains[0] + chains[1]


def parts_of(x: np.ndarray, num_parts: int, *, cuts: bool = False) -> list[np.ndarray]:
    parts = []
    for _ in range(num_parts):
        nearest = (x.view(np.int32) & -0x10000).view(np.float32) if cuts else rounded(x)
        parts.append(nearest)
        x = x - nearest
    return parts


def check_emulated(matrix: Matrix, weight_format: str, num_parts: int) -> None:
    """Checks products on emulated tiles: their sums bit by bit where nothing is scaled, and company."""
    num_inputs = matrix.shape[0]
    x = matrix.rows(45)
    found = matrix.times(x)
    exact = sum(part.astype(np.float64) for part in parts_of(x, num_parts))
    assert_right(matrix, exact, found, error=2**-15 if weight_format == "int4" or num_parts == 2 else 2e-6)
    if weight_format in {"bf16", "fp16"}:
        padding = -num_inputs % GROUP_SIZE
        inputs = parts_of(np.pad(x, ((0, 0), (0, padding))), num_parts)
        weights = parts_of(np.pad(matrix.restored, ((0, padding), (0, 0))).astype(np.float32), 2, cuts=True)
        total = np.zeros_like(found)
        for first in range(0, num_inputs, GROUP_SIZE):
            group = slice(first, first + GROUP_SIZE)
            for part, weight in matrix_units.PRODUCTS[num_parts][weight_format]:
                total += dot_of_units(inputs[part][:, group], weights[weight][group])
        np.testing.assert_array_equal(found, total)
    for num_rows in (1, 15, 16, 17, 32, 33):
        np.testing.assert_array_equal(matrix.times(x[-num_rows:]), found[-num_rows:])
    part = matrix.times(x, blocks=(1, 2))
    np.testing.assert_array_equal(part[:, 16:32], found[:, 16:32])
    assert np.isnan(part[:, :16]).all() and np.isnan(part[:, 32:]).all()


def emulate(breaks: str) -> None:
    """Runs check_emulated for all formats, in a process whose kernels believe in AMX. breaks: a negative control."""
    from faser_backend.cpu.kernels import products

    assert products.TILE_ROWS[products.code_of("bf16")] == matrix_units.TILE_ROWS
    if breaks:
        matrix_units.PRODUCTS[2]["bf16"] = matrix_units.PRODUCTS[1]["bf16"]
    formats = ["fp16", "bf16", "int8"] + ["int4"] * binding.get_host_cpu_features().get("avx512bw", False)
    for weight_format in formats:
        for compute, num_parts in ((ONE_PART, 1), (TWO_PARTS, 2)):
            check_emulated(Matrix(weight_format, 100, 40, compute), weight_format, num_parts)


EMULATED = """
import sys
from faser_backend.cpu.kernels import matrix_units
matrix_units.find_matrix_units = lambda: (True, "emulated")
from tests.cpu.test_bfloat16_units import EmulatedTiles, emulate
tiles = EmulatedTiles()
matrix_units.unit = tiles.unit
emulate(sys.argv[1])
"""


@pytest.mark.parametrize("breaks", ["", "inputs in one part"])
def test_matrix_units_are_addressed_rightly(breaks: str, tmp_path: Path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", EMULATED, breaks]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode == 0) == (not breaks), done.stderr[-3000:]
    assert not breaks or "AssertionError" in done.stderr
