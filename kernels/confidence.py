"""How far one text bears out the hit rates, which were learned from many.

In a text that is sampled hot, or leaves what it copies at every turn, all candidates do worse than usual, and the cells
of `candidates` are too many to notice it in time. So each text keeps a record of what every kind of evidence was
expected to get right and what it did; where that falls short, the kind's probabilities are scaled down. They are never
scaled up: the builder takes those candidates that are overestimated already, and larger trees did not pay.

What the record says of foreign texts (corpora, dense drafts) goes on to the next text: a corpus that has nothing to do
with what is written is not tried anew each time.

    record float32 [NUM_KINDS, 2]   tokens that came true, and that the hit rates expected; both fade
    kind 0 = no text proposed it, else 1 + group * 6 + the share bucket of its match
    group 0 the texts of the caller, 1 corpora, 2 dense drafts: a corpus may have nothing to do with this text
"""

from retrodraft.kernels.candidates import GLOBAL, NUM_PAIR, NUM_SHARES, NUM_TOKEN, PER_SCOPE
from retrodraft.kernels.jit import borrowing_njit

NUM_KINDS = 1 + 3 * NUM_SHARES
FIRST_FOREIGN_KIND = 1 + NUM_SHARES
RIGHT, EXPECTED = 0, 1
DOUBT = 2.0  # expected tokens before which a record counts for little
FADING = 0.99  # of a record with each token


@borrowing_njit
def kind_of(cell):
    """The kind of evidence of a candidate in `cell`."""
    match = cell // (NUM_PAIR * NUM_TOKEN)
    if match == 0:
        return 0
    group = max((match - 1) // PER_SCOPE - GLOBAL + 1, 0)
    return 1 + group * NUM_SHARES + (match - 1) % NUM_SHARES


@borrowing_njit
def confidence(record, kind):
    """What a probability of that kind is scaled by, at most 1."""
    return min((DOUBT + record[kind, RIGHT]) / (DOUBT + record[kind, EXPECTED]), 1.0)


@borrowing_njit
def fade(record):
    """Let older outcomes count a little less."""
    for kind in range(NUM_KINDS):
        record[kind, RIGHT] *= FADING
        record[kind, EXPECTED] *= FADING
