"""GOOSE's hot loops (2604.02047): n-gram table, chain, adjacency rows of two tiers, and the spine tree.

Flat arrays, grown by the owner (`retrodraft.baselines.goose`):

    text   int32 [capacity]   the sequence; its first `length` tokens are valid
    table  int32 [2**k, 3]    n-grams by open addressing: FOLLOW index after the oldest occurrence (0 = free),
                              SIZE n, SEEN one of ONCE, AGREED, SPLIT
    rows   token_ids int32 [vocab_size, width], token_scores float32 [vocab_size, width], pair_keys int64 [num_slots],
           pair_stamps int32 [num_slots], pair_ids int32 [num_slots, width], pair_scores float32 [num_slots, width]
"""

import math

import numpy as np

from retrodraft.kernels.adjacency import claim_pair, find_pair
from retrodraft.kernels.jit import njit

FOLLOW, SIZE, SEEN = 0, 1, 2
ONCE, AGREED, SPLIT = 0, 1, 2
MIN_NGRAM, MAX_NGRAM = 3, 5
FROM_CONTEXT, FROM_ADJACENCY = 1, 2


@njit
def _ngram_slot(text, end, size, table, query, query_end):
    """Slot of the n-gram `query[query_end - size : query_end]`, or the free slot where it belongs."""
    mixed = np.uint64(size)
    for i in range(query_end - size, query_end):
        mixed = (mixed ^ np.uint64(query[i])) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    mask = table.shape[0] - 1
    slot = np.int64(mixed & np.uint64(mask))
    while table[slot, FOLLOW] > 0:
        if table[slot, SIZE] == size:
            start = table[slot, FOLLOW] - size
            same = True
            for i in range(size):
                if text[start + i] != query[query_end - size + i]:
                    same = False
                    break
            if same:
                return slot
        slot = (slot + 1) & mask
    return slot


@njit
def index_text(text, start, length, table):
    """Enter the n-grams that `text[start:length]` follow; an n-gram counts once a token follows it. O(1) a token."""
    for follow in range(start, length):
        for size in range(MIN_NGRAM, min(MAX_NGRAM, follow) + 1):
            slot = _ngram_slot(text, length, size, table, text, follow)
            if table[slot, FOLLOW] == 0:
                table[slot, FOLLOW] = follow
                table[slot, SIZE] = size
                table[slot, SEEN] = ONCE
            elif text[table[slot, FOLLOW]] != text[follow]:
                table[slot, SEEN] = SPLIT
            elif table[slot, SEEN] == ONCE:
                table[slot, SEEN] = AGREED


@njit
def _lookup(text, length, table, query, query_end):
    """Slot of the longest known n-gram that ends the query, or -1."""
    for size in range(min(MAX_NGRAM, query_end), MIN_NGRAM - 1, -1):
        slot = _ngram_slot(text, length, size, table, query, query_end)
        if table[slot, FOLLOW] > 0:
            return slot
    return -1


@njit
def match_confidence(chain_length, consensus, long_match):
    """How far to trust a context match: consensus is certainty, else longer is better."""
    if chain_length == 0:
        return 0.0
    if consensus:
        return 1.0
    if chain_length >= long_match:
        return min(0.9, 0.7 + 0.2 * (chain_length - long_match) / 12.0)
    return 0.6 * chain_length / long_match


@njit
def context_chain(text, length, table, max_chain, max_grown, long_match, grow_above, chain):
    """Continuation of the oldest occurrence of the longest known n-gram. Returns (tokens in `chain`, confidence).

    A match trusted more than `grow_above` grows by further lookups at the chain's own end, up to `max_grown` times the
    confidence; one of full confidence only while each further lookup has full confidence as well. `chain` int32 holds
    at least `max_grown + max_chain` tokens.
    """
    slot = _lookup(text, length, table, text, length)
    if slot < 0:
        return 0, 0.0
    start = table[slot, FOLLOW]
    size = min(max_chain, length - start)
    chain[:size] = text[start : start + size]
    confidence = match_confidence(size, table[slot, SEEN] == AGREED, long_match)
    if confidence <= grow_above:
        return size, confidence
    limit = int(max_grown * confidence)
    query = np.empty(2 * MAX_NGRAM, np.int32)
    while size < limit:
        tail = min(MAX_NGRAM, length)
        drafted = min(MAX_NGRAM, size)
        query[:tail] = text[length - tail : length]
        query[tail : tail + drafted] = chain[size - drafted : size]
        slot = _lookup(text, length, table, query, tail + drafted)
        if slot < 0:
            break
        start = table[slot, FOLLOW]
        more = min(max_chain, length - start)
        chain[size : size + more] = text[start : start + more]
        size += more
        if confidence >= 1.0 and table[slot, SEEN] != AGREED:
            break
    return size, confidence


