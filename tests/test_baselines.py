"""The published strategies: literal cases for each rule, and random runs against plain readings of the papers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from drafts import VOCAB, begun, drafted, emit, ids, paths, random_top, walk

from retrodraft.baselines.goose import Goose
from retrodraft.baselines.lookup import PromptLookup
from retrodraft.baselines.recycling import TEMPLATE, Template, TokenRecycling, template_paths
from retrodraft.baselines.suffix import SuffixDecoding
from retrodraft.strategy import TopLogits
from retrodraft.tree import DraftTree

KINDS = (PromptLookup, TokenRecycling, SuffixDecoding, Goose)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_limits_hold_and_runs_repeat(kind: Any, seed: int) -> None:
    def run() -> list[Any]:
        rng = np.random.default_rng(seed)
        strategy, record = kind(VOCAB), []
        for _ in range(2):
            row = strategy.row()
            prompt = rng.integers(0, 4, rng.integers(1, 60)).astype(np.int32)
            prompt[rng.random(len(prompt)) < 0.05] = VOCAB + 3  # a placeholder that the model has no row for
            top = random_top(rng, len(prompt), strategy.top_k) if strategy.top_k else None
            row.begin(prompt, top)
            root = int(prompt[-1])
            for _ in range(30):
                budget, depth = (int(rng.choice([0, 1, 2, 8, 60, 100])), int(rng.choice([1, 2, 3, 50])))
                chain = bool(rng.random() < 0.2)
                tree = drafted(row, budget, depth, chain)
                assert tree.token_ids[0] == root and tree.parents[0] == -1
                assert len(tree) <= budget + 1 and tree.depths.max() <= depth
                assert (tree.token_ids[1:] >= 0).all() and (tree.token_ids[1:] < VOCAB).all()
                assert (tree.parents[1:] < np.arange(1, len(tree))).all()
                assert (tree.depths[1:] == tree.depths[tree.parents[1:]] + 1).all()
                assert len(set(paths(tree))) == len(tree) - 1
                assert tree.sources[0] == 0 and set(tree.sources[1:].tolist()) <= set(kind.proposers)
                if chain:
                    assert tree.parents.tolist() == list(range(-1, len(tree) - 1))
                record.append((tree.token_ids.tolist(), tree.parents.tolist(), tree.probs.tolist()))
                path, emitted = walk(rng, tree)
                top = random_top(rng, len(tree), strategy.top_k, 0.2) if strategy.top_k else None
                row.commit(tree, path, ids(*emitted), top)
                root = emitted[-1]
        return record

    assert run() == run()


@pytest.mark.parametrize("kind", KINDS)
def test_spine_comes_first(kind: Any) -> None:
    rng = np.random.default_rng(0)
    strategy = kind(VOCAB)
    row = strategy.row()
    prompt = rng.integers(0, 5, 80).astype(np.int32)
    row.begin(prompt, random_top(rng, 80, strategy.top_k) if strategy.top_k else None)
    for _ in range(20):
        tree = drafted(row)
        followed = {int(p): n for n, p in reversed(list(enumerate(tree.parents.tolist()))) if n}
        assert all(child == node + 1 for node, child in followed.items())  # depth-first
        path, emitted = walk(rng, tree)
        row.commit(tree, path, ids(*emitted), random_top(rng, len(tree), strategy.top_k) if strategy.top_k else None)


def test_prompt_lookup_takes_the_longest_ngram_and_of_its_windows_the_first() -> None:
    #       3-gram (1 2 3) first at 0, then at 5; the 2-gram (2 3) and the unigram 3 occur earlier nowhere else
    text = [1, 2, 3, 7, 8, 1, 2, 3, 9, 9, 1, 2, 3]
    assert paths(drafted(begun(PromptLookup(VOCAB), text)))[-1] == (7, 8, 1, 2, 3, 9, 9, 1, 2, 3)
    # a later window of 3 beats an earlier one of 2
    text = [2, 3, 7, 1, 2, 3, 8, 1, 2, 3]
    assert paths(drafted(begun(PromptLookup(VOCAB), text)))[-1] == (8, 1, 2, 3)
    # Hugging Face's default never looks at more than 2
    assert paths(drafted(begun(PromptLookup(VOCAB, max_ngram=2), text)))[-1] == (7, 1, 2, 3, 8, 1, 2, 3)


def test_prompt_lookup_limits_and_misses() -> None:
    text = [5, *range(10, 30), 5]
    row = begun(PromptLookup(VOCAB), text)
    assert len(drafted(row)) == 11
    assert len(drafted(row, budget=4)) == 5
    assert len(drafted(row, max_depth=3)) == 4
    assert len(drafted(begun(PromptLookup(VOCAB), [1, 2, 3]))) == 1
    assert len(drafted(begun(PromptLookup(VOCAB), [1]))) == 1
    row = begun(PromptLookup(VOCAB), [4, 6, VOCAB, 6, 4])
    assert paths(drafted(row)) == [(6,)]  # ids that the model has no row for end the chain
    emit(row, 6)
    assert len(drafted(row)) == 1  # (4 6) was followed by such an id


@pytest.mark.parametrize("seed", range(5))
def test_prompt_lookup_equals_hugging_face(seed: int) -> None:
    torch = pytest.importorskip("torch")
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    rng = np.random.default_rng(seed)
    text = rng.integers(0, 6, rng.integers(2, 120)).astype(np.int32)
    row = begun(PromptLookup(VOCAB), text)
    for token in rng.integers(0, 6, 40).tolist():
        generator = PromptLookupCandidateGenerator(
            num_output_tokens=10, max_matching_ngram_size=3, max_length=len(text) + 100
        )
        expected = generator.get_candidates(torch.tensor(text[None].astype(np.int64)))[0][0, len(text) :].tolist()
        found = paths(drafted(row))
        assert (list(found[-1]) if found else []) == expected
        emit(row, token)
        text = np.append(text, np.int32(token))


def test_template_is_the_papers() -> None:
    assert Counter(len(path) for path in template_paths()) == {1: 8, 2: 21, 3: 25, 4: 15, 5: 8, 6: 3}
    assert {(0, 0, 0, 0, 0, 1), (0, 0, 0, 1, 0, 0), (0, 0, 7), (7, 0)} <= set(template_paths())
    assert {parent for parent in TEMPLATE if parent} <= set(template_paths())


@pytest.mark.parametrize("size", [1, 2, 8, 16, 60, 79, 80, 200])
def test_cut_templates_keep_prefixes_and_nest(size: int) -> None:
    cut = Template(size, False).paths
    assert len(cut) == min(size, 80)
    assert all(path[:-1] in cut or len(path) == 1 for path in cut)
    assert set(Template(size - 1, False).paths) <= set(cut)
    assert Template(size, True).paths == [(0,) * d for d in range(1, min(size, 6) + 1)]


def test_recycling_reads_rows_and_skips_cold_ones() -> None:
    strategy = TokenRecycling(VOCAB)
    row = begun(strategy, [3, 5])
    assert len(drafted(row)) == 1  # the prompt is not harvested
    strategy.matrix[5] = [10, 11, -1, -1, -1, -1, -1, -1]
    strategy.matrix[11] = range(20, 28)
    assert paths(drafted(row, budget=80)) == [(10,), (11,), (11, 20), (11, 21), (11, 22), (11, 23)]


def test_recycling_overwrites_from_all_nodes_and_the_last_level_wins() -> None:
    strategy = TokenRecycling(VOCAB)
    row = begun(strategy, [5])
    # node order is depth-first: 7 is at nodes 1 (depth 1), 3 (depth 2) and 4 (depth 1)
    tree = DraftTree.from_nodes(5, [8, 9, 6, 9, 6], [0, 1, 0, 3, 1])
    assert tree.token_ids.tolist() == [5, 8, 9, 6, 6, 9]
    top = TopLogits(np.arange(6, dtype=np.int32)[:, None] + np.arange(8, dtype=np.int32), np.ones((6, 8), np.float32))
    top.token_ids[1] = -1  # not looked at
    row.commit(tree, [0], ids(4), top)
    assert strategy.matrix[5, 0] == 0 and strategy.matrix[8, 0] == -1
    assert strategy.matrix[9, 0] == 5  # both at depth 2: the later node
    assert strategy.matrix[6, 0] == 3  # the deeper node, although node 4 comes later
    assert drafted(row).token_ids[0] == 4
    strategy.reset()
    assert (strategy.matrix == -1).all()


@pytest.mark.parametrize("seed", range(3))
def test_recycling_against_plain_python(seed: int) -> None:
    rng = np.random.default_rng(seed)
    strategy = TokenRecycling(VOCAB)
    row = begun(strategy, [1])
    root, matrix = 1, {}
    for _ in range(60):
        budget = int(rng.choice([3, 20, 80]))
        tree = drafted(row, budget)
        tokens = {(): root}
        for path in Template(budget, False).paths:
            ranked = matrix.get(tokens.get(path[:-1]), [])
            if path[-1] < len(ranked):
                tokens[path] = ranked[path[-1]]
        expected = {tuple(tokens[path[: d + 1]] for d in range(len(path))) for path in tokens if path}
        assert set(paths(tree)) == expected
        top = random_top(rng, len(tree), 8, 0.3)
        for node in sorted(range(len(tree)), key=lambda n: int(tree.depths[n])):
            if top.token_ids[node, 0] >= 0:
                matrix[int(tree.token_ids[node])] = top.token_ids[node].tolist()
        path, emitted = walk(rng, tree)
        row.commit(tree, path, ids(*emitted), top)
        root = emitted[-1]


def suffix_oracle(texts: list[list[int]], query: list[int], budget: int, max_depth: int) -> tuple[float, int, Any]:
    """Best (score, match length) by counting substrings, and the function that gives a path's probability."""
    counts: Counter[tuple[int, ...]] = Counter()
    for text in texts:
        for start in range(len(text)):
            for end in range(start + 1, min(start + 64, len(text)) + 1):
                counts[tuple(text[start:end])] += 1
    best = (0.0, 0)
    for match_len in range(1, min(len(query), 64)):
        suffix = tuple(query[-match_len:])
        if not counts[suffix]:
            break
        size, score, frontier = min(budget, match_len), 0.0, [(1.0, suffix)]
        while size >= 0 and frontier:
            frontier.sort(key=lambda item: -item[0])
            prob, string = frontier.pop(0)
            score += prob if string is not suffix else 0.0
            size -= 1
            if len(string) < 64 and len(string) - match_len < max_depth:
                for token in range(VOCAB):
                    share = prob * counts[(*string, token)] / counts[string]
                    if share >= 0.1:
                        frontier.append((share, (*string, token)))
        if score >= best[0] - 1e-9:
            best = (max(score, best[0]), match_len)

    def share_of(path: tuple[int, ...], match_len: int) -> float:
        suffix = tuple(query[-match_len:])
        return counts[(*suffix, *path)] / counts[suffix]

    return (*best, share_of)


