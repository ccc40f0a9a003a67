"""Candidates for the next token of one tree node, each with the calibration cell that its evidence falls into.

Three kinds of store answer, and all speak only in tokens and features:

- suffix automata (the request, the session's history, the workspace's files, a predicted output): the continuations of
  the longest match and of its shorter suffixes, with the match length, the share of the occurrences that continued so,
  and how many there were;
- corpora on disk: the same for the longest match in each shard;
- adjacency rows (Token Recycling): the target's own probabilities after the last pair of tokens and the last token.

A token's evidence is reduced to a cell number; the calibration table holds, for each cell, how often a candidate of
that cell was what the target said. So every store is judged by its outcomes, on one scale, and none by a hand-set
weight. Corpora and dense drafts are foreign texts, which may have nothing to do with this one: what they say makes a
second cell, so that the first is what it would be without them. Cells are laid out as [match, pair, token]:

    match 0..432   0 = no text proposed it, else 1 + ((scope * 2 + shorter) * 6 + length bucket) * 6 + share bucket
    pair  0..23    (0 pair row, 1 token row only, 2 neither) * 8 + probability bucket (0 = not among the row's tokens)
    token 0..5     0 = no token row, 1 = not among its tokens, 2..5 probability bucket
"""

from retrodraft.kernels.adjacency import ONE, WIDTH, find_pair
from retrodraft.kernels.jit import borrowing_njit
from retrodraft.kernels.suffix_array import corpus_candidates
from retrodraft.kernels.suffix_automaton import COUNT, HEAD, LENGTH, LINK, NEXT, TARGET, TOKEN

NUM_SCOPES, NUM_SHARES = 6, 6
REQUEST, SESSION, WORKSPACE, PREDICTION, GLOBAL, DENSE = 0, 1, 2, 3, 4, 5
PER_SCOPE = 72  # match numbers of one scope
NUM_MATCH, NUM_PAIR, NUM_TOKEN = 1 + NUM_SCOPES * PER_SCOPE, 24, 6
NUM_CELLS = NUM_MATCH * NUM_PAIR * NUM_TOKEN
FIRST_FOREIGN_CELL = (1 + GLOBAL * PER_SCOPE) * NUM_PAIR * NUM_TOKEN
MAX_CANDIDATES = 48  # of one node
MAX_ORDERS = 4  # suffixes of the match that are asked, longest first
MAX_EDGES = 8  # continuations of one suffix that are looked at, newest first
FOREIGN_MARGIN = 3  # tokens by which a foreign text must match longer than an own one to be asked at all

FROM_ADJACENCY = 1 << NUM_SCOPES  # who proposed a candidate, as bits; a text of scope s is 1 << s
FOREIGN = 1 << GLOBAL | 1 << DENSE  # texts that may have nothing to do with this one
CONTEXT = 64  # newest tokens of the text that are kept at hand

# Columns of `found` int32 [NUM_COLUMNS, MAX_CANDIDATES], which `gather` fills; the first four are its answer.
TOKENS, CELLS, FOREIGN_CELLS, SOURCES, MATCH, MATCH_LENGTH, FOREIGN_MATCH, FOREIGN_LENGTH, PAIR, SINGLE = range(10)
NUM_COLUMNS = 10


@borrowing_njit
def _length_bucket(length):
    if length <= 2:
        return length - 1
    if length <= 4:
        return 2
    if length <= 8:
        return 3
    return 4 if length <= 16 else 5


@borrowing_njit
def _share_bucket(count, total, num_followers):
    if num_followers == 1:
        return min(total, 3) - 1
    share = count / total
    if share > 0.6:
        return 3
    return 4 if share > 0.3 else 5


@borrowing_njit
def _pair_bucket(prob):
    if prob > 0.3:
        return 1 if prob > 0.9 else 2 if prob > 0.6 else 3
    if prob > 0.03:
        return 4 if prob > 0.1 else 5
    return 6 if prob > 0.005 else 7


@borrowing_njit
def _token_bucket(prob):
    if prob > 0.15:
        return 2 if prob > 0.5 else 3
    return 4 if prob > 0.03 else 5


@borrowing_njit
def _place(found, size, token):
    """Index of `token` among the candidates, which it may join; -1 where they are full."""
    for i in range(size):
        if found[TOKENS, i] == token:
            return i
    if size == MAX_CANDIDATES or token < 0:
        return -1
    found[TOKENS, size] = token
    for column in range(1, NUM_COLUMNS):
        found[column, size] = 0
    return size


