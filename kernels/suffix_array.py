"""Longest match of a context in a corpus, its shorter orders, and what followed them.

`order` lists every position of the corpus, sorted by the text that *ends* there, read backwards: the suffix array of
the reversed corpus. All places where a context's last m tokens occur are therefore neighbours, for every m, around the
one index at which the whole context belongs. One binary search finds it; the neighbours there share the longest match;
shorter matches are wider intervals around the same index (a forward array needs a search for each length).

Flat arrays, memory-mapped by the owner (`retrodraft.index.corpus`):

    tokens int32 [n]                  the corpus; -1 ends a document, and a context never holds it
    order  int32 [n]                  positions of last tokens, in backward order
    keys   int64 [ceil(n / STRIDE)]   the last three tokens of every STRIDE-th entry of `order`, packed: the search
                                      begins in this small table and reads the corpus only where three tokens agree

A context is the first `size` entries of an int32 array, newest last. Whatever a damaged file holds, nothing outside the
arrays is read.
"""

import numpy as np

from retrodraft.kernels.jit import njit

STRIDE = 16
TOKEN_BITS = 21  # of one token in a key: vocabularies up to 2,097,150
MAX_TOKEN = (1 << TOKEN_BITS) - 2
MAX_MATCH = 64  # longest match that is looked for
MAX_SAMPLES = 64  # occurrences of an interval that are counted


