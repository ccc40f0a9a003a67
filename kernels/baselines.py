"""Hot loops of published strategies: prompt lookup, Token Recycling, SuffixDecoding (GOOSE: `baselines_goose`).

Trees are written to caller's arrays in the order of creation; node 0 is the root, `parents[i] < i`.
"""

import numpy as np

from retrodraft.kernels.jit import njit
from retrodraft.kernels.suffix_automaton import COUNT, HEAD, LENGTH, LINK, NEXT, TARGET, TOKEN, step

MAX_FRONTIER = 64  # open nodes of one suffix draft; probabilities of at least 0.1 that sum to 1 need ten


@njit
def first_window(text, length, max_ngram):
    """Index after the first earlier window that equals the text's last n tokens, n as large as possible; -1 = none.

    The window at the very end is the query and has nothing after it. O(length), as in the published method.
    """
    best = 0
    found = -1
    for end in range(1, length):
        size = 0
        while size < max_ngram and size < end and text[end - 1 - size] == text[length - 1 - size]:
            size += 1
        if size > best:
            best = size
            found = end
            if best == max_ngram:
                break
    return found


@njit
def fill_template(matrix, root, template_parents, ranks, max_depth, tokens, parents, depths, origins):
    """Fill a static tree from an adjacency matrix; returns the number of nodes, the root included.

    Template node i (0 = root) takes entry `ranks[i]` of the row of node `template_parents[i]`, which comes earlier.
    Where a row is cold (-1) the node is missing, and so is what hangs below it. `origins` gets the template nodes.
    """
    vocab_size = matrix.shape[0]
    size = template_parents.shape[0]
    placed = np.full(size, -1, np.int32)
    placed[0] = 0
    tokens[0] = root
    parents[0] = -1
    depths[0] = 0
    origins[0] = 0
    count = 1
    for i in range(1, size):
        parent = placed[template_parents[i]]
        if parent < 0 or depths[parent] >= max_depth:
            continue
        token = matrix[tokens[parent], ranks[i]] if 0 <= tokens[parent] < vocab_size else -1
        if token < 0 or token >= vocab_size:
            continue
        placed[i] = count
        tokens[count] = token
        parents[count] = parent
        depths[count] = depths[parent] + 1
        origins[count] = i
        count += 1
    return count


@njit
def overwrite_rows(matrix, order, tokens, top_ids):
    """`matrix[tokens[i]] = top_ids[i]` for i in `order`, so the last writer wins; positions not looked at are left."""
    width = min(matrix.shape[1], top_ids.shape[1])
    for i in order:
        token = tokens[i]
        if 0 <= token < matrix.shape[0] and top_ids[i, 0] >= 0:
            matrix[token, :] = -1
            matrix[token, :width] = top_ids[i, :width]


@njit
def longest_match(states, edges, table, text, length, limit):
    """State and length of the longest suffix of `text[:length]`, of at most `limit` tokens, that an automaton holds."""
    state, matched = 0, 0
    for i in range(max(0, length - limit), length):
        state, matched = step(states, edges, table, state, matched, text[i])
    return state, matched


@njit
def speculate(states, edges, state, max_nodes, max_depth, min_prob, vocab_size, single, tokens, parents, depths, probs):
    """SuffixDecoding's draft below one state: best-first by cumulative share of counts. Returns (nodes, score).

    A continuation's share is its count over the state's, which includes occurrences with nothing after them. Of equal
    probabilities the one found first is taken. `single` follows the most frequent continuation only.
    """
    pool_states = np.empty(MAX_FRONTIER, np.int32)
    pool_parents = np.empty(MAX_FRONTIER, np.int32)
    pool_tokens = np.empty(MAX_FRONTIER, np.int32)
    pool_probs = np.empty(MAX_FRONTIER, np.float64)
    size = 0
    count = 1
    score = 0.0
    node = 0
    node_prob = 1.0
    depths[0] = 0
    while count <= max_nodes:
        if single:
            size = 0
        edge = states[state, HEAD] if depths[node] < max_depth else -1
        while edge >= 0:
            target = edges[edge, TARGET]
            # The automaton counts at most 64 nested suffixes an append, so where one token repeats a share may pass 1.
            prob = node_prob * min(1.0, states[target, COUNT] / max(states[state, COUNT], 1))
            if prob >= min_prob and 0 <= edges[edge, TOKEN] < vocab_size and size < MAX_FRONTIER:
                pool_states[size] = target
                pool_parents[size] = node
                pool_tokens[size] = edges[edge, TOKEN]
                pool_probs[size] = prob
                size += 1
            edge = edges[edge, NEXT]
        best = -1
        for i in range(size):
            if best < 0 or pool_probs[i] > pool_probs[best]:
                best = i
        if best < 0:
            break
        node = count
        state = pool_states[best]
        node_prob = pool_probs[best]
        tokens[node] = pool_tokens[best]
        parents[node] = pool_parents[best]
        depths[node] = depths[pool_parents[best]] + 1
        probs[node] = node_prob
        score += node_prob
        count += 1
        size -= 1
        for i in range(best, size):  # keeps the order in which they were found
            pool_states[i] = pool_states[i + 1]
            pool_parents[i] = pool_parents[i + 1]
            pool_tokens[i] = pool_tokens[i + 1]
            pool_probs[i] = pool_probs[i + 1]
    return count, score


@njit
def best_suffix_draft(
    states, edges, state, length, max_nodes, max_depth, total_depth, factor, min_prob, vocab_size, single, to_beat,
    tokens, parents, depths, probs,
):  # fmt: skip
    """The best-scoring draft over all match lengths m of one automaton. Returns (nodes, score, match length).

    `state`, `length` is the longest match. A draft from m has at most `factor * m` nodes and lies, with its match,
    within `total_depth` tokens. It must score more than `to_beat`; of equal scores the longer match wins.
    """
    size = max_nodes + 1
    trial_tokens = np.empty(size, np.int32)
    trial_parents = np.empty(size, np.int32)
    trial_depths = np.empty(size, np.int32)
    trial_probs = np.empty(size, np.float32)
    best_count = 1
    best_score = to_beat
    best_match = 0
    for match_len in range(min(length, total_depth - 1), 0, -1):
        while state > 0 and states[states[state, LINK], LENGTH] >= match_len:
            state = states[state, LINK]
        if state <= 0:
            break
        budget = min(max_nodes, int(match_len * factor + 1e-6))
        deepest = min(max_depth, total_depth - match_len)
        # The probabilities of one depth sum to 1 at most, and so do those of one node: no draft scores more than this.
        if min(budget, deepest) <= best_score:
            continue
        count, score = speculate(
            states, edges, state, budget, deepest, min_prob, vocab_size, single,
            trial_tokens, trial_parents, trial_depths, trial_probs,
        )  # fmt: skip
        if score > best_score:
            best_count, best_score, best_match = count, score, match_len
            tokens[1:count] = trial_tokens[1:count]
            parents[1:count] = trial_parents[1:count]
            depths[1:count] = trial_depths[1:count]
            probs[1:count] = trial_probs[1:count]
    return best_count, best_score, best_match
