"""Candidates for the next token of one tree node, each with the calibration cell that its evidence falls into.

Two kinds of store answer, and both speak only in tokens and features:

- suffix automata, one a scope (request, session, workspace, global): the continuations of the longest match and of its
  shorter suffixes, with the match length, the share of the occurrences that continued so, and how many there were;
- adjacency rows (Token Recycling): the target's own probabilities after the last pair of tokens and the last token.

A token's evidence is reduced to a cell number; the calibration table holds, for each cell, how often a candidate of
that cell was what the target said. So every store is judged by its outcomes, on one scale, and none by a hand-set
weight. Cells are laid out as [match, pair, token]:

    match 0..288   0 = no automaton proposed it, else 1 + ((scope * 2 + shorter) * 6 + length bucket) * 6 + share bucket
    pair  0..23    (0 pair row, 1 token row only, 2 neither) * 8 + probability bucket (0 = not among the row's tokens)
    token 0..5     0 = no token row, 1 = not among its tokens, 2..5 probability bucket
"""

import numpy as np

from retrodraft.kernels.adjacency import ONE, WIDTH, find_pair
from retrodraft.kernels.jit import njit
from retrodraft.kernels.suffix_automaton import COUNT, HEAD, LENGTH, LINK, NEXT, TARGET, TOKEN

NUM_SCOPES = 4
NUM_MATCH, NUM_PAIR, NUM_TOKEN = 1 + NUM_SCOPES * 72, 24, 6
NUM_CELLS = NUM_MATCH * NUM_PAIR * NUM_TOKEN
MAX_CANDIDATES = 48  # of one node
MAX_ORDERS = 4  # suffixes of the match that are asked, longest first
MAX_EDGES = 8  # continuations of one suffix that are looked at, newest first

FROM_CONTEXT, FROM_ADJACENCY = 1, 2  # who proposed a candidate, as bits


@njit
def _length_bucket(length):
    if length <= 2:
        return length - 1
    if length <= 4:
        return 2
    if length <= 8:
        return 3
    return 4 if length <= 16 else 5


@njit
def _share_bucket(count, total, num_followers):
    if num_followers == 1:
        return min(total, 3) - 1
    share = count / total
    if share > 0.6:
        return 3
    return 4 if share > 0.3 else 5


@njit
def _pair_bucket(prob):
    if prob > 0.3:
        return 1 if prob > 0.9 else 2 if prob > 0.6 else 3
    if prob > 0.03:
        return 4 if prob > 0.1 else 5
    return 6 if prob > 0.005 else 7


@njit
def _token_bucket(prob):
    if prob > 0.15:
        return 2 if prob > 0.5 else 3
    return 4 if prob > 0.03 else 5


@njit
def _position(tokens, size, token):
    for i in range(size):
        if tokens[i] == token:
            return i
    return -1


@njit
def _place(tokens, size, token):
    """Index of `token` among the candidates, which it may join; -1 where they are full."""
    found = _position(tokens, size, token)
    if found < 0 and size < MAX_CANDIDATES and token >= 0:
        tokens[size] = token
        return size
    return found


@njit
def gather(stores, scopes, rows, states, lengths, previous, token, out_tokens, out_cells, out_sources):
    """Candidates to follow a node; returns how many.

    `stores[i]` is the (states, edges, table, meta) of the automaton of scope `scopes[i]`, in which the text up to and
    including the node has the match `states[i]`, `lengths[i]`; `rows` are the adjacency tables; `token` is the node's
    token and `previous` the one before it (-1 = none). O(1): orders, edges and rows are bounded.
    """
    match = np.zeros(MAX_CANDIDATES, np.int32)
    match_length = np.zeros(MAX_CANDIDATES, np.int32)
    pair = np.zeros(MAX_CANDIDATES, np.int32)
    single = np.zeros(MAX_CANDIDATES, np.int32)
    size = 0
    for i in range(len(stores)):
        automaton, edges, _, _ = stores[i]
        state = states[i]
        length = lengths[i]
        shorter = 0
        for _order in range(MAX_ORDERS):
            if state <= 0 or length < 1:
                break
            total = 0
            num_followers = 0
            edge = automaton[state, HEAD]
            while edge >= 0 and num_followers < MAX_EDGES:
                total += automaton[edges[edge, TARGET], COUNT]
                num_followers += 1
                edge = edges[edge, NEXT]
            edge = automaton[state, HEAD]
            for _follower in range(num_followers):
                index = _place(out_tokens, size, edges[edge, TOKEN])
                if index >= 0 and (index == size or length > match_length[index]):
                    count = automaton[edges[edge, TARGET], COUNT]
                    bucket = (scopes[i] * 2 + shorter) * 6 + _length_bucket(length)
                    match[index] = 1 + bucket * 6 + _share_bucket(count, total, num_followers)
                    match_length[index] = length
                    out_sources[index] = FROM_CONTEXT
                    size = max(size, index + 1)
                edge = edges[edge, NEXT]
            if num_followers > 0:
                shorter = 1
            state = automaton[state, LINK]
            if state > 0:
                length = automaton[state, LENGTH]
    token_ids, token_probs, pair_keys, _, pair_ids, pair_probs = rows
    slot = find_pair(pair_keys, previous, token) if previous >= 0 else -1
    known = 0 <= token < token_ids.shape[0] and token_ids[token, 0] >= 0
    from_context = size
    if slot >= 0:
        for rank in range(WIDTH):
            index = _place(out_tokens, size, pair_ids[slot, rank])
            if index >= 0:
                pair[index] = _pair_bucket(pair_probs[slot, rank] / ONE)
                size = max(size, index + 1)
    if known:
        for rank in range(WIDTH):
            index = _place(out_tokens, size, token_ids[token, rank])
            if index >= 0:
                prob = token_probs[token, rank] / ONE
                single[index] = _token_bucket(prob)
                if slot < 0:
                    pair[index] = _pair_bucket(prob)
                size = max(size, index + 1)
    evidence = 0 if slot >= 0 else 1 if known else 2
    for i in range(size):
        if i >= from_context:
            out_sources[i] = FROM_ADJACENCY
        elif pair[i] > 0 or single[i] > 0:
            out_sources[i] |= FROM_ADJACENCY
        if known and single[i] == 0:
            single[i] = 1
        out_cells[i] = (match[i] * NUM_PAIR + evidence * 8 + pair[i]) * NUM_TOKEN + single[i]
    return size