@pytest.mark.parametrize("budget,max_depth", [(2, 50), (8, 50), (60, 3), (60, 50)])
@pytest.mark.parametrize("seed", range(3))
def test_suffix_against_plain_python(seed: int, budget: int, max_depth: int) -> None:
    rng = np.random.default_rng(seed)
    strategy = SuffixDecoding(VOCAB)
    responses = []
    for _ in range(3):
        block = rng.integers(0, 4, 12).tolist()
        text = rng.integers(0, 4, 10).tolist() + block + rng.integers(0, 4, 5).tolist()
        row, response = begun(strategy, text), []
        for token in [*block, *rng.integers(0, 4, 8).tolist()]:
            emit(row, token)
            text.append(token)
            response.append(token)
            tree = drafted(row, budget, max_depth)
            local = suffix_oracle([text], text, budget, max_depth)
            earlier = suffix_oracle(responses, text, budget, max_depth)
            wins = earlier[0] > local[0] + 1e-9
            score, match_len, share_of = earlier if wins else local
            assert float(tree.probs[1:].sum()) == pytest.approx(score, abs=1e-5)
            assert set(tree.sources[1:].tolist()) <= {2 if wins else 1}
            for path, prob in zip(paths(tree), tree.probs[1:].tolist(), strict=True):
                assert prob == pytest.approx(share_of(path, match_len), abs=1e-6)
        responses.append(response)


