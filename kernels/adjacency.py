"""Adjacency rows: the target's own top-k after a token, and after a pair of tokens.

Token Recycling (2408.08696) keeps one row a token and overwrites it; here rows keep probabilities and blend, and a
second table holds a row for every recent pair of tokens. A row is `WIDTH` (token, probability) entries, most probable
first, probabilities as 16-bit fixed point; an unused entry has token -1.

    token_ids   int32  [vocab_size, WIDTH]      token_probs uint16 [vocab_size, WIDTH]
    pair_keys   int64  [num_slots]              (first << 32 | second) + 1, 0 = free
    pair_stamps int32  [num_slots]              when the row was last written
    pair_ids    int32  [num_slots, WIDTH]       pair_probs  uint16 [num_slots, WIDTH]

A pair may lie in any of the `WAYS` slots of its bucket and displaces the row written longest ago, so memory is bounded
and the outcome depends only on the order of the updates.
"""

import numpy as np

from retrodraft.kernels.jit import borrowing_njit

WIDTH = 8
WAYS = 8
ONE = 65535.0  # fixed-point 1.0


@borrowing_njit
def pair_bucket(first, second, num_slots):
    """First slot of the bucket of a pair."""
    mixed = np.uint64(first) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(second) * np.uint64(0xC2B2AE3D27D4EB4F)
    mixed ^= mixed >> np.uint64(31)
    return np.int64(mixed % np.uint64(num_slots // WAYS)) * WAYS


@borrowing_njit
def find_pair(pair_keys, first, second):
    """Slot of the row of a pair, or -1."""
    key = (np.int64(first) << 32 | np.int64(second)) + 1
    start = pair_bucket(first, second, pair_keys.shape[0])
    for slot in range(start, start + WAYS):
        if pair_keys[slot] == key:
            return slot
    return -1


@borrowing_njit
def claim_pair(pair_keys, pair_stamps, pair_ids, first, second, now):
    """Slot of the row of a pair, made empty from the bucket's oldest one where the pair has none yet."""
    slot = find_pair(pair_keys, first, second)
    if slot < 0:
        start = pair_bucket(first, second, pair_keys.shape[0])
        slot = start
        for other in range(start, start + WAYS):
            if pair_keys[other] == 0:
                slot = other
                break
            if pair_stamps[other] < pair_stamps[slot]:
                slot = other
        pair_keys[slot] = (np.int64(first) << 32 | np.int64(second)) + 1
        pair_ids[slot, :] = -1
    pair_stamps[slot] = now
    return slot


@borrowing_njit
def blend(row_ids, row_probs, top_ids, top_probs, rate, ids, probs):
    """Move a row towards new top-k probabilities: (1 - rate) * old + rate * new over the union; the best WIDTH stay.

    `ids` int32 and `probs` float32 [2 * WIDTH] are room for the union, which is kept in falling order.
    """
    size = 0
    if row_ids[0] < 0:
        rate = 1.0
    elif rate < 1.0:
        while size < WIDTH and row_ids[size] >= 0:
            ids[size] = row_ids[size]
            probs[size] = (1.0 - rate) * row_probs[size] / ONE
            size += 1
    num_old = size
    for i in range(min(WIDTH, top_ids.shape[0])):
        token = top_ids[i]
        prob = np.float32(rate * top_probs[i])
        place = size
        if num_old > 0:
            for j in range(size):
                if ids[j] == token:
                    place = j
                    prob += probs[j]
                    break
        if place == size:
            size += 1
        while place > 0 and prob > probs[place - 1]:
            ids[place] = ids[place - 1]
            probs[place] = probs[place - 1]
            place -= 1
        ids[place] = token
        probs[place] = prob
    for i in range(WIDTH):
        row_ids[i] = ids[i] if i < size else -1
        if i < size:
            row_probs[i] = np.uint16(min(ONE, probs[i] * ONE))
