"""What a step teaches: calibration counts, adjacency rows and the growing context, in the order of the text."""

import numpy as np

from retrodraft.kernels import suffix_automaton as sa
from retrodraft.kernels.adjacency import blend, claim_pair
from retrodraft.kernels.candidates import CONTEXT, MAX_CANDIDATES, gather
from retrodraft.kernels.jit import njit

MAX_TRIALS = 2000.0  # of a cell; then both counts are halved, so that old outcomes fade


@njit
def observe(
    stores, scopes, corpora, rows, hits, trials, states, lengths, spans, context, tokens, start, top_ids, top_probs,
    rate, now,
):  # fmt: skip
    """Take the committed `tokens[start:]` one by one; returns the index of the first one that found no room.

    Before token i is appended to the request's automaton (`stores[0]`; the other stores are only followed), the
    candidates that its context had are judged against it, in the tree or not: full information. Then the target's
    top-k after that context (`top_ids[i]`, `top_probs[i]`; a first id of -1 = not known) joins the adjacency rows.
    `context` int32 [CONTEXT], the newest tokens, is moved along, as `states`, `lengths` and `spans` are.
    """
    cand_tokens = np.empty(MAX_CANDIDATES, np.int32)
    cand_cells = np.empty(MAX_CANDIDATES, np.int32)
    cand_sources = np.empty(MAX_CANDIDATES, np.uint8)
    automaton, edges, table, meta = stores[0]
    for i in range(start, tokens.shape[0]):
        token = tokens[i]
        added = sa.clone_degree(automaton, edges, table, meta, token)
        if sa.needs_room(automaton, edges, table, meta, added):
            return i
        found = gather(
            stores, scopes, corpora, rows, states, lengths, spans, context, cand_tokens, cand_cells, cand_sources
        )
        for j in range(found):
            cell = cand_cells[j]
            trials[cell] += 1.0
            if cand_tokens[j] == token:
                hits[cell] += 1.0
            if trials[cell] > MAX_TRIALS:
                trials[cell] *= 0.5
                hits[cell] *= 0.5
        if top_ids[i, 0] >= 0:
            learn_row(rows, context[CONTEXT - 2], context[CONTEXT - 1], top_ids[i], top_probs[i], rate, now)
        sa.append(automaton, edges, table, meta, token, automaton[meta[sa.NEWEST], sa.LENGTH])
        newest_link = automaton[meta[sa.NEWEST], sa.LINK]
        states[0] = newest_link
        lengths[0] = automaton[newest_link, sa.LENGTH]
        for s in range(1, len(stores)):
            other, other_edges, other_table, _ = stores[s]
            state, length = sa.step(other, other_edges, other_table, states[s], lengths[s], token)
            states[s] = state
            lengths[s] = length
        context[: CONTEXT - 1] = context[1:]
        context[CONTEXT - 1] = token
    return tokens.shape[0]


@njit
def learn_row(rows, previous, token, top_ids, top_probs, rate, now):
    """Blend one top-k of the target, seen after `previous`, `token`, into the rows of the token and of the pair."""
    token_ids, token_probs, pair_keys, pair_stamps, pair_ids, pair_probs = rows
    if token < 0 or token >= token_ids.shape[0]:
        return
    blend(token_ids[token], token_probs[token], top_ids, top_probs, rate)
    if previous >= 0:
        slot = claim_pair(pair_keys, pair_stamps, pair_ids, previous, token, now)
        blend(pair_ids[slot], pair_probs[slot], top_ids, top_probs, rate)


@njit
def learn_rows(rows, previous, tokens, top_ids, top_probs, rate, now):
    """`learn_row` for each of `tokens` int32 [n], with `previous` int32 [n], ids int32 and probs float32 [n, k]."""
    for i in range(tokens.shape[0]):
        learn_row(rows, previous[i], tokens[i], top_ids[i], top_probs[i], rate, now)