def test_suffix_counts_the_query_and_prefers_the_longer_match() -> None:
    # (2) was followed by 3, and so was (1 2): one earlier occurrence of two, the other being the text's end
    tree = drafted(begun(SuffixDecoding(VOCAB), [1, 2, 3, 4, 5, 1, 2]))
    assert paths(tree) == [(3,), (3, 4)]  # as many nodes as the match is long: m = 2
    assert tree.probs[1:].tolist() == [0.5, 0.5]
    # Match (2): 3 or 4 or the end, a third each, one node. Match (1 2): 3 or the end, and with it two nodes.
    tree = drafted(begun(SuffixDecoding(VOCAB), [1, 2, 3, 6, 2, 4, 7, 1, 2]))
    assert paths(tree) == [(3,), (3, 6)]


def test_suffix_ties_go_to_the_longer_match_and_to_the_local_tree() -> None:
    strategy = SuffixDecoding(VOCAB)
    row = begun(strategy, [9])
    emit(row, 1, 2, 3)
    # The local tree gives (2) -> 5 one half; the global one (2) -> 3 all of it.
    tree = drafted(begun(strategy, [2, 5, 2]))
    assert paths(tree) == [(3,)] and tree.sources[1] == 2 and tree.probs[1] == 1.0
    row = begun(strategy, [9])
    emit(row, 2, 4, 2, 4)  # global counts: (2) 3, (2 3) 1, (2 4) 2
    # local (2) -> 4: two of three as well
    tree = drafted(begun(strategy, [2, 4, 6, 2, 4, 7, 2]), budget=1)
    assert paths(tree) == [(4,)] and tree.sources[1] == 1
    # With one node for each, matches 1 and 2 both score one half; after the longer one comes 8.
    tree = drafted(begun(SuffixDecoding(VOCAB), [1, 2, 8, 2, 7, 7, 2, 7, 0, 1, 2]), budget=1)
    assert paths(tree) == [(8,)]


