"""What a step teaches, in the order of the text: counts of hits, the text's own record, rows, and the text itself."""

import numpy as np

from retrodraft.kernels import suffix_automaton as sa
from retrodraft.kernels.adjacency import WIDTH, blend, claim_pair
from retrodraft.kernels.candidates import (
    CELLS,
    CONTEXT,
    FOREIGN_CELLS,
    MAX_CANDIDATES,
    MAX_EDGES,
    NUM_COLUMNS,
    TOKENS,
    gather,
)
from retrodraft.kernels.confidence import EXPECTED, RIGHT, fade, kind_of
from retrodraft.kernels.jit import borrowing_njit, njit

MAX_TRIALS = 2000.0  # of a cell; then both counts are halved, so that old outcomes fade


@njit
def observe(
    stores, scopes, corpora, rows, rates, states, lengths, spans, context, tokens, start, top_ids, top_probs,
    rate, now,
):  # fmt: skip
    """Take the committed `tokens[start:]` one by one; returns the index of the first one that found no room.

    Before token i is appended to the request's automaton (`stores[0]`; the other stores are only followed), the
    candidates that its context had are judged against it, in the tree or not: full information. Then the target's
    top-k after that context (`top_ids[i]`, `top_probs[i]`; a first id of -1 = not known) joins the adjacency rows.
    `context` int32 [CONTEXT], the newest tokens, is moved along, as `states`, `lengths` and `spans` are.
    """
    found = np.empty((NUM_COLUMNS, MAX_CANDIDATES), np.int32)
    followers = np.empty((2, MAX_EDGES), np.int32)
    ids = np.empty(2 * WIDTH, np.int32)
    probs = np.empty(2 * WIDTH, np.float32)
    return _observe(
        stores, scopes, corpora, rows, rates, states, lengths, spans, context, tokens, start, top_ids, top_probs,
        rate, now, found, followers, ids, probs,
    )  # fmt: skip


@borrowing_njit
def _observe(
    stores, scopes, corpora, rows, rates, states, lengths, spans, context, tokens, start, top_ids, top_probs,
    rate, now, found, followers, ids, probs,
):  # fmt: skip
    automaton, edges, table, meta = stores[0]
    hits, trials, record = rates
    for i in range(start, tokens.shape[0]):
        token = tokens[i]
        added = sa.clone_degree(automaton, edges, table, meta, token)
        if sa.needs_room(automaton, edges, table, meta, added):
            return i
        num_found = gather(stores, scopes, corpora, rows, states, lengths, spans, context, found, followers)
        fade(record)
        for j in range(num_found):
            came = 1.0 if found[TOKENS, j] == token else 0.0
            _judge(found[CELLS, j], came, hits, trials, record)
            if found[FOREIGN_CELLS, j] >= 0:
                _judge(found[FOREIGN_CELLS, j], came, hits, trials, record)
        if top_ids[i, 0] >= 0:
            _learn_row(
                rows, context[CONTEXT - 2], context[CONTEXT - 1], top_ids[i], top_probs[i], rate, now, ids, probs
            )  # fmt: skip
        sa.append(automaton, edges, table, meta, token, automaton[meta[sa.NEWEST], sa.LENGTH])
        newest_link = automaton[meta[sa.NEWEST], sa.LINK]
        states[0] = newest_link
        lengths[0] = automaton[newest_link, sa.LENGTH]
        for s in range(1, len(stores)):
            other, other_edges, other_table, _ = stores[s]
            state, length = sa.step(other, other_edges, other_table, states[s], lengths[s], token)
            states[s] = state
            lengths[s] = length
        for k in range(CONTEXT - 1):
            context[k] = context[k + 1]
        context[CONTEXT - 1] = token
    return tokens.shape[0]


@borrowing_njit
def _judge(cell, came, hits, trials, record):
    """Count a candidate of a cell that came true (1.0) or did not (0.0)."""
    kind = kind_of(cell)
    record[kind, EXPECTED] += hits[cell] / trials[cell]
    record[kind, RIGHT] += came
    trials[cell] += 1.0
    hits[cell] += came
    if trials[cell] > MAX_TRIALS:
        trials[cell] *= 0.5
        hits[cell] *= 0.5


@borrowing_njit
def _learn_row(rows, previous, token, top_ids, top_probs, rate, now, ids, probs):
    """Blend one top-k of the target, seen after `previous`, `token`, into the rows of the token and of the pair."""
    token_ids, token_probs, pair_keys, pair_stamps, pair_ids, pair_probs = rows
    if token < 0 or token >= token_ids.shape[0]:
        return
    blend(token_ids[token], token_probs[token], top_ids, top_probs, rate, ids, probs)
    if previous >= 0:
        slot = claim_pair(pair_keys, pair_stamps, pair_ids, previous, token, now)
        blend(pair_ids[slot], pair_probs[slot], top_ids, top_probs, rate, ids, probs)


@njit
def learn_rows(rows, previous, tokens, top_ids, top_probs, rate, now):
    """Blend the target's top-k after each of `tokens` int32 [n], with `previous` int32 [n], into the rows.

    `top_ids` int32 and `top_probs` float32 [n, k].
    """
    ids = np.empty(2 * WIDTH, np.int32)
    probs = np.empty(2 * WIDTH, np.float32)
    for i in range(tokens.shape[0]):
        _learn_row(rows, previous[i], tokens[i], top_ids[i], top_probs[i], rate, now, ids, probs)
