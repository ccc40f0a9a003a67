"""Best-first draft trees over flat arrays, and their ancestor masks.

A retrieved draft is a one-hot proposal, so a tree's expected number of accepted tokens is the sum of its nodes' path
probabilities: additive. Taking nodes best-first by path probability is therefore optimal among the prefix-closed trees
of a size (OPT-Tree, 2406.17276; DDTree, 2604.12989), and the right size is a prefix of that order: the one that
gains most over its price. A deep spine (GOOSE, 2604.02047) appears by itself where a copy keeps its probability high.

One thing departs from that order: a rejected node teaches too, and where its pair of tokens has no adjacency row yet,
what the target says there is of most use later. Such nodes come earlier.

    tokens, parents, depths int32 [num_nodes]   node 0 is the root, the last committed token; parents[i] < i
    probs float32 [num_nodes]                   path probabilities; the root has 1
    sources uint8 [num_nodes]                   bits of `retrodraft.kernels.candidates`
"""

import numpy as np

from retrodraft.kernels.adjacency import find_pair
from retrodraft.kernels.candidates import (
    CELLS,
    CONTEXT,
    FOREIGN,
    FOREIGN_CELLS,
    MAX_CANDIDATES,
    MAX_EDGES,
    NUM_COLUMNS,
    SOURCES,
    TOKENS,
    gather,
)
from retrodraft.kernels.confidence import NUM_KINDS, confidence, kind_of
from retrodraft.kernels.jit import borrowing_njit, njit
from retrodraft.kernels.suffix_automaton import HEAD, step

MIN_PROB = 1e-5  # of a path; below it a node is noise
WORTH, PROB = 0, 1  # rows of a heap's numbers; entries are in the order of the first
NODE, TOKEN, SOURCE, HOPED = 0, 1, 2, 3  # rows of a heap's entries; HOPED 1: its pair may have a row after all
NUM_FIELDS = 4
NEW_ROW = 2.5  # what a node's place in the order is raised by where its pair of tokens has no adjacency row yet
FOREIGN_WORTH = 0.5  # of a node that foreign texts alone propose: what the target says at it is of no use later


