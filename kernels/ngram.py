"""Bounded hash table from the last 1 to 8 tokens to their most frequent followers, with counts.

A context of m tokens is known by a 64-bit hash alone: two contexts that share one would only make a draft worse. Counts
are kept on WIDTH followers; a new one takes a free place, else it takes one off the smallest count, and its place once
that is zero (Misra, Gries 1982), so what is frequent stays. Where the table is full, all counts are halved and contexts
without any are dropped: old evidence fades, and memory never grows.

Flat arrays, owned by `retrodraft.index.ngram`; the number of slots is a power of two:

    hashes    uint64 [slots]          0 = empty; open addressing
    followers int32  [slots, width]   -1 = no follower
    counts    uint16 [slots, width]
    meta      int64  [1]              occupied slots
"""

import numpy as np

from retrodraft.kernels.jit import njit

MAX_ORDER = 8
MAX_COUNT = 65535


@njit
def _extended(value, token):
    """Hash of a context with one more token before it."""
    mixed = (value ^ np.uint64(token + 1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    return (mixed ^ (mixed >> np.uint64(29))) | np.uint64(1)


@njit
def _slot(hashes, value):
    """The slot that holds `value`, or the empty one where it belongs. O(1) expected."""
    mask = np.uint64(hashes.shape[0] - 1)
    slot = (value >> np.uint64(1)) & mask
    while hashes[slot] != 0 and hashes[slot] != value:
        slot = (slot + np.uint64(1)) & mask
    return np.int64(slot)


@njit
def _count(followers, counts, token, number):
    """Add `number` sightings of `token` to one context's row."""
    smallest = 0
    for i in range(followers.shape[0]):
        if followers[i] == token:
            if counts[i] > MAX_COUNT - number:
                for j in range(counts.shape[0]):  # their proportions stay
                    counts[j] >>= 1
                number = min(number, MAX_COUNT // 2)
            counts[i] += number
            return
        if followers[i] < 0:
            followers[i] = token
            counts[i] = min(number, MAX_COUNT)
            return
        if counts[i] < counts[smallest]:
            smallest = i
    if counts[smallest] > number:
        counts[smallest] -= number
    else:
        followers[smallest] = token
        counts[smallest] = max(number - counts[smallest], 1)


@njit
def halve(hashes, followers, counts, meta):
    """Halve all counts; drop followers and contexts that reach zero. O(slots)."""
    old_hashes, old_followers, old_counts = hashes.copy(), followers.copy(), counts.copy()
    hashes[:] = 0
    followers[:] = -1
    counts[:] = 0
    meta[0] = 0
    for i in range(old_hashes.shape[0]):
        if old_hashes[i] == 0:
            continue
        slot = -1
        place = 0
        for j in range(old_counts.shape[1]):
            number = old_counts[i, j] >> 1
            if number > 0:
                if slot < 0:
                    slot = _slot(hashes, old_hashes[i])
                    hashes[slot] = old_hashes[i]
                    meta[0] += 1
                followers[slot, place] = old_followers[i, j]
                counts[slot, place] = number
                place += 1


@njit
def _record(hashes, followers, counts, meta, value, token, number):
    """Add `number` sightings of `token` after the context with hash `value`, ageing the table if it is full."""
    slot = _slot(hashes, value)
    if hashes[slot] == 0:
        while 4 * (meta[0] + 1) > 3 * hashes.shape[0]:
            halve(hashes, followers, counts, meta)
        slot = _slot(hashes, value)
        hashes[slot] = value
        meta[0] += 1
    _count(followers[slot], counts[slot], token, number)


@njit
def add(hashes, followers, counts, meta, tokens, start, max_order):
    """Learn what followed each context of up to `max_order` tokens: `tokens[start:]`, given all before. O(1) a token.

    Negative tokens are borders: they follow nothing and no context reaches over them.
    """
    for i in range(max(start, 1), tokens.shape[0]):
        if tokens[i] < 0:
            continue
        value = np.uint64(0)
        for j in range(i - 1, max(i - 1 - max_order, -1), -1):
            if tokens[j] < 0:
                break
            value = _extended(value, tokens[j])
            _record(hashes, followers, counts, meta, value, tokens[i], 1)


@njit
def merge(hashes, followers, counts, meta, other_hashes, other_followers, other_counts):
    """Add another table's counts, rows [n] or slots, to this one's. O(its size)."""
    for i in range(other_hashes.shape[0]):
        if other_hashes[i] == 0:
            continue
        for j in range(other_followers.shape[1]):
            if other_followers[i, j] >= 0 and other_counts[i, j] > 0:
                number = np.int64(other_counts[i, j])
                _record(hashes, followers, counts, meta, other_hashes[i], other_followers[i, j], number)


@njit
def ngram_candidates(hashes, followers, counts, context, size, max_order, out_tokens, out_counts):
    """Likely next tokens after the context's first `size` entries: (order, sum of counts, number of tokens written).

    The order is the longest known one. `out_tokens` and `out_counts` int32 [k] are filled in falling order of count.
    """
    value = np.uint64(0)
    best = -1
    order = 0
    for j in range(min(size, max_order)):
        token = context[size - 1 - j]
        if token < 0:
            break
        value = _extended(value, token)
        slot = _slot(hashes, value)
        if hashes[slot] == 0:
            break  # longer contexts are rarer still
        best = slot
        order = j + 1
    if best < 0:
        return 0, 0, 0
    total = 0
    found = 0
    for i in range(followers.shape[1]):
        number = np.int32(counts[best, i])
        if followers[best, i] < 0 or number == 0:
            continue
        total += number
        place = found
        while place > 0 and out_counts[place - 1] < number:
            place -= 1
        if place >= out_tokens.shape[0]:
            continue
        found = min(found + 1, out_tokens.shape[0])
        for j in range(found - 1, place, -1):
            out_tokens[j] = out_tokens[j - 1]
            out_counts[j] = out_counts[j - 1]
        out_tokens[place] = followers[best, i]
        out_counts[place] = number
    return order, total, found
