"""`x @ weight.T` for the few rows of a draft tree, as fast as the weight can be read.

Matrix libraries bring the weight into a layout of their own before they multiply, which pays for many rows. Here a tile
of TILE_ROWS rows of the weight meets up to MOST_ROWS rows of x: their sums stay in vector registers, and the next
tile's weights are fetched meanwhile, since a processor does not follow streams as short as these rows by itself. So
several rows cost little more than one.

    weight float32, or bfloat16 as uint16 [out_features, in_features]
    x      float32, or as the weight where TAKES_BFLOAT16 [rows, in_features]         out float32 [rows, out_features]

`in_features` is a multiple of STEP and `out_features` at least TILE_ROWS. Products and sums are float32.
"""

import ctypes
from functools import cache

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, codegen
from numba.extending import intrinsic

from retrodraft.kernels.jit import borrowing_njit, callback, njit
from retrodraft.kernels.openmp import in_parallel

TILE_ROWS = 4
SHARES = 4  # of the work for each thread: none waits long for a slow one
NEXT, WEIGHT, X, OUT, ROWS, IN_FEATURES, OUT_FEATURES, SHARE, NUM_FIELDS = range(9)  # of a product under way


PROCESSOR = numba.config.CPU_NAME or llvmlite.binding.get_host_cpu_name()
_GIVEN = numba.config.CPU_FEATURES  # by the user; an empty text says that there are none
_FEATURES = frozenset((codegen.get_host_cpu_features() if _GIVEN is None else _GIVEN).split(","))


def _registers() -> tuple[int, int]:
    """Floats in a vector register, and rows of x whose sums fit into the registers; 0 lanes: not on this processor."""
    if numba.config.DISABLE_JIT:
        return 0, 0
    if "+avx512f" in _FEATURES:
        return 16, 6
    if {"+avx2", "+fma"} <= _FEATURES:
        return 8, 3
    return (4, 5) if "+neon" in _FEATURES else (0, 0)


LANES, MOST_ROWS = _registers()
TAKES_BFLOAT16 = LANES == 16 and "+avx512bf16" in _FEATURES
STEP = 2 * max(LANES, 1)  # elements that a row must be a multiple of

_INT, _LONG, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_BYTES = ir.IntType(8).as_pointer()
_INTS, _VECTOR = ir.VectorType(_INT, max(LANES, 1)), ir.VectorType(_FLOAT, max(LANES, 1))
if TAKES_BFLOAT16:
    llvmlite.binding.initialize_native_asmparser()


@intrinsic(prefer_literal=True)
def _tile(typing, weight, x, out, first, begin, rows):
    """`out[begin : begin + rows, first : first + TILE_ROWS]`, for a literal number of rows."""

    def generate(context, builder, signature, arguments):
        weight, x, out = (context.make_array(signature.args[i])(context, builder, arguments[i]) for i in range(3))
        first, begin = arguments[3:5]
        in_features, out_features = (builder.extract_value(array.shape, 1) for array in (weight, out))

        def rows_of(array, start, count, width):
            indices = [builder.add(start, _LONG(i)) for i in range(count)]
            return [builder.gep(array.data, [builder.mul(index, width)]) for index in indices]

        tile = rows_of(weight, first, TILE_ROWS, in_features)
        next_tile = rows_of(weight, builder.add(first, _LONG(TILE_ROWS)), TILE_ROWS, in_features)
        x_rows = rows_of(x, begin, rows.literal_value, in_features)
        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        sums = [[cgutils.alloca_once_value(builder, zero) for _ in tile] for _ in x_rows]
        for places in sums:
            for place in places:
                builder.store(zero, place)
        load, add_products, step = _load, _multiply_add, LANES
        if TAKES_BFLOAT16 and tile[0].type.pointee != _FLOAT:
            load, add_products, step = _load_pairs, _multiply_add_pairs, 2 * LANES
        with cgutils.for_range_slice(builder, _LONG(0), in_features, _LONG(step), intp=_LONG) as (column, _):
            for row in next_tile:
                _prefetch(builder, builder.gep(row, [column]))
            factors = [load(builder, builder.gep(row, [column])) for row in tile]
            for row, places in zip(x_rows, sums, strict=True):
                values = load(builder, builder.gep(row, [column]))
                for place, factor in zip(places, factors, strict=True):
                    builder.store(add_products(builder, factor, values, builder.load(place)), place)
        for row, places in zip(rows_of(out, begin, rows.literal_value, out_features), sums, strict=True):
            for i, place in enumerate(places):
                total = _call(builder, "llvm.vector.reduce.fadd", _FLOAT, _FLOAT(-0.0), builder.load(place))
                builder.store(total, builder.gep(row, [builder.add(first, _LONG(i))]))

    return types.void(weight, x, out, types.int64, types.int64, rows), generate