@njit
def harvest(rows, order, before, tokens, top_ids, top_probs, now):
    """Overwrite the rows of `tokens[i]` and, where `before[i] >= 0`, of the pair, for i in `order`; the last one wins.

    Scores are a softmax over the kept tokens alone. Positions that were not looked at are left.
    """
    token_ids, token_scores, pair_keys, pair_stamps, pair_ids, pair_scores = rows
    width = min(token_ids.shape[1], top_ids.shape[1])
    for i in order:
        token = tokens[i]
        if token < 0 or token >= token_ids.shape[0] or top_ids[i, 0] < 0:
            continue
        total = np.float32(0.0)
        for rank in range(width):
            total += top_probs[i, rank]
        scale = np.float32(1.0) / total if total > 0.0 else np.float32(0.0)
        token_ids[token, :] = -1
        for rank in range(width):
            token_ids[token, rank] = top_ids[i, rank]
            token_scores[token, rank] = top_probs[i, rank] * scale
        if before[i] >= 0:
            slot = claim_pair(pair_keys, pair_stamps, pair_ids, before[i], token, now)
            pair_ids[slot] = token_ids[token]
            pair_scores[slot] = token_scores[token]


@njit
def successors(rows, previous, token, out_ids, out_scores):
    """Entries of the pair's row, else of the token's; returns how many."""
    token_ids, token_scores, pair_keys, _, pair_ids, pair_scores = rows
    vocab_size, width = token_ids.shape
    slot = find_pair(pair_keys, previous, token) if previous >= 0 else -1
    count = 0
    if slot < 0 and (token < 0 or token >= vocab_size):
        return 0
    for rank in range(width):
        found = pair_ids[slot, rank] if slot >= 0 else token_ids[token, rank]
        if 0 <= found < vocab_size:
            out_ids[count] = found
            out_scores[count] = pair_scores[slot, rank] if slot >= 0 else token_scores[token, rank]
            count += 1
    return count


@njit
def _add(tokens, parents, depths, probs, sources, count, token, parent, prob, source):
    tokens[count] = token
    parents[count] = parent
    depths[count] = depths[parent] + 1
    probs[count] = prob
    sources[count] = source
    return count + 1


@njit
def spine_tree(
    rows, previous, root, chain, chain_length, spine_length, budget, max_depth, branch_depth, spine_share, min_score,
    tokens, parents, depths, probs, sources,
):  # fmt: skip
    """GOOSE's tree of at most `budget` nodes, the root included, in its order of creation. Returns how many.

    1. the first `spine_length` tokens of the chain, one below the other; 2. alternatives to the chain's first token at
    the root; 3. alternatives at the spine's nodes, their number falling as 1/i; 4. the branches, extended breadth-first
    in proportion to the score each node was drafted at.
    """
    width = rows[0].shape[1]
    ids = np.empty(width, np.int32)
    scores = np.empty(width, np.float32)
    node_scores = np.empty(budget, np.float32)
    frontier = np.empty(budget, np.int32)
    end = 0
    tokens[0] = root
    parents[0] = -1
    depths[0] = 0
    probs[0] = 1.0
    sources[0] = 0
    count = 1
    for i in range(spine_length):
        count = _add(tokens, parents, depths, probs, sources, count, chain[i], i, 1.0, FROM_CONTEXT)

    branch_budget = budget - 1 - spine_length
    on_spine = 0
    if spine_length > 0 and branch_budget > 0:
        on_spine = max(1, int(branch_budget * spine_share))
    at_root = branch_budget - on_spine

    attached = 0
    found = successors(rows, previous, root, ids, scores) if max_depth > 0 else 0
    for rank in range(found):
        if attached >= at_root or scores[rank] < min_score:
            break
        if chain_length > 0 and ids[rank] == chain[0]:
            continue
        node_scores[count] = scores[rank]
        frontier[end] = count
        end += 1
        attached += 1
        count = _add(tokens, parents, depths, probs, sources, count, ids[rank], 0, scores[rank], FROM_ADJACENCY)

    harmonic = 0.0
    for i in range(spine_length):
        harmonic += 1.0 / (i + 1)
    left = on_spine
    for node in range(1, spine_length + 1):
        if left <= 0:
            break
        share = min(max(1, int(on_spine * (1.0 / node) / harmonic)), left)
        left -= share  # whether or not the node has as many alternatives
        if node >= max_depth:
            continue
        attached = 0
        found = successors(rows, tokens[node - 1], tokens[node], ids, scores)
        for rank in range(found):
            if attached >= share:
                break
            if node < spine_length and ids[rank] == tokens[node + 1]:
                continue
            if scores[rank] < min_score:
                break
            node_scores[count] = scores[rank]
            frontier[end] = count
            end += 1
            attached += 1
            count = _add(tokens, parents, depths, probs, sources, count, ids[rank], node, scores[rank], FROM_ADJACENCY)

    begin = 0
    while begin < end and count < budget:
        node = frontier[begin]
        begin += 1
        if depths[node] >= min(branch_depth, max_depth):
            continue
        found = successors(rows, tokens[parents[node]], tokens[node], ids, scores)
        # The score is the node's own, not its path's.
        allowed = max(1, min(found, math.ceil((budget - count) * node_scores[node])))
        allowed = min(allowed, max(1, width // depths[node]))
        for rank in range(min(found, allowed)):
            if count >= budget or scores[rank] < min_score:
                break
            node_scores[count] = scores[rank]
            frontier[end] = count
            end += 1
            prob = probs[node] * scores[rank]
            count = _add(tokens, parents, depths, probs, sources, count, ids[rank], node, prob, FROM_ADJACENCY)
    return count