@borrowing_njit
def _offer(scope, shorter, length, count, total, num_followers, token, size, found):
    """Take a text's evidence for `token` if it is the longest match so far; returns the number of candidates.

    Own texts and foreign ones (corpora, dense drafts) are kept apart.
    """
    index = _place(found, size, token)
    if index < 0:
        return size
    match = FOREIGN_MATCH if FOREIGN >> scope & 1 else MATCH
    if length > found[match + 1, index]:
        bucket = (scope * 2 + shorter) * 6 + _length_bucket(length)
        found[match, index] = 1 + bucket * NUM_SHARES + _share_bucket(count, total, num_followers)
        found[match + 1, index] = length
    found[SOURCES, index] |= 1 << scope
    return max(size, index + 1)


@borrowing_njit
def _from_automaton(automaton, edges, scope, state, length, size, found):
    """Continuations of the match `state`, `length` and of its shorter suffixes; returns the number of candidates."""
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
            count = automaton[edges[edge, TARGET], COUNT]
            size = _offer(scope, shorter, length, count, total, num_followers, edges[edge, TOKEN], size, found)
            edge = edges[edge, NEXT]
        if num_followers > 0:
            shorter = 1
        state = automaton[state, LINK]
        if state > 0:
            length = automaton[state, LENGTH]
    return size


@borrowing_njit
def _from_corpora(corpora, spans, context, vocab_size, size, found, followers):
    """Continuations of the longest match in each shard; returns the number of candidates.

    `spans` int32 [num_shards] comes with the match lengths of the context without its last token, a bound of what there
    is to find, and goes with those of the context. `followers` int32 [2, MAX_EDGES] is room for tokens and counts.
    """
    for shard in range(len(corpora)):
        text, order, keys = corpora[shard]
        span = spans[shard]
        spans[shard] = 0
        if span < 0 or text.shape[0] == 0:
            continue
        length, total, num_followers = corpus_candidates(
            text, order, keys, context, context.shape[0], followers[0], followers[1]
        )
        spans[shard] = length if length > 0 else -1
        for i in range(num_followers):
            if followers[0, i] < vocab_size:
                size = _offer(
                    GLOBAL, 0, length, followers[1, i], total, num_followers, followers[0, i], size, found
                )  # fmt: skip
    return size


@borrowing_njit
def gather(stores, scopes, corpora, rows, states, lengths, spans, context, found, followers):
    """Candidates to follow a node, in the columns TOKENS, CELLS and SOURCES of `found`; returns how many.

    `stores[i]` is the (states, edges, table, meta) of the automaton of scope `scopes[i]`, in which the text up to and
    including the node has the match `states[i]`, `lengths[i]`; `corpora` are (tokens, order, keys), their `spans` and
    `followers` as `_from_corpora` says; `rows` are the adjacency tables. `context` int32 [CONTEXT] are the newest
    tokens, the node's own last, filled up in front with -1. O(1) but for the search in the corpora: orders, edges and
    rows are bounded.
    """
    token_ids, token_probs, pair_keys, _, pair_ids, pair_probs = rows
    previous = context[CONTEXT - 2]
    token = context[CONTEXT - 1]
    size = 0
    for i in range(len(stores)):
        if states[i] > 0:
            size = _from_automaton(stores[i][0], stores[i][1], scopes[i], states[i], lengths[i], size, found)
    size = _from_corpora(corpora, spans, context, token_ids.shape[0], size, found, followers)
    slot = find_pair(pair_keys, previous, token) if previous >= 0 else -1
    known = 0 <= token < token_ids.shape[0] and token_ids[token, 0] >= 0
    if slot >= 0:
        for rank in range(WIDTH):
            index = _place(found, size, pair_ids[slot, rank])
            if index >= 0:
                found[PAIR, index] = _pair_bucket(pair_probs[slot, rank] / ONE)
                found[SOURCES, index] |= FROM_ADJACENCY
                size = max(size, index + 1)
    if known:
        for rank in range(WIDTH):
            index = _place(found, size, token_ids[token, rank])
            if index >= 0:
                prob = token_probs[token, rank] / ONE
                found[SINGLE, index] = _token_bucket(prob)
                found[SOURCES, index] |= FROM_ADJACENCY
                if slot < 0:
                    found[PAIR, index] = _pair_bucket(prob)
                size = max(size, index + 1)
    evidence = 0 if slot >= 0 else 1 if known else 2
    for i in range(size):
        single = found[SINGLE, i]
        if known and single == 0:
            single = 1
        rows_say = (evidence * 8 + found[PAIR, i]) * NUM_TOKEN + single
        found[CELLS, i] = found[MATCH, i] * NUM_PAIR * NUM_TOKEN + rows_say
        margin = FOREIGN_MARGIN if found[MATCH, i] > 0 else 0
        if found[FOREIGN_LENGTH, i] > found[MATCH_LENGTH, i] + margin:
            found[FOREIGN_CELLS, i] = found[FOREIGN_MATCH, i] * NUM_PAIR * NUM_TOKEN + rows_say
        else:
            found[FOREIGN_CELLS, i] = -1
    return size
