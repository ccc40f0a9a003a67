"""Best-first draft trees over flat arrays, and their ancestor masks.

A retrieved draft is a one-hot proposal, so a tree's expected number of accepted tokens is the sum of its nodes' path
probabilities: additive. Taking nodes best-first by path probability is therefore optimal among the prefix-closed trees
of a size (OPT-Tree, 2406.17276; DDTree, 2604.12989), and the right size is a prefix of that order: the one that
gains most over its price. A deep spine (GOOSE, 2604.02047) appears by itself where a copy keeps its probability high.

    tokens, parents, depths int32 [num_nodes]   node 0 is the root, the last committed token; parents[i] < i
    probs float32 [num_nodes]                   path probabilities; the root has 1
    sources uint8 [num_nodes]                   bits of `retrodraft.kernels.candidates`
"""

import numpy as np

from retrodraft.kernels.candidates import CONTEXT, MAX_CANDIDATES, gather
from retrodraft.kernels.jit import njit
from retrodraft.kernels.suffix_automaton import HEAD, step

MIN_PROB = 1e-5  # of a path; below it a node is noise


@njit
def _push(heap_probs, heap_nodes, heap_tokens, heap_sources, size, prob, node, token, source):
    i = size
    while i > 0 and heap_probs[(i - 1) // 2] < prob:
        above = (i - 1) // 2
        heap_probs[i] = heap_probs[above]
        heap_nodes[i] = heap_nodes[above]
        heap_tokens[i] = heap_tokens[above]
        heap_sources[i] = heap_sources[above]
        i = above
    heap_probs[i] = prob
    heap_nodes[i] = node
    heap_tokens[i] = token
    heap_sources[i] = source


@njit
def _drop_top(heap_probs, heap_nodes, heap_tokens, heap_sources, size):
    """Remove the top of a heap of `size` entries: its last entry sinks from the top."""
    last = size - 1
    prob = heap_probs[last]
    i = 0
    while 2 * i + 1 < last:
        below = 2 * i + 1
        if below + 1 < last and heap_probs[below + 1] > heap_probs[below]:
            below += 1
        if heap_probs[below] <= prob:
            break
        heap_probs[i] = heap_probs[below]
        heap_nodes[i] = heap_nodes[below]
        heap_tokens[i] = heap_tokens[below]
        heap_sources[i] = heap_sources[below]
        i = below
    heap_probs[i] = prob
    heap_nodes[i] = heap_nodes[last]
    heap_tokens[i] = heap_tokens[last]
    heap_sources[i] = heap_sources[last]


@njit
def _cannot_pay(prices, num_nodes, value, prob, best):
    """Whether no larger tree can beat `best`, when each further node adds at most `prob` to `value`."""
    for size in range(num_nodes, prices.shape[0]):
        if value + prob * (size - num_nodes + 1) - prices[size] > best:
            return False
    return True


@njit
def _path_context(tokens, parents, depths, node, context, out):
    """The newest CONTEXT tokens of the text up to and including a node."""
    above = min(depths[node], CONTEXT)
    for i in range(CONTEXT - above):
        out[i] = context[i + above]
    for i in range(CONTEXT - 1, CONTEXT - 1 - above, -1):
        out[i] = tokens[node]
        node = parents[node]


@njit
def build(
    stores, scopes, corpora, rows, hits, trials, states, lengths, spans, context, prices, max_depth, single,
    tokens, parents, depths, probs, sources,
):  # fmt: skip
    """Fill the arrays with the best tree and return its number of nodes, the root included.

    `prices[n]` is what a forward over a root and n nodes costs, in expected tokens; its length bounds the tree. The
    tree of n nodes is worth its probability mass less `prices[n]`. `single` asks for a chain: one child a node.
    The stores, their matches and `context`, which ends with the root, are those of `candidates.gather`.
    `hits` / `trials` (float32 [num_cells]) is the calibrated probability of a candidate's cell.
    """
    max_nodes = prices.shape[0] - 1
    num_stores = len(stores)
    node_states = np.zeros((max_nodes + 1, num_stores), np.int32)
    node_lengths = np.zeros((max_nodes + 1, num_stores), np.int32)
    holds_text = np.empty(num_stores, np.bool_)
    node_spans = np.empty((max_nodes + 1, len(corpora)), np.int32)
    node_context = np.empty(CONTEXT, np.int32)
    heap_size = 0
    capacity = MAX_CANDIDATES * (max_nodes + 1)
    heap_probs = np.empty(capacity, np.float32)
    heap_nodes = np.empty(capacity, np.int32)
    heap_tokens = np.empty(capacity, np.int32)
    heap_sources = np.empty(capacity, np.uint8)
    cand_tokens = np.empty(MAX_CANDIDATES, np.int32)
    cand_cells = np.empty(MAX_CANDIDATES, np.int32)
    cand_sources = np.empty(MAX_CANDIDATES, np.uint8)
    tokens[0] = context[CONTEXT - 1]
    parents[0] = -1
    depths[0] = 0
    probs[0] = 1.0
    sources[0] = 0
    for i in range(num_stores):
        node_states[0, i] = states[i]
        node_lengths[0, i] = lengths[i]
        holds_text[i] = stores[i][0][0, HEAD] >= 0
    node_spans[0] = spans
    num_nodes = 1
    value = 0.0
    best_value = -prices[0]
    best_nodes = 1
    node = 0
    while num_nodes <= max_nodes:
        if depths[node] < max_depth:
            _path_context(tokens, parents, depths, node, context, node_context)
            found = gather(
                stores, scopes, corpora, rows, node_states[node], node_lengths[node], node_spans[node], node_context,
                cand_tokens, cand_cells, cand_sources,
            )  # fmt: skip
            best = -1
            for i in range(found):
                prob = probs[node] * hits[cand_cells[i]] / trials[cand_cells[i]]
                if prob < MIN_PROB:
                    continue
                if single:
                    if best < 0 or prob > heap_probs[0]:
                        best = i
                        heap_probs[0] = prob
                    continue
                _push(
                    heap_probs, heap_nodes, heap_tokens, heap_sources, heap_size,
                    prob, node, cand_tokens[i], cand_sources[i],
                )  # fmt: skip
                heap_size += 1
            if best >= 0:
                heap_nodes[0] = node
                heap_tokens[0] = cand_tokens[best]
                heap_sources[0] = cand_sources[best]
                heap_size = 1
        if heap_size == 0 or _cannot_pay(prices, num_nodes, value, heap_probs[0], best_value):
            break
        parent = heap_nodes[0]
        node = num_nodes
        tokens[node] = heap_tokens[0]
        parents[node] = parent
        depths[node] = depths[parent] + 1
        probs[node] = heap_probs[0]
        sources[node] = heap_sources[0]
        _drop_top(heap_probs, heap_nodes, heap_tokens, heap_sources, heap_size)
        heap_size -= 1
        for i in range(num_stores):
            if not holds_text[i]:
                continue
            automaton, edges, table, _ = stores[i]
            state, length = step(automaton, edges, table, node_states[parent, i], node_lengths[parent, i], tokens[node])
            node_states[node, i] = state
            node_lengths[node, i] = length
        node_spans[node] = node_spans[parent]
        value += probs[node]
        num_nodes += 1
        if value - prices[num_nodes - 1] > best_value:
            best_value = value - prices[num_nodes - 1]
            best_nodes = num_nodes
    spine_first(tokens, parents, depths, probs, sources, best_nodes)
    return best_nodes


@njit
def spine_first(tokens, parents, depths, probs, sources, num_nodes):
    """Renumber the first `num_nodes` nodes depth-first, likeliest child first.

    A walk that keeps to the likeliest children then accepts rows 0, 1, 2 …, and committing it only truncates the cache.
    """
    first_child = np.full(num_nodes, -1, np.int32)
    next_sibling = np.full(num_nodes, -1, np.int32)
    for node in range(num_nodes - 1, 0, -1):  # creation order is by falling probability, so the likeliest comes last
        next_sibling[node] = first_child[parents[node]]
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


@njit
def ancestor_mask(parents, num_nodes, out):
    """`out[i, j]` (bool, at least [num_nodes, num_nodes]) is whether node j is i or an ancestor of i."""
    out[:num_nodes, :num_nodes] = False
    for i in range(num_nodes):
        if parents[i] >= 0:
            for j in range(i):
                out[i, j] = out[parents[i], j]
        out[i, i] = True