def test_suffix_chain_follows_the_most_frequent_continuation() -> None:
    text = [1, 2, 3, 5, 10, 1, 2, 3, 4, 11, 1, 2, 3, 4, 12, 1, 2]
    tree = drafted(begun(SuffixDecoding(VOCAB), text), chain=True)
    assert paths(tree) == [(3,), (3, 4)]
    assert tree.probs[1:].tolist() == pytest.approx([0.75, 0.5])


def test_suffix_alpha_scales_the_budget() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    assert len(drafted(begun(SuffixDecoding(VOCAB, alpha=2.0), text))) == 5


def test_suffix_drafts_never_leave_a_depth_of_64() -> None:
    block = [t % 37 for t in range(0, 111)]
    block = [b + (i // 37) * 4 for i, b in enumerate(block)]
    row = begun(SuffixDecoding(VOCAB), [*block, *block[:50]])
    tree = drafted(row)
    # A match of m leaves room for 64 - m drafted tokens and pays for m of them: 32 are the most.
    assert len(tree) == 33


def test_suffix_global_tree_holds_responses_of_earlier_requests_only() -> None:
    strategy = SuffixDecoding(VOCAB)
    first = begun(strategy, [30, 31, 32])
    emit(first, 20, 21, 22)
    assert paths(drafted(begun(strategy, [40, 20]))) == [(21,)]  # announced: the response counts
    assert paths(drafted(begun(strategy, [40, 22]))) == []  # nothing crosses the end of a response
    assert paths(drafted(begun(strategy, [40, 30]))) == []  # prompts don't count
    emit(first, 23, 24)  # goes on: counts with the next request, and not twice
    assert paths(drafted(begun(strategy, [40, 23]))) == [(24,)]
    strategy.reset()
    emit(first, 25, 26)
    assert paths(drafted(begun(strategy, [40, 25]))) == []


def test_suffix_rows_of_one_batch_do_not_see_each_other() -> None:
    strategy = SuffixDecoding(VOCAB)
    rows = [strategy.row(), strategy.row()]
    for row in rows:
        row.begin(ids(7), None)
    emit(rows[0], 1, 2)
    emit(rows[1], 3, 1)
    assert paths(drafted(rows[1])) == []


def test_suffix_forgets_the_oldest_responses_first() -> None:
    strategy = SuffixDecoding(VOCAB, max_cached_tokens=12)
    for start in (10, 20, 30, 40):
        emit(begun(strategy, [1]), start, start + 1, start + 2)
    strategy.row()
    assert len(strategy.responses) <= 12
    assert paths(drafted(begun(strategy, [1, 40]))) == [(41,)]
    assert paths(drafted(begun(strategy, [1, 10]))) == []
