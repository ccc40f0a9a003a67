"""Candidates from several automata and corpora at once, and drafting from corpora end to end."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chats import letters
from evidence import Offer, automaton_offers, check_order, context_of, match_cell
from tiny import random_prompt, repetitive, tiny_llama

from retrodraft import RetroDraft
from retrodraft.index.adjacency import AdjacencyRows
from retrodraft.index.corpus import MAX_SHARDS, CorpusIndex
from retrodraft.index.fingerprint import tokenizer_fingerprint
from retrodraft.index.memory import Memory, joined
from retrodraft.index.storage import IndexFormatError
from retrodraft.index.suffix_automaton import SuffixAutomaton
from retrodraft.kernels import candidates as c
from retrodraft.kernels.learning import learn_rows
from retrodraft.kernels.suffix_array import MAX_MATCH
from retrodraft.retro import RetroStrategy

VOCAB = 50
Shard = tuple[np.ndarray, ...]
EMPTY: Shard = (np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int64))
for array in EMPTY:
    array.flags.writeable = False  # as mapped ones are
NOTHING = [(c.REQUEST, joined([]))]


def shards_of(folder: Path, parts: list[list[list[int]]]) -> list[tuple[np.ndarray, ...]]:
    """A shard for each list of documents."""
    found = []
    for i, documents in enumerate(parts):
        found += CorpusIndex.build(documents, folder / str(i)).arrays
    return found


def corpus_offers(documents: list[list[int]], context: list[int]) -> list[Offer]:
    """What a shard says: what follows the longest suffix that something follows, by looking everywhere."""
    for length in range(min(len(context), MAX_MATCH), 0, -1):
        wanted, following, total = context[-length:], Counter[int](), 0
        for document in documents:
            for i in range(len(document) - length + 1):
                if document[i : i + length] == wanted:
                    total += 1
                    following.update(document[i + length : i + length + 1])
        if following:
            assert len(following) <= c.MAX_EDGES
            return [
                (token, c.GLOBAL, 0, length, count, total, len(following))
                for token, count in following.items()
                if token < VOCAB
            ]
    return []


Found = dict[int, tuple[int, int, int]]  # token -> cell, cell by foreign texts, sources


def expected_candidates(offers: list[Offer]) -> Found:
    """Token -> match parts of its cells, and sources; -1 for a foreign cell that is not asked.

    The longest match is the evidence, the first one of equals: of the own texts, and of the corpora, which are asked
    where they match and no own text does, or by four tokens longer.
    """
    found = {}
    for token in {offer[0] for offer in offers}:
        own = [offer for offer in offers if offer[0] == token and offer[1] != c.GLOBAL]
        corpus = [offer for offer in offers if offer[0] == token and offer[1] == c.GLOBAL]
        best = max(own, key=lambda offer: offer[3], default=None)
        other = max(corpus, key=lambda offer: offer[3], default=None)
        asked = other is not None and (best is None or other[3] > best[3] + 3)
        found[token] = (
            0 if best is None else match_cell(best),
            match_cell(other) if asked and other is not None else -1,
            sum({1 << offer[1] for offer in (*own, *corpus)}),
        )
    return found


def gathered(
    stores: list[tuple[int, SuffixAutomaton]], shards: list[Shard], context: list[int],
    spans: np.ndarray | None = None, rows: AdjacencyRows | None = None, state: tuple[int, int] | None = None,
) -> Found:  # fmt: skip
    """The kernel's answer; `state` is the only automaton's match, where it is not the context's in that text."""
    found = np.empty((c.NUM_COLUMNS, c.MAX_CANDIDATES), np.int32)
    places = (
        [state] if state is not None else [automaton.follow(np.array(context, np.int32)) for _, automaton in stores]
    )
    count = c.gather(
        tuple(automaton.arrays for _, automaton in stores), np.array([scope for scope, _ in stores], np.int32),
        tuple(shards), (rows or AdjacencyRows(VOCAB, num_pairs=16)).arrays,
        np.array([state for state, _ in places], np.int32), np.array([length for _, length in places], np.int32),
        np.full(len(shards), MAX_MATCH, np.int32) if spans is None else spans,
        context_of(context[-c.CONTEXT :]), found, np.empty((2, c.MAX_EDGES), np.int32),
    )  # fmt: skip
    columns = found[: c.SOURCES + 1, :count].tolist()
    assert len(set(columns[c.TOKENS])) == count
    return {token: (cell, foreign, source) for token, cell, foreign, source in zip(*columns, strict=True)}


