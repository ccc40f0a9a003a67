"""Online suffix automaton over int32 tokens: append, follow, enumerate continuations.

The automaton of a text has one state for each class of substrings that end at the same places, so a state knows how
often its substrings occurred and where the latest occurrence ended (Blumer et al. 1985; SAM-Decoding, 2411.10666, uses
one for drafting). After every append, the suffix link of the newest state is the longest suffix of the text that
occurred before, and climbing the links gives its shorter suffixes: no search is needed at all.

Flat arrays, grown by the owner (`retrodraft.index.suffix_automaton`):

    states int32 [num_states, 5]   LENGTH longest substring, LINK suffix link, HEAD first edge (-1 none),
                                   COUNT occurrences, LATEST index of the latest occurrence's last token
    edges  int32 [num_edges, 4]    TOKEN, TARGET state, NEXT edge of the same state (-1 none), SOURCE state
    table  int32 [2**k]            open addressing over the edges that are not their state's first one; -1 empty
    meta   int64 [4]               number of states, edges, table entries, and the newest state
"""

import numpy as np

from retrodraft.kernels.jit import borrowing_njit

LENGTH, LINK, HEAD, COUNT, LATEST = 0, 1, 2, 3, 4
TOKEN, TARGET, NEXT, SOURCE = 0, 1, 2, 3
NUM_STATES, NUM_EDGES, NUM_ENTRIES, NEWEST = 0, 1, 2, 3

# Counts are kept on the 64 longest suffixes only: the chain is as long as the text where one token repeats.
MAX_CHAIN = 64


@borrowing_njit
def _slot(state, token, mask):
    """First table slot to probe for the edge of `state` that carries `token`."""
    mixed = np.uint64(state) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(token) * np.uint64(0xC2B2AE3D27D4EB4F)
    return np.int64((mixed ^ (mixed >> np.uint64(29))) & np.uint64(mask))


@borrowing_njit
def find_edge(states, edges, table, state, token):
    """Edge of `state` that carries `token`, or -1. O(1) expected."""
    head = states[state, HEAD]
    if head < 0 or edges[head, TOKEN] == token:
        return head
    if edges[head, NEXT] < 0:
        return -1
    mask = table.shape[0] - 1
    slot = _slot(state, token, mask)
    while table[slot] >= 0:
        edge = table[slot]
        if edges[edge, SOURCE] == state and edges[edge, TOKEN] == token:
            return edge
        slot = (slot + 1) & mask
    return -1


@borrowing_njit
def insert_entry(edges, table, edge):
    """Enter `edge` into the table, which has room."""
    mask = table.shape[0] - 1
    slot = _slot(edges[edge, SOURCE], edges[edge, TOKEN], mask)
    while table[slot] >= 0:
        slot = (slot + 1) & mask
    table[slot] = edge


@borrowing_njit
def _add_edge(states, edges, table, meta, state, token, target):
    edge = meta[NUM_EDGES]
    meta[NUM_EDGES] += 1
    edges[edge, TOKEN] = token
    edges[edge, TARGET] = target
    edges[edge, SOURCE] = state
    head = states[state, HEAD]
    if head < 0:
        edges[edge, NEXT] = -1
        states[state, HEAD] = edge
        return
    # The first edge of a state stays its first and is found without the table; newer ones follow it, latest first.
    edges[edge, NEXT] = edges[head, NEXT]
    edges[head, NEXT] = edge
    insert_entry(edges, table, edge)
    meta[NUM_ENTRIES] += 1