def _call(builder, name, returned, *values):
    """Call an intrinsic of LLVM on vectors; its sums may be added in any order."""
    kind = ir.FunctionType(returned, [value.type for value in values])
    function = cgutils.get_or_insert_function(builder.module, kind, f"{name}.v{LANES}f32")
    return builder.call(function, values, fastmath=("reassoc",))


def _prefetch(builder, address):
    """Fetch what lies there into the second-level cache, to be read; beyond the end of an array nothing happens."""
    kind = ir.FunctionType(ir.VoidType(), [_BYTES, _INT, _INT, _INT])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [builder.bitcast(address, _BYTES), _INT(0), _INT(2), _INT(1)])


def _load(builder, address):
    """LANES elements as floats; a bfloat16 is the upper half of a float's bits."""
    element = address.type.pointee
    values = builder.load(builder.bitcast(address, ir.VectorType(element, LANES).as_pointer()))
    values.align = 4 if element == _FLOAT else 2
    if element == _FLOAT:
        return values
    return builder.bitcast(builder.shl(builder.zext(values, _INTS), ir.Constant(_INTS, [16] * LANES)), _VECTOR)


def _multiply_add(builder, factors, values, sums):
    return _call(builder, "llvm.fma", _VECTOR, factors, values, sums)


def _load_pairs(builder, address):
    """2 * LANES bfloat16 elements as they are."""
    values = builder.load(builder.bitcast(address, _INTS.as_pointer()))
    values.align = 2
    return values


def _multiply_add_pairs(builder, factors, values, sums):
    """Add to each sum the products of two neighbours; LLVM's name for it changes from version to version."""
    kind = ir.FunctionType(_VECTOR, [_VECTOR, _INTS, _INTS])
    return builder.asm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v", [sums, factors, values], False)


@borrowing_njit
def tile_product(weight, x, out, first, last):
    """Columns `first` to `last` of `out`, and up to TILE_ROWS - 1 before or after them where tiles overlap."""
    out_features, rows = weight.shape[0], x.shape[0]
    passes = (rows + MOST_ROWS - 1) // MOST_ROWS
    for column in range(first, last, TILE_ROWS):
        column = min(column, out_features - TILE_ROWS)
        begin = 0
        for remaining in range(passes, 0, -1):
            count = (rows - begin + remaining - 1) // remaining
            if count == 1:
                _tile(weight, x, out, column, begin, 1)
            elif count == 2:
                _tile(weight, x, out, column, begin, 2)
            elif count == 3:
                _tile(weight, x, out, column, begin, 3)
            elif count == 4:
                _tile(weight, x, out, column, begin, 4)
            elif count == 5:
                _tile(weight, x, out, column, begin, 5)
            else:
                _tile(weight, x, out, column, begin, 6)
            begin += count


@intrinsic
def _pointer(typing, address):
    """The address as a pointer."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], _BYTES)

    return types.voidptr(types.int64), generate


@intrinsic
def _take(typing, counter, count):
    """Add to a counter that several threads share; returns what it was."""

    def generate(context, builder, signature, arguments):
        return builder.atomic_rmw("add", arguments[0], arguments[1], "monotonic")

    return types.int64(types.CPointer(types.int64), types.int64), generate


@njit
def _work(product, dtype):
    """Take shares of a product, int64 [NUM_FIELDS], until none is left; any number of threads may do so."""
    fields = numba.carray(product, NUM_FIELDS)
    rows, in_features, out_features = fields[ROWS], fields[IN_FEATURES], fields[OUT_FEATURES]
    weight = numba.carray(_pointer(fields[WEIGHT]), (out_features, in_features), dtype)
    x = numba.carray(_pointer(fields[X]), (rows, in_features), dtype if TAKES_BFLOAT16 else np.float32)
    out = numba.carray(_pointer(fields[OUT]), (rows, out_features), np.float32)
    first = _take(product, fields[SHARE])
    while first < out_features:
        tile_product(weight, x, out, first, min(first + fields[SHARE], out_features))
        first = _take(product, fields[SHARE])


def _work_float32(product):
    _work(product, np.float32)


def _work_bfloat16(product):
    _work(product, np.uint16)


@cache
def _worker(function):
    return callback(types.void(types.CPointer(types.int64)), function)


def run_product(
    weight: int, is_bfloat16: bool, x: int, out: int, rows: int, in_features: int, out_features: int, threads: int
) -> None:
    """`tile_product` over arrays that lie at these addresses, on so many of torch's threads. Lets other threads run."""
    share = max(-(-out_features // (threads * SHARES * TILE_ROWS)), 1) * TILE_ROWS if threads > 1 else out_features
    product = (ctypes.c_int64 * NUM_FIELDS)(0, weight, x, out, rows, in_features, out_features, share)
    worker = _worker(_work_bfloat16 if is_bfloat16 else _work_float32)
    if threads > 1:
        in_parallel(worker.address, product, threads)
    else:
        worker.ctypes(product)
