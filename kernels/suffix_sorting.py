"""Suffix array construction by induced sorting, linear in time and without recursion (SA-IS; Nong, Zhang, Chan 2009).

A position is S where its suffix is smaller than the next one's, else L; an S position behind an L one is LMS. Sorting
the LMS suffixes suffices, since two sweeps over the array induce the order of all others. Their order follows from the
order of the LMS substrings, which the same two sweeps give, and from the suffix array of the text of their names, at
most half as long; so levels shrink, and the loop descends until all names differ. A smallest token is thought behind
the end of the text.

Texts are int32 with tokens >= -1. All levels live in the one output array, and the tables of counts are at most as
large as half of it, so a text of n tokens needs 4 n bytes for the array and at most 4 n more for a while.

A sweep reads the text at random places, so the entries a few steps ahead are fetched into the cache in time: a quarter
off the running time on 20 million tokens.
"""

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from retrodraft.kernels.jit import njit

AHEAD = 32  # entries between a fetch and its use

if numba.config.DISABLE_JIT:

    def prefetch(array, index):
        """Plain Python has nothing to fetch."""

else:

    @intrinsic
    def prefetch(_context, array, index):
        """Ask the processor to load the cache line of `array[index]`; any index is allowed."""

        def generate(context, builder, signature, arguments):
            view = context.make_array(signature.args[0])(context, builder, arguments[0])
            byte = ir.IntType(8).as_pointer()
            word = ir.IntType(32)
            address = builder.bitcast(builder.gep(view.data, [arguments[1]]), byte)
            function = builder.module.declare_intrinsic(
                "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, word, word, word])
            )
            builder.call(function, [address, word(0), word(3), word(1)])
            return context.get_dummy_value()

        return types.void(array, types.int64), generate


@njit
def suffix_array(text, out):
    """Write the starts of all suffixes of `text` int32 [n] into `out` int32 [n], in ascending order. O(n)."""
    sizes = np.zeros(33, np.int64)  # of the level's texts; each is at most half of the one before
    unique = False
    level = 0
    sizes[0] = text.shape[0]
    while not unique:
        unique, num_lms = _reduce(_text(text, out, sizes, level), out[: sizes[level]])
        level += 1
        sizes[level] = num_lms
    for upper in range(level - 1, -1, -1):
        _expand(_text(text, out, sizes, upper), out[: sizes[upper]], sizes[upper + 1], upper == level - 1)


@njit
def _text(text, out, sizes, level):
    """The text of a level: names of the level above it, kept at the end of that level's array."""
    return text if level == 0 else out[sizes[level - 1] - sizes[level] : sizes[level - 1]]


@njit
def _counts(text):
    """How often each token occurs, at its index plus one."""
    largest = np.int32(0)
    for i in range(text.shape[0]):
        largest = max(largest, text[i])
    counts = np.zeros(largest + 2, np.int32)
    for i in range(text.shape[0]):
        counts[text[i] + 1] += 1
    return counts


@njit
def _to_ends(table):
    """Turn counts into the ends of the tokens' buckets."""
    total = np.int32(0)
    for i in range(table.shape[0]):
        total += table[i]
        table[i] = total


@njit
def _to_starts(table):
    """Turn counts into the starts of the tokens' buckets."""
    total = np.int32(0)
    for i in range(table.shape[0]):
        count = table[i]
        table[i] = total
        total += count


@njit
def _reduce(text, array):
    """Sort the LMS substrings and name them.

    Returns whether all names differ, and the number of LMS positions. Where they differ, `array[:number]` holds the
    LMS positions in the order of their suffixes; else the names, in the order of the text, are at the array's end.
    """
    n = text.shape[0]
    if n < 2:
        return True, 0
    array[:] = 0
    table = _counts(text)
    _to_ends(table)
    num_lms = 0
    smaller = False  # whether position i + 1 is S
    for i in range(n - 2, -1, -1):
        if text[i] < text[i + 1]:
            smaller = True
        elif text[i] > text[i + 1]:
            if smaller:
                num_lms += 1
                table[text[i + 1] + 1] -= 1
                array[table[text[i + 1] + 1]] = i + 1
            smaller = False
    if num_lms == 0:
        return True, 0
    if num_lms > 1:
        table = _counts(text)
        _to_starts(table)
        _sweep_l(text, array, table, False)
        table = _counts(text)
        _to_ends(table)
        _sweep_s(text, array, table, False)
        found = 0
        for i in range(n):
            if array[i] < 0:
                array[found] = ~array[i]
                found += 1
    else:
        for i in range(n):
            if array[i] > 0:
                array[0] = array[i]
    return _name(text, array, num_lms), num_lms