def matched(found: Found) -> Found:
    """With the cells reduced to their match parts, where no adjacency row said anything."""
    rows = c.NUM_PAIR * c.NUM_TOKEN
    return {token: (cell // rows, foreign // rows, sources) for token, (cell, foreign, sources) in found.items()}


def documents(rng: np.random.Generator, count: int, alphabet: int) -> list[list[int]]:
    return [repetitive(rng, int(rng.integers(1, 60)), alphabet) for _ in range(count)]


@pytest.mark.parametrize("seed", range(25))
def test_the_longest_match_of_all_stores_is_the_evidence(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    alphabet = int(rng.integers(2, 8))
    memory = Memory(1 << 16)
    for text in documents(rng, 12, alphabet):
        memory.add_text(text)
    memory.set_files(documents(rng, 2, alphabet))
    texts = [joined(documents(rng, 1, alphabet)), joined(documents(rng, 1, alphabet)), *memory.automata]
    stores = list(zip((c.REQUEST, c.PREDICTION, c.SESSION, c.SESSION, c.WORKSPACE), texts, strict=True))
    parts = [documents(rng, 3, alphabet), documents(rng, 2, alphabet)]
    parts[0].append([1, VOCAB + 3, 1, 0])  # an id that the model does not have
    shards = shards_of(tmp_path, parts)
    for _ in range(20):
        context = repetitive(rng, int(rng.integers(1, 90)), alphabet)
        if rng.random() < 0.7:
            source = [*parts[0], *parts[1]][int(rng.integers(0, 5))]
            context += source[: int(rng.integers(1, len(source) + 1))]
        offers = [
            offer
            for scope, text in stores
            for offer in automaton_offers(scope, text, *text.follow(np.array(context, np.int32)))
        ]
        offers += [offer for part in parts for offer in corpus_offers(part, context)]
        found = gathered(stores, shards, context)
        assert matched(found) == expected_candidates(offers)
        assert max(found, default=0) < VOCAB


def test_adjacency_rows_join_the_evidence(tmp_path: Path) -> None:
    """A token of a text that the rows know too carries both marks, and a token of the rows alone only theirs."""
    rows = AdjacencyRows(VOCAB, num_pairs=16)
    ids, probs = np.array([[5, 6]], np.int32), np.array([[0.7, 0.2]], np.float32)
    learn_rows(rows.arrays, np.array([3], np.int32), np.array([4], np.int32), ids, probs, 1.0, 1)
    shards = shards_of(tmp_path, [[[3, 4, 5], [3, 4, 7]]])
    found = gathered([(c.SESSION, joined([[4, 5]]))], shards, [3, 4], rows=rows)
    both = 1 << c.SESSION | 1 << c.GLOBAL
    assert {token: source for token, (_, _, source) in found.items()} == {
        5: both | c.FROM_ADJACENCY, 6: c.FROM_ADJACENCY, 7: 1 << c.GLOBAL,
    }  # fmt: skip
    cells = {token: cells for token, (*cells, _) in found.items()}

    def cell(match: int, pair: int, single: int) -> int:
        return (match * c.NUM_PAIR + pair) * c.NUM_TOKEN + single

    corpus = match_cell((0, c.GLOBAL, 0, 2, 1, 2, 2))  # length 2, one of two
    # The corpus matches one token longer than the session: not enough to be asked about 5.
    assert cells[5] == [cell(match_cell((5, c.SESSION, 0, 1, 1, 1, 1)), 2, 2), -1]
    assert cells[6] == [cell(0, 4, 3), -1]
    assert cells[7] == [cell(0, 0, 1), cell(corpus, 0, 1)]  # without the corpus it would be an unlikely token


@pytest.mark.parametrize("seed", range(8))
def test_shards_in_any_order_and_empty_ones(seed: int, tmp_path: Path) -> None:
    """Order may decide which of two equal matches counts, never what is offered, by whom, or at what length."""
    rng = np.random.default_rng(seed)
    parts = [documents(rng, 3, 5) for _ in range(4)]
    shards = shards_of(tmp_path, parts)
    whole = shards_of(tmp_path / "whole", [[document for part in parts for document in part]])

    def lengths(found: Found) -> dict[int, tuple[int, int]]:
        return {token: ((foreign - 1) // 6, sources) for token, (_, foreign, sources) in matched(found).items()}

    for _ in range(20):
        context = repetitive(rng, 20, 5)
        found = gathered(NOTHING, shards, context)
        assert lengths(gathered(NOTHING, shards[::-1], context)) == lengths(found)
        assert gathered(NOTHING, [EMPTY, *shards, EMPTY], context) == found
        joint = lengths(gathered(NOTHING, whole, context))
        assert {token: lengths(found)[token] for token in joint} == joint  # the longest match of all is among them


@pytest.mark.parametrize("seed", range(8))
def test_spans_save_searches_only(seed: int, tmp_path: Path) -> None:
    """Along a text, a shard that had no match for a token is not asked after the next one: there a match has one token.

    Everything else is as if each shard were searched at each token.
    """
    rng = np.random.default_rng(seed)
    shards = shards_of(tmp_path, [documents(rng, 3, 9), documents(rng, 2, 4)])
    text = [int(token) for token in rng.integers(0, 12, 200)]
    spans = np.full(2, MAX_MATCH, np.int32)
    alone = [np.full(1, MAX_MATCH, np.int32) for _ in shards]
    skipped = 0
    for end in range(1, len(text)):
        context, searched = text[:end], []
        for shard, span in zip(shards, alone, strict=True):
            before = int(span[0])
            searched.append(gathered(NOTHING, [shard], context))
            found = gathered(NOTHING, [shard], context, spans=span)
            if found != searched[-1]:
                assert not found and before < 0
                assert all((foreign - 1) // 6 % 6 == 0 for _, foreign, _ in matched(searched[-1]).values())
                searched[-1] = {}
                skipped += 1
        assert set(gathered(NOTHING, shards, context, spans=spans)) == {token for each in searched for token in each}
    assert skipped


def test_a_tree_across_stores(tmp_path: Path) -> None:
    """A path may begin in one store and go on in another, and each node names its store."""
    strategy = RetroStrategy(VOCAB)
    memory = Memory(1 << 16)
    memory.add_text([1, 2, 3, 4])
    memory.set_files([[3, 4, 5, 6]])
    row = strategy.row(memory, prediction=np.array([9, 9, 5, 6, 7, 8], np.int32))
    row.begin(np.array([30, 1, 2], np.int32), None)
    tree = row.draft(np.zeros(40), 20, False)
    check_order(tree)
    mask = tree.ancestor_mask()
    paths = {
        tuple(tree.token_ids[mask[node].nonzero()[0][1:]].tolist()): int(tree.sources[node])
        for node in range(1, len(tree))
    }
    names = {path: strategy.proposers[source] for path, source in paths.items() if source in strategy.proposers}
    assert names[(3,)] == "session" and names[(3, 4, 5)] == "workspace" and names[(3, 4, 5, 6, 7)] == "prediction"
    assert names[(9,)] == names[(9, 9)] == "prediction"
    assert (
        paths[(3, 4)] == 1 << c.SESSION | 1 << c.WORKSPACE
        and paths[(3, 4, 5, 6)] == 1 << c.WORKSPACE | 1 << c.PREDICTION
    )


def built(folder: Path, documents: list[list[int]], **facts: Any) -> Path:
    tokenizer = {"name": "letters", "fingerprint": tokenizer_fingerprint(letters()), "vocab_size": 97, **facts}
    CorpusIndex.build(documents, folder, tokenizer=tokenizer)
    return folder


def test_drafting_from_corpora(tmp_path: Path) -> None:
    model, ids = tiny_llama(), random_prompt(12)
    options = dict(max_new_tokens=40, do_sample=False)
    expected = model.generate(ids, **options)
    right = built(tmp_path / "right", [expected[0, 8:30].tolist(), expected[0, 25:].tolist()])
    wrong = built(tmp_path / "wrong", [random_prompt(300, 1)[0].tolist()])
    for corpora in ([right], [str(wrong), CorpusIndex.open(right)], [wrong]):
        rd = RetroDraft(model, letters(), corpora=corpora, budget=12)
        assert torch.equal(rd.generate(ids, **options), expected)
        accepted = rd.stats.num_accepted_tokens_by_proposer["corpus"]
        assert accepted > 20 if right in corpora or len(corpora) == 2 else accepted < 5
        torch.manual_seed(1)
        sampled = rd.generate(ids, max_new_tokens=20, do_sample=True)
        torch.manual_seed(1)
        assert torch.equal(sampled, model.generate(ids, max_new_tokens=20, do_sample=True))


def test_corpora_are_checked(tmp_path: Path) -> None:
    model = tiny_llama()
    path = built(tmp_path / "one", [[5, 6, 7, 8]])
    with pytest.raises(ValueError, match="must be a list of indexes"):
        RetroDraft(model, letters(), corpora=str(path))  # type: ignore[arg-type]
    with pytest.raises(IndexFormatError, match="was built with tokenizer 'other'"):
        other = built(tmp_path / "other", [[5]], name="other", fingerprint="ab" * 32)
        RetroDraft(model, letters(), corpora=[other])
    with pytest.raises(IndexFormatError, match="holds token id 97"):
        RetroDraft(model, corpora=[built(tmp_path / "beyond", [[5, 97]])])
    with pytest.raises(ValueError, match=f"have {MAX_SHARDS + 1} shards"):
        RetroDraft(model, letters(), corpora=[path] * (MAX_SHARDS + 1))
    with pytest.raises(IndexFormatError):
        RetroDraft(model, letters(), corpora=[tmp_path / "nothing"])
    with pytest.raises(ValueError, match="'retro'|corpora"):
        RetroDraft(model, letters(), corpora=[path], strategy="suffix")
    assert len(RetroDraft(model, letters(), corpora=[path] * MAX_SHARDS).strategy.corpora) == MAX_SHARDS