@borrowing_njit
def append(states, edges, table, meta, token, position):
    """Append `token`, the text's token number `position`. Amortised O(1); the arrays have room (see `needs_room`)."""
    last = meta[NEWEST]
    current = meta[NUM_STATES]
    meta[NUM_STATES] += 1
    meta[NEWEST] = current
    states[current, LENGTH] = states[last, LENGTH] + 1
    states[current, HEAD] = -1
    states[current, COUNT] = 0
    state = last
    edge = -1
    while state >= 0:
        edge = find_edge(states, edges, table, state, token)
        if edge >= 0:
            break
        _add_edge(states, edges, table, meta, state, token, current)
        state = states[state, LINK]
    if state < 0:
        states[current, LINK] = 0
    else:
        target = edges[edge, TARGET]
        if states[target, LENGTH] == states[state, LENGTH] + 1:
            states[current, LINK] = target
        else:
            clone = meta[NUM_STATES]
            meta[NUM_STATES] += 1
            states[clone, LENGTH] = states[state, LENGTH] + 1
            states[clone, LINK] = states[target, LINK]
            states[clone, COUNT] = states[target, COUNT]
            states[clone, LATEST] = states[target, LATEST]
            states[clone, HEAD] = -1
            source_edge = states[target, HEAD]
            while source_edge >= 0:
                _add_edge(states, edges, table, meta, clone, edges[source_edge, TOKEN], edges[source_edge, TARGET])
                source_edge = edges[source_edge, NEXT]
            while state >= 0:
                edge = find_edge(states, edges, table, state, token)
                if edge < 0 or edges[edge, TARGET] != target:
                    break
                edges[edge, TARGET] = clone
                state = states[state, LINK]
            states[target, LINK] = clone
            states[current, LINK] = clone
    state = current
    for _ in range(MAX_CHAIN):
        if state <= 0:
            break
        states[state, COUNT] += 1
        states[state, LATEST] = position
        state = states[state, LINK]


@borrowing_njit
def needs_room(states, edges, table, meta, degree):
    """Whether an append that clones a state of `degree` edges could overflow one of the arrays."""
    return (
        meta[NUM_STATES] + 2 > states.shape[0]
        or meta[NUM_EDGES] + degree > edges.shape[0]
        or 10 * (meta[NUM_ENTRIES] + degree) > 7 * table.shape[0]
    )


@borrowing_njit
def clone_degree(states, edges, table, meta, token):
    """Upper bound on the edges that appending `token` adds: the new ones on the chain and a clone's copies."""
    state = meta[NEWEST]
    added = 1  # the cloned state may itself lie on the chain and have gained an edge there
    while state >= 0:
        edge = find_edge(states, edges, table, state, token)
        if edge >= 0:
            target = edges[edge, TARGET]
            if states[target, LENGTH] != states[state, LENGTH] + 1:
                source_edge = states[target, HEAD]
                while source_edge >= 0:
                    added += 1
                    source_edge = edges[source_edge, NEXT]
            break
        added += 1
        state = states[state, LINK]
    return added


@borrowing_njit
def append_many(states, edges, table, meta, tokens, start, position):
    """Append `tokens[start:]`, the first of which is the text's token number `position`, while there is room.

    Returns how many tokens of `tokens` are in the text now; fewer than all of them asks the owner for larger arrays.
    """
    for i in range(start, tokens.shape[0]):
        added = clone_degree(states, edges, table, meta, tokens[i])
        if needs_room(states, edges, table, meta, added):
            return i
        append(states, edges, table, meta, tokens[i], position + i - start)
    return tokens.shape[0]


@borrowing_njit
def rebuild_table(edges, table, states, meta):
    """Enter every edge that is not its state's first one into an empty `table`."""
    for edge in range(meta[NUM_EDGES]):
        if states[edges[edge, SOURCE], HEAD] != edge:
            insert_entry(edges, table, edge)


@borrowing_njit
def step(states, edges, table, state, length, token):
    """State and match length after `token`: the longest suffix of the matched text plus `token` that occurs."""
    while state >= 0:
        edge = find_edge(states, edges, table, state, token)
        if edge >= 0:
            return edges[edge, TARGET], length + 1
        state = states[state, LINK]
        if state >= 0:
            length = states[state, LENGTH]
    return 0, 0


@borrowing_njit
def follow(states, edges, table, tokens):
    """State and length of the longest suffix of `tokens` that occurs; a negative token starts anew."""
    state = 0
    length = 0
    for token in tokens:
        if token < 0:
            state = 0
            length = 0
        else:
            state, length = step(states, edges, table, state, length, token)
    return state, length