@njit
def _sweep_l(text, array, table, final):
    """Induce L from LMS, by substrings or (`final`) suffixes; a negative entry (`~position`) waits for `_sweep_s`.

    Afterwards only the L positions behind an S one are positive; of the others, substrings leave nothing and suffixes
    `~position`.
    """
    n = text.shape[0]
    last = n - 1  # induced by the end of the text
    slot = table[text[last] + 1]
    table[text[last] + 1] += 1
    array[slot] = ~last if text[last - 1] < text[last] else last
    for i in range(n):
        if i + 2 * AHEAD < n:
            prefetch(text, np.int64(array[i + 2 * AHEAD]) - 1)
            ahead = array[i + AHEAD]
            if ahead > 0:
                prefetch(array, np.int64(table[text[ahead - 1] + 1]))
        position = array[i]
        array[i] = ~position if final or position < 0 else 0
        if position > 0:
            position -= 1
            token = text[position]
            slot = table[token + 1]
            table[token + 1] = slot + 1
            if position > 0 and text[position - 1] < token:
                position = ~position
            array[slot] = position


@njit
def _sweep_s(text, array, table, final):
    """Induce S from L, by substrings or (`final`) suffixes.

    Afterwards substrings leave only the LMS positions, as `~position`; of suffixes every entry is a position.
    """
    n = text.shape[0]
    for i in range(n - 1, -1, -1):
        if i >= 2 * AHEAD:
            prefetch(text, np.int64(array[i - 2 * AHEAD]) - 1)
            ahead = array[i - AHEAD]
            if ahead > 0:
                prefetch(array, np.int64(table[text[ahead - 1] + 1]) - 1)
        position = array[i]
        if position > 0:
            if not final:
                array[i] = 0
            position -= 1
            token = text[position]
            slot = table[token + 1] - 1
            table[token + 1] = slot
            if text[position - 1] > token if position > 0 else final:
                position = ~position
            array[slot] = position
        elif final:
            array[i] = ~position


@njit
def _name(text, array, num_lms):
    """Number the sorted LMS substrings `array[:num_lms]`, equal ones alike; whether all differ.

    Unless they do, the names in the order of the text are written to the array's end.
    """
    n = text.shape[0]
    # LMS positions are two or more apart, so half of a position addresses a slot of its own behind the sorted ones.
    array[num_lms:] = 0
    end = n  # of the LMS substring that begins at i + 1, inclusive
    smaller = False
    for i in range(n - 2, -1, -1):
        if text[i] < text[i + 1]:
            smaller = True
        elif text[i] > text[i + 1]:
            if smaller:
                array[num_lms + ((i + 1) >> 1)] = end - i
                end = i + 1
            smaller = False
    name = 0
    previous = 0
    previous_length = 0
    for i in range(num_lms):
        if i + AHEAD < num_lms:
            prefetch(text, np.int64(array[i + AHEAD]))
            prefetch(array, np.int64(num_lms + (array[i + AHEAD] >> 1)))
        position = array[i]
        length = array[num_lms + (position >> 1)]
        same = length == previous_length and position + length <= n and previous + length <= n
        if same:
            for j in range(length):
                if text[position + j] != text[previous + j]:
                    same = False
                    break
        if not same:
            name += 1
            previous = position
            previous_length = length
        array[num_lms + (position >> 1)] = name
    if name == num_lms:
        return True
    slot = n - 1
    for i in range(num_lms + ((n - 1) >> 1), num_lms - 1, -1):
        if array[i] > 0:
            array[slot] = array[i] - 1
            slot -= 1
    return False


@njit
def _expand(text, array, num_lms, sorted_positions):
    """Order all suffixes, from the LMS ones in `array[:num_lms]`: as positions, or as numbers in the text's order."""
    n = text.shape[0]
    if n < 2:
        array[:] = 0
        return
    if not sorted_positions:
        slot = n - 1
        smaller = False
        for i in range(n - 2, -1, -1):
            if text[i] < text[i + 1]:
                smaller = True
            elif text[i] > text[i + 1]:
                if smaller:
                    array[slot] = i + 1
                    slot -= 1
                smaller = False
        for i in range(num_lms):
            array[i] = array[n - num_lms + array[i]]
    array[num_lms:] = 0
    table = _counts(text)
    _to_ends(table)
    for i in range(num_lms - 1, -1, -1):
        if i >= 2 * AHEAD:
            prefetch(text, np.int64(array[i - 2 * AHEAD]))
        position = array[i]
        array[i] = 0
        table[text[position] + 1] -= 1
        array[table[text[position] + 1]] = position
    table = _counts(text)
    _to_starts(table)
    _sweep_l(text, array, table, True)
    table = _counts(text)
    _to_ends(table)
    _sweep_s(text, array, table, True)
