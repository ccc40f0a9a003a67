"""A trie of drafts in the arrays of a suffix automaton, so that what follows and asks an automaton takes it as one.

State 0 stands for having left the trie and has no way out; state 1 is the newest token, below which the drafts begin. A
state's COUNT is the number of drafts that pass it. Followers of a state lie in the order in which they came.
"""

from retrodraft.kernels.jit import borrowing_njit
from retrodraft.kernels.suffix_automaton import (
    COUNT,
    HEAD,
    LATEST,
    LENGTH,
    LINK,
    NEXT,
    NUM_EDGES,
    NUM_ENTRIES,
    NUM_STATES,
    SOURCE,
    TARGET,
    TOKEN,
    insert_entry,
)

START = 1  # the state of the newest token
NOWHERE = -1  # carried by the one edge of state 0, which tells the kernels that there is a text; no token is negative


@borrowing_njit
def fill(states, edges, table, meta, windows, root):
    """Replace the trie by that of the `windows` int32 [n, size] that begin with `root`; each ends at a negative token.

    The arrays are those of `suffix_automaton`, with room for 2 + n * (size - 1) states and as many edges, and twice as
    many table entries. Returns the first window that is in the trie; where it is -1, nothing was changed.
    """
    first = -1
    for row in range(windows.shape[0]):
        if windows[row, 0] == root and windows[row, 1] >= 0:
            first = row
            break
    if first < 0:
        return first
    table[:] = -1
    meta[NUM_STATES] = 0
    meta[NUM_EDGES] = 0
    meta[NUM_ENTRIES] = 0
    _add_state(states, meta, -1)
    _add_edge(states, edges, table, meta, 0, -1, NOWHERE, 0)
    _add_state(states, meta, 0)
    for row in range(first, windows.shape[0]):
        if windows[row, 0] != root or windows[row, 1] < 0:
            continue
        state = START
        states[state, COUNT] += 1
        for i in range(1, windows.shape[1]):
            token = windows[row, i]
            if token < 0:
                break
            last = -1
            edge = states[state, HEAD]
            while edge >= 0 and edges[edge, TOKEN] != token:
                last = edge
                edge = edges[edge, NEXT]
            if edge >= 0:
                state = edges[edge, TARGET]
            else:
                _add_edge(states, edges, table, meta, state, last, token, meta[NUM_STATES])
                state = _add_state(states, meta, 0)
            states[state, COUNT] += 1
    return first


@borrowing_njit
def _add_state(states, meta, link):
    state = meta[NUM_STATES]
    meta[NUM_STATES] += 1
    states[state, LENGTH] = 0
    states[state, LINK] = link
    states[state, HEAD] = -1
    states[state, COUNT] = 0
    states[state, LATEST] = -1
    return state


@borrowing_njit
def _add_edge(states, edges, table, meta, state, last, token, target):
    """Give `state` a further edge, after its edge `last` (-1 none)."""
    edge = meta[NUM_EDGES]
    meta[NUM_EDGES] += 1
    edges[edge, TOKEN] = token
    edges[edge, TARGET] = target
    edges[edge, NEXT] = -1
    edges[edge, SOURCE] = state
    if last < 0:
        states[state, HEAD] = edge
    else:
        edges[last, NEXT] = edge
        insert_entry(edges, table, edge)
        meta[NUM_ENTRIES] += 1