@njit
def reverse(values):
    """Reverse an array in place."""
    n = values.shape[0]
    for i in range(n // 2):
        values[i], values[n - 1 - i] = values[n - 1 - i], values[i]


@njit
def complement(order):
    """Turn positions of the reversed corpus into positions of the corpus, in place."""
    for i in range(order.shape[0]):
        order[i] = order.shape[0] - 1 - order[i]


@njit
def pack_keys(tokens, order, keys):
    """Fill `keys` from the other two arrays."""
    for i in range(keys.shape[0]):
        position = order[i * STRIDE]
        key = np.int64(0)
        for j in range(3):
            token = tokens[position - j] if position >= j else -1
            key = key << TOKEN_BITS | np.int64(token + 1)
        keys[i] = key


@njit
def common(tokens, position, context, size, limit):
    """How many tokens before and at `position` are the context's last ones, counted up to `limit`."""
    if position < 0 or position >= tokens.shape[0]:
        return 0
    limit = min(limit, min(size, position + 1))
    for i in range(limit):
        if tokens[position - i] != context[size - 1 - i]:
            return i
    return limit


@njit
def _precedes(tokens, position, context, size, length, ties):
    """Whether the text ending at `position` sorts before the context's last `length` tokens; `ties`: or starts so."""
    if position < 0 or position >= tokens.shape[0]:
        return True
    for i in range(length):
        if i > position:
            return True
        token = tokens[position - i]
        wanted = context[size - 1 - i]
        if token != wanted:
            return token < wanted
    return ties


@njit
def _key_range(keys, context, size, length, num_entries):
    """Entries between which the last `length` tokens, at most three of which are looked at, begin and end.

    Returns (low, high): all entries before `low` sort before these tokens, all from `high` on behind them.
    """
    shift = TOKEN_BITS * (3 - min(length, 3))
    wanted = np.int64(0)
    for i in range(min(length, 3)):
        wanted = wanted << TOKEN_BITS | np.int64(context[size - 1 - i] + 1)
    low = 0
    high = keys.shape[0]
    while low < high:
        middle = (low + high) >> 1
        if keys[middle] >> shift < wanted:
            low = middle + 1
        else:
            high = middle
    first = low
    high = keys.shape[0]
    step = 1
    while low < high:  # mostly near: gallop
        middle = min(low + step, high) - 1
        if keys[middle] >> shift > wanted:
            high = middle
            break
        low = middle + 1
        step *= 2
    while low < high:
        middle = (low + high) >> 1
        if keys[middle] >> shift > wanted:
            high = middle
        else:
            low = middle + 1
    return max(first - 1, 0) * STRIDE, min(low * STRIDE, num_entries)


@njit
def _bound(tokens, order, context, size, length, low, high, ties):
    """First entry in [low, high] that does not precede the context's last `length` tokens. O(log(high - low))."""
    while low < high:
        middle = (low + high) >> 1
        if _precedes(tokens, order[middle], context, size, length, ties):
            low = middle + 1
        else:
            high = middle
    return low


@njit
def find(tokens, order, keys, context, size, length):
    """Interval (left, right) of `order` where the context's last `length` tokens occur; empty where they don't."""
    low, high = _key_range(keys, context, size, length, order.shape[0])
    left = _bound(tokens, order, context, size, length, low, high, False)
    return left, _bound(tokens, order, context, size, length, left, high, True)


@njit
def longest_match(tokens, order, keys, context, size):
    """Length of the longest suffix of the context that occurs, and its interval: (length, left, right).

    At most MAX_MATCH tokens, none before a negative one; length 0 comes with the whole array. O(log n).
    """
    num_entries = order.shape[0]
    limit = 0
    while limit < min(size, MAX_MATCH) and 0 <= context[size - 1 - limit] <= MAX_TOKEN:
        limit += 1
    if limit == 0 or num_entries == 0:
        return 0, 0, num_entries
    low, high = _key_range(keys, context, size, limit, num_entries)
    place = _bound(tokens, order, context, size, limit, low, high, False)
    length = 0
    if place > 0:
        length = common(tokens, order[place - 1], context, size, limit)
    if place < num_entries:
        length = max(length, common(tokens, order[place], context, size, limit))
    left, right = _around(tokens, order, keys, context, size, length, place, place)
    return length, left, right


@njit
def widen(tokens, order, keys, context, size, left, right):
    """The longest shorter match that occurs more often than the match of [left, right): (length, left, right)."""
    length = 0
    if left > 0:
        length = common(tokens, order[left - 1], context, size, MAX_MATCH)
    if right < order.shape[0]:
        length = max(length, common(tokens, order[right], context, size, MAX_MATCH))
    left, right = _around(tokens, order, keys, context, size, length, left, right)
    return length, left, right


@njit
def _around(tokens, order, keys, context, size, length, left, right):
    """The interval of the last `length` tokens, which lies around [left, right]."""
    num_entries = order.shape[0]
    if length == 0:
        return 0, num_entries
    if length <= 3:  # wide, but the keys decide all but the border blocks
        low, high = _key_range(keys, context, size, length, num_entries)
        left = _bound(tokens, order, context, size, length, low, min(left, low + STRIDE), False)
        return left, _bound(tokens, order, context, size, length, max(right, high - STRIDE), high, True)
    step = 1
    low = left
    while low > 0 and common(tokens, order[max(left - step, 0)], context, size, length) == length:
        low = max(left - step, 0)
        step *= 2
    left = _bound(tokens, order, context, size, length, max(left - step, 0), low, False)
    step = 1
    high = right
    while (
        high < num_entries
        and common(tokens, order[min(right + step, num_entries) - 1], context, size, length) == length
    ):
        high = min(right + step, num_entries)
        step *= 2
    return left, _bound(tokens, order, context, size, length, high, min(right + step, num_entries), True)


@njit
def continuations(tokens, order, left, right, out_tokens, out_counts):
    """The tokens that most often follow the occurrences [left, right), with counts; returns how many.

    `out_tokens` and `out_counts` int32 [k] are filled in falling order of count. Counts are exact up to MAX_SAMPLES
    occurrences; of more, that many evenly spread ones are counted, and the counts scaled up.
    """
    total = right - left
    samples = min(total, MAX_SAMPLES)
    seen = np.empty(MAX_SAMPLES, np.int32)
    counts = np.zeros(MAX_SAMPLES, np.int32)
    num_seen = 0
    for i in range(samples):
        # The middle of each of `samples` equal parts.
        place = left + i if total == samples else left + (2 * i + 1) * total // (2 * samples)
        following = order[place] + 1
        token = tokens[following] if 0 <= following < tokens.shape[0] else -1
        if token < 0:
            continue
        j = 0
        while j < num_seen and seen[j] != token:
            j += 1
        if j == num_seen:
            seen[j] = token
            num_seen += 1
        counts[j] += 1
    found = min(num_seen, out_tokens.shape[0])
    for i in range(found):
        best = 0
        for j in range(1, num_seen):
            if counts[j] > counts[best]:
                best = j
        out_tokens[i] = seen[best]
        out_counts[i] = counts[best] * total // samples
        counts[best] = 0
    return found


@njit
def corpus_candidates(tokens, order, keys, context, size, out_tokens, out_counts):
    """Likely next tokens after the context: (match length, occurrences of the match, number of tokens written).

    The match is the longest one that something follows. `out_tokens` and `out_counts` are as in `continuations`.
    """
    length, left, right = longest_match(tokens, order, keys, context, size)
    while length > 0:
        found = continuations(tokens, order, left, right, out_tokens, out_counts)
        if found > 0:
            return length, right - left, found
        shorter, left, right = widen(tokens, order, keys, context, size, left, right)
        length = shorter if shorter < length else 0  # not shorter: `order` is damaged
    return 0, 0, 0