@borrowing_njit
def _push(numbers, entries, size, worth, prob, node, token, source, hoped):
    """Add an entry to a heap of `size`: `numbers` float32 [2, capacity] and `entries` int32 [NUM_FIELDS, capacity]."""
    i = size
    while i > 0 and numbers[WORTH, (i - 1) // 2] < worth:
        above = (i - 1) // 2
        _move(numbers, entries, above, i)
        i = above
    numbers[WORTH, i] = worth
    numbers[PROB, i] = prob
    entries[NODE, i] = node
    entries[TOKEN, i] = token
    entries[SOURCE, i] = source
    entries[HOPED, i] = hoped


@borrowing_njit
def _move(numbers, entries, start, end):
    numbers[WORTH, end] = numbers[WORTH, start]
    numbers[PROB, end] = numbers[PROB, start]
    for field in range(NUM_FIELDS):
        entries[field, end] = entries[field, start]


@borrowing_njit
def _drop_top(numbers, entries, size):
    """Remove the top of a heap of `size` entries: its last entry sinks from the top."""
    last = size - 1
    worth = numbers[WORTH, last]
    i = 0
    while 2 * i + 1 < last:
        below = 2 * i + 1
        if below + 1 < last and numbers[WORTH, below + 1] > numbers[WORTH, below]:
            below += 1
        if numbers[WORTH, below] <= worth:
            break
        _move(numbers, entries, below, i)
        i = below
    _move(numbers, entries, last, i)


@borrowing_njit
def _cannot_pay(prices, num_nodes, value, prob, best):
    """Whether no larger tree can beat `best`, when each further node adds at most `prob` to `value`."""
    for size in range(num_nodes, prices.shape[0]):
        if value + prob * (size - num_nodes + 1) - prices[size] > best:
            return False
    return True


@borrowing_njit
def _path_context(tokens, parents, depths, node, context, width, out):
    """The newest `width` tokens of the text up to and including a node, at the end of `out` [CONTEXT]."""
    above = min(depths[node], width)
    for i in range(CONTEXT - width, CONTEXT - above):
        out[i] = context[i + above]
    for i in range(CONTEXT - 1, CONTEXT - 1 - above, -1):
        out[i] = tokens[node]
        node = parents[node]


@njit
def build(
    stores, scopes, corpora, rows, rates, states, lengths, spans, context, prices, max_depth, single,
    tokens, parents, depths, probs, sources,
):  # fmt: skip
    """Fill the arrays with the best tree and return its number of nodes, the root included.

    `prices[n]` is what a forward over a root and n nodes costs, in expected tokens; its length bounds the tree. The
    tree of n nodes is worth its probability mass less `prices[n]`. `single` asks for a chain: one child a node.
    The stores, their matches and `context`, which ends with the root, are those of `candidates.gather`.
    `rates` are hits and trials (float32 [num_cells]), whose ratio is the calibrated probability of a candidate's cell,
    and this text's record (`confidence`).
    """
    room = prices.shape[0]
    capacity = MAX_CANDIDATES * room
    num_nodes = _grow(
        stores, scopes, corpora, rows, rates, states, lengths, spans, context, prices, max_depth, single,
        tokens, parents, depths, probs, sources,
        np.zeros((room, len(stores)), np.int32), np.zeros((room, len(stores)), np.int32),
        np.empty((room, len(corpora)), np.int32), np.empty(CONTEXT, np.int32),
        np.empty((2, capacity), np.float32), np.empty((NUM_FIELDS, capacity), np.int32),
        np.empty((NUM_COLUMNS, MAX_CANDIDATES), np.int32), np.empty((2, MAX_EDGES), np.int32),
        np.empty(NUM_KINDS, np.float32),
    )  # fmt: skip
    spine_first(tokens, parents, depths, probs, sources, num_nodes)
    return num_nodes


@borrowing_njit
def _grow(
    stores, scopes, corpora, rows, rates, states, lengths, spans, context, prices, max_depth, single,
    tokens, parents, depths, probs, sources,
    node_states, node_lengths, node_spans, node_context, numbers, entries, found, followers, scales,
):  # fmt: skip
    """The loop of `build`; nodes are in the order in which they were taken. The last line of arguments is room."""
    hits, trials, record = rates
    pair_keys = rows[2]
    for kind in range(NUM_KINDS):
        scales[kind] = confidence(record, kind)
    max_nodes = prices.shape[0] - 1
    num_stores = len(stores)
    width = CONTEXT if len(corpora) > 0 else 2  # of the context that `gather` looks at
    size = 0
    tokens[0] = context[CONTEXT - 1]
    parents[0] = -1
    depths[0] = 0
    probs[0] = 1.0
    sources[0] = 0
    for i in range(num_stores):
        node_states[0, i] = states[i]
        node_lengths[0, i] = lengths[i]
    for shard in range(len(corpora)):
        node_spans[0, shard] = spans[shard]
    num_nodes = 1
    value = 0.0
    best_value = -prices[0]
    best_nodes = 1
    node = 0
    while num_nodes <= max_nodes:
        if depths[node] < max_depth:
            _path_context(tokens, parents, depths, node, context, width, node_context)
            num_found = gather(
                stores, scopes, corpora, rows, node_states[node], node_lengths[node], node_spans[node], node_context,
                found, followers,
            )  # fmt: skip
            best = -1
            best_prob = 0.0
            for i in range(num_found):
                cell = found[CELLS, i]
                prob = scales[kind_of(cell)] * hits[cell] / trials[cell]
                cell = found[FOREIGN_CELLS, i]
                if cell >= 0:  # as far as foreign texts are borne out, what they say takes the place of the rest
                    prob += scales[kind_of(cell)] * (hits[cell] / trials[cell] - prob)
                if found[SOURCES, i] & ~FOREIGN == 0:
                    prob *= FOREIGN_WORTH
                prob *= probs[node]
                if prob < MIN_PROB:
                    continue
                if single:
                    if best < 0 or prob > best_prob:
                        best = i
                        best_prob = prob
                    continue
                hoped = 1 if found[SOURCES, i] & ~FOREIGN != 0 else 0
                worth = prob * NEW_ROW if hoped else prob
                _push(numbers, entries, size, worth, prob, node, found[TOKENS, i], found[SOURCES, i], hoped)
                size += 1
            if best >= 0:
                _push(numbers, entries, 0, best_prob, best_prob, node, found[TOKENS, best], found[SOURCES, best], 0)
                size = 1
        while size > 0 and entries[HOPED, 0]:  # most entries are never due, and looking up a row is dear
            parent, token, prob, source = entries[NODE, 0], entries[TOKEN, 0], numbers[PROB, 0], entries[SOURCE, 0]
            if find_pair(pair_keys, tokens[parent], token) < 0:
                break
            _drop_top(numbers, entries, size)
            _push(numbers, entries, size - 1, prob, prob, parent, token, source, 0)
        if size == 0 or _cannot_pay(prices, num_nodes, value, numbers[WORTH, 0], best_value):
            break
        parent = entries[NODE, 0]
        node = num_nodes
        tokens[node] = entries[TOKEN, 0]
        parents[node] = parent
        depths[node] = depths[parent] + 1
        probs[node] = numbers[PROB, 0]
        sources[node] = entries[SOURCE, 0]
        _drop_top(numbers, entries, size)
        size -= 1
        for i in range(num_stores):
            if stores[i][0][0, HEAD] < 0:
                continue  # it holds no text
            state, length = step(
                stores[i][0], stores[i][1], stores[i][2], node_states[parent, i], node_lengths[parent, i], tokens[node]
            )  # fmt: skip
            node_states[node, i] = state
            node_lengths[node, i] = length
        for shard in range(len(corpora)):
            node_spans[node, shard] = node_spans[parent, shard]
        value += probs[node]
        num_nodes += 1
        if value - prices[num_nodes - 1] > best_value:
            best_value = value - prices[num_nodes - 1]
            best_nodes = num_nodes
    return best_nodes


@njit
def spine_first(tokens, parents, depths, probs, sources, num_nodes):
    """Renumber the first `num_nodes` nodes depth-first, likeliest child first.

    A walk that keeps to the likeliest children then accepts rows 0, 1, 2 …, and committing it only truncates the cache.
    """
    first_child = np.full(num_nodes, -1, np.int32)
    next_sibling = np.full(num_nodes, -1, np.int32)
    for node in range(num_nodes - 1, 0, -1):
        before, after = -1, first_child[parents[node]]
        while after >= 0 and probs[after] > probs[node]:
            before, after = after, next_sibling[after]
        next_sibling[node] = after
        if before >= 0:
            next_sibling[before] = node
        else:
            first_child[parents[node]] = node
    order = np.empty(num_nodes, np.int32)
    rank = np.empty(num_nodes, np.int32)
    stack = np.empty(num_nodes, np.int32)
    stack[0] = 0
    height = 1
    placed = 0
    while height > 0:
        height -= 1
        node = stack[height]
        order[placed] = node
        rank[node] = placed
        placed += 1
        if next_sibling[node] >= 0:
            stack[height] = next_sibling[node]
            height += 1
        if first_child[node] >= 0:
            stack[height] = first_child[node]
            height += 1
    old_tokens = tokens[:num_nodes].copy()
    old_parents = parents[:num_nodes].copy()
    old_depths = depths[:num_nodes].copy()
    old_probs = probs[:num_nodes].copy()
    old_sources = sources[:num_nodes].copy()
    for i in range(num_nodes):
        node = order[i]
        tokens[i] = old_tokens[node]
        parents[i] = rank[old_parents[node]] if old_parents[node] >= 0 else -1
        depths[i] = old_depths[node]
        probs[i] = old_probs[node]
        sources[i] = old_sources[node]


@borrowing_njit
def ancestor_mask(parents, num_nodes, out):
    """`out[i, j]` (bool, at least [num_nodes, num_nodes]) is whether node j is i or an ancestor of i."""
    out[:num_nodes, :num_nodes] = False
    for i in range(num_nodes):
        if parents[i] >= 0:
            for j in range(i):
                out[i, j] = out[parents[i], j]
        out[i, i] = True
