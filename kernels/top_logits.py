"""The most probable next tokens of many positions, read from their logits in two passes."""

import math

import numpy as np

from retrodraft.kernels.jit import njit, reordering_njit

BLOCK = 64  # logits that are looked at one by one only if the largest of them is large enough
SQUARINGS = 12
STEPS = np.float32(1 << SQUARINGS)
LOWEST = np.float32(-80.0)  # below the largest logit; what lies deeper has no weight


@reordering_njit
def _block_max(row, start, end):
    top = row[start]
    for i in range(start, end):
        top = max(top, row[i])
    return top


@reordering_njit
def _sum_exp(row, top):
    """Sum of exp(row - top), within 1 %: (1 + x / n) ** n by squaring, which compiles to vector instructions."""
    total = np.float32(0.0)
    for i in range(row.shape[0]):
        x = max(row[i] - top, LOWEST)
        y = max(np.float32(1.0) + x / STEPS, np.float32(0.0))
        for _ in range(SQUARINGS):
            y *= y
        total += y
    return total


@njit
def _widen(bits, out):
    """float32 values of bfloat16 `bits` (int16): the upper half of a float32's bits."""
    wide = out.view(np.uint32)
    for i in range(bits.shape[0]):
        wide[i] = np.uint32(np.uint16(bits[i])) << np.uint32(16)


@njit
def _top_of_row(row, ids, probs):
    vocab_size = row.shape[0]
    k = ids.shape[0]
    size = 0
    for start in range(0, vocab_size, BLOCK):
        end = min(start + BLOCK, vocab_size)
        if size == k and not _block_max(row, start, end) > probs[k - 1]:
            continue
        for i in range(start, end):
            value = row[i]
            if size == k and not value > probs[k - 1]:
                continue
            place = size if size < k else k - 1
            while place > 0 and value > probs[place - 1]:
                probs[place] = probs[place - 1]
                ids[place] = ids[place - 1]
                place -= 1
            probs[place] = value
            ids[place] = i
            size = min(size + 1, k)
    top = probs[0]
    total = _sum_exp(row, top)
    for rank in range(k):
        probs[rank] = math.exp(probs[rank] - top) / total


@njit
def top_logits(logits, out_ids, out_probs):
    """Fill `out_ids` int32, `out_probs` float32 [num_positions, k] from `logits` float32 [num_positions, vocab_size].

    Most probable first; probabilities are a softmax over the whole vocabulary. Equal logits: the lower id first.
    """
    for position in range(logits.shape[0]):
        _top_of_row(logits[position], out_ids[position], out_probs[position])


@njit
def top_bfloat16_logits(bits, out_ids, out_probs):
    """`top_logits` of bfloat16 logits, given by their bits: int16 [num_positions, vocab_size]."""
    row = np.empty(bits.shape[1], np.float32)
    for position in range(bits.shape[0]):
        _widen(bits[position], row)
        _top_of_row(row, out_ids[position], out_probs[position])
