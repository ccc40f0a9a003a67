"""SuffixDecoding's speculation from one state of a suffix automaton."""

import numpy as np
from numba import njit

from retrodraft.kernels.suffix_automaton import COUNT, HEAD, NEXT, TARGET, TOKEN


@njit(cache=True, nogil=True)
def speculate(states, edges, state, max_nodes, max_depth, min_prob, single, tokens, parents):
    """Best-first tree below `state` by cumulative count ratio; returns (number of nodes with the root, score).

    Nodes 1, 2 … go to `tokens` and `parents` int32 [max_nodes + 1]. A frontier node enters the pool when its parent is
    taken; the pool is scanned, since it is small. `single` keeps to one child a node.
    """
    capacity = 64 + 64 * (max_nodes + 1)
    pool_state = np.empty(capacity, np.int32)
    pool_token = np.empty(capacity, np.int32)
    pool_parent = np.empty(capacity, np.int32)
    pool_depth = np.empty(capacity, np.int32)
    pool_prob = np.empty(capacity, np.float64)
    size = 0
    score = 0.0
    num_nodes = 1
    node = 0
    node_state = state
    node_prob = 1.0
    node_depth = 0
    while num_nodes <= max_nodes:
        if node_depth < max_depth:
            if single:
                size = 0
            edge = states[node_state, HEAD]
            while edge >= 0:
                target = edges[edge, TARGET]
                prob = node_prob * states[target, COUNT] / states[node_state, COUNT]
                if prob >= min_prob and size < capacity and edges[edge, TOKEN] >= 0:
                    pool_state[size] = target
                    pool_token[size] = edges[edge, TOKEN]
                    pool_parent[size] = node
                    pool_depth[size] = node_depth + 1
                    pool_prob[size] = prob
                    size += 1
                edge = edges[edge, NEXT]
        elif single:
            break
        best = -1
        for i in range(size):
            if best < 0 or pool_prob[i] > pool_prob[best]:
                best = i
        if best < 0:
            break
        node = num_nodes
        tokens[node] = pool_token[best]
        parents[node] = pool_parent[best]
        node_state = pool_state[best]
        node_prob = pool_prob[best]
        node_depth = pool_depth[best]
        score += node_prob
        num_nodes += 1
        size -= 1
        pool_state[best] = pool_state[size]
        pool_token[best] = pool_token[size]
        pool_parent[best] = pool_parent[size]
        pool_depth[best] = pool_depth[size]
        pool_prob[best] = pool_prob[size]
    return num_nodes, score
