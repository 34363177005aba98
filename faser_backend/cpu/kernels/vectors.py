# ruff: noqa: PLR0917 (emitters take their arguments by position)
"""Vector code that all kernels of the CPU share, emitted as LLVM instructions: every sum has one order on any CPU.

Compiled code calls the intrinsics as functions of rows: contiguous arrays whose last dimension is a row's.
"""

from __future__ import annotations

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from faser_backend.cpu.kernels.layouts import LANES

CACHE_LINE = 64  # bytes
LARGEST_HALF = 65504.0

BYTE, HALF, FLOAT, INT32, INT64 = ir.IntType(8), ir.HalfType(), ir.FloatType(), ir.IntType(32), ir.IntType(64)
BYTES, FLOATS = BYTE.as_pointer(), FLOAT.as_pointer()
VECTOR, INTEGERS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT32, LANES)


@intrinsic
def copy_row(_typing, target, source, head_dim):
    """Copies target[:head_dim] = source, each of float32 or halves; halves have the type uint16.

    Halves are rounded to nearest, ties to even. A value too large for a half becomes the largest half, because an
    infinite key would make its row's softmax NaN.
    """

    def emit(context, builder, signature, arguments):
        target, source = (of() for of in getters(context, builder, signature, arguments, 2))
        head_dim = arguments[2]
        to, of = (HALF if row.dtype == numba.uint16 else FLOAT for row in signature.args[:2])

        def copy(d, num_lanes):
            kinds = [kind if num_lanes == 1 else ir.VectorType(kind, num_lanes) for kind in (to, of)]
            values = load(builder, source, d, kinds[1])
            if of == HALF and to == FLOAT:
                values = builder.fpext(values, kinds[0])
            elif of == FLOAT and to == HALF:
                values = builder.fptrunc(clamp(builder, values, LARGEST_HALF), kinds[0])
            store(builder, values, target, d)

        vectors_end = builder.and_(head_dim, INT64(-LANES))
        with cgutils.for_range_slice(builder, INT64(0), vectors_end, INT64(LANES), INT64) as (d, _):
            copy(d, LANES)
        with cgutils.for_range_slice(builder, vectors_end, head_dim, INT64(1), INT64) as (d, _):
            copy(d, 1)
        return context.get_dummy_value()

    return numba.void(target, source, numba.intp), emit


@intrinsic
def exp2(_typing, x):
    """Returns 2^x; see power_of_2."""

    def emit(_context, builder, _signature, arguments):
        return power_of_2(builder, arguments[0])

    return numba.float32(x), emit


def power_of_2(builder, x):
    """Returns 2^x of a float or vector, with x clamped to [-126, 126]: beyond it no result matters beside a 1.

    2^x = 2^n * 2^f with n = round(x) and |f| <= 1/2. The polynomial of degree 5 has the least relative error on that
    range, 7.5e-8, or 2.2e-7 with float32's roundings. NaN stays NaN.
    """

    def constant(number):
        return FLOAT(number) if x.type == FLOAT else VECTOR([number] * LANES)

    integer = INT32 if x.type == FLOAT else INTEGERS
    name = "llvm.rint.f32" if x.type == FLOAT else f"llvm.rint.v{LANES}f32"
    rint = cgutils.get_or_insert_function(builder.module, ir.FunctionType(x.type, [x.type]), name)
    x = clamp(builder, x, 126.0)
    n = builder.call(rint, [x])
    f = builder.fsub(x, n)
    power = constant(1.3276472e-3)
    for coefficient in (9.6755414e-3, 5.5507133e-2, 2.4022120e-1, 6.9314697e-1, 1.0000001):
        power = multiply_add(builder, power, f, constant(coefficient))
    bias, place = (integer(number if x.type == FLOAT else [number] * LANES) for number in (127, 23))
    scale = builder.shl(builder.add(builder.fptosi(n, integer), bias), place)
    return builder.fmul(power, builder.bitcast(scale, x.type))


def prefetch_line(builder, address):
    """Prefetches the cache line that holds this byte."""
    ask = builder.module.declare_intrinsic(
        "llvm.prefetch", [BYTES], ir.FunctionType(ir.VoidType(), [BYTES, INT32, INT32, INT32])
    )
    to_read, to_nearest_cache, of_data = INT32(0), INT32(3), INT32(1)
    builder.call(ask, [address, to_read, to_nearest_cache, of_data])


def getters(context, builder, signature, arguments, count, first=0):
    """Returns a function for each of `count` array arguments: from a row's index, None for row 0, to the row's address.
    A pointer to halves has their type."""

    def getter(kind, argument):
        array = context.make_array(kind)(context, builder, argument)
        length = cgutils.unpack_tuple(builder, array.shape)[-1]
        start = builder.bitcast(array.data, HALF.as_pointer()) if kind.dtype == numba.uint16 else array.data
        return lambda row=None: start if row is None else builder.gep(start, [builder.mul(row, length)])

    return map(getter, signature.args[first : first + count], arguments[first : first + count])


def multiply_add(builder, a, b, c):
    """Returns a * b + c, fused if the CPU can; c is never the fused product."""
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


def clamp(builder, values, most):
    """Clamps values to [-most, most]; NaN stays NaN."""
    for bound, is_beyond in ((most, ">"), (-most, "<")):
        limit = FLOAT(bound) if values.type == FLOAT else splat(builder, FLOAT(bound), values.type.count)
        values = builder.select(builder.fcmp_ordered(is_beyond, values, limit), limit, values)
    return values


def fold(builder, values, join=lambda builder, a, b: builder.fadd(a, b)):
    """Joins a vector's halves, by default adds them, until one number [1] is left."""
    while (half := values.type.count // 2) > 0:
        values = join(builder, *(pick(builder, values, values, range(i, i + half)) for i in (0, half)))
    return values


def pick(builder, a, b, lanes):
    """Returns these lanes of a and b, those of b counted behind a's."""
    return builder.shuffle_vector(a, b, ir.VectorType(INT32, len(lanes))(list(lanes)))


def splat(builder, value, num_lanes):
    vector = builder.insert_element(ir.VectorType(value.type, num_lanes)(ir.Undefined), value, INT32(0))
    return pick(builder, vector, vector, [0] * num_lanes)


def load(builder, row, offset, kind):
    address = builder.bitcast(builder.gep(row, [offset]), kind.as_pointer())
    return builder.load(address, align=alignment(kind))


def store(builder, value, row, offset):
    address = builder.bitcast(builder.gep(row, [offset]), value.type.as_pointer())
    builder.store(value, address, align=alignment(value.type))


def alignment(kind):
    """Returns the alignment in bytes of a single number: rows may begin at any number."""
    element = kind.element if isinstance(kind, ir.VectorType) else kind
    return 2 if element == HALF else 4
