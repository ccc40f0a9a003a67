"""What a request may draft from besides its own text: its namespace's earlier texts and files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from retrodraft.index.suffix_automaton import SuffixAutomaton
from retrodraft.kernels.candidates import CONTEXT, SESSION, WORKSPACE

Int32 = npt.NDArray[np.int32]
MAX_BYTES = 256 << 20
BYTES_PER_TOKEN = 100  # of an automaton; about 80 are usual, 120 are possible where few different tokens occur
EXACT_TOKENS = 1 << 17  # up to so many tokens of files, texts that are gone are forgotten at once
BORDER = np.full(1, -1, np.int32)  # between texts; nothing matches or continues across it
SCOPES = (SESSION, SESSION, WORKSPACE)  # of `Memory.automata`


class Memory:
    """The texts of one namespace: earlier ones in about `max_bytes`, and those of its files.

    Earlier texts lie in two automata of half the budget each. When the newer one is full, it becomes the older one and
    that is forgotten, so the newest half of the budget is always there and appending stays O(1) a token.

    Not safe by itself against several threads. Raises ValueError if `max_bytes` is too small to hold anything.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        if max_bytes < 1 << 16:
            raise ValueError(f"max_bytes must be at least 65536, got {max_bytes}")
        self.max_bytes = max_bytes
        self.newer, self.older, self.files = SuffixAutomaton(), SuffixAutomaton(), SuffixAutomaton()
        self.version = 0  # grows with every change, so that matches in the automata can be taken anew
        self.readers = 0  # sequences in decoding that draft from here
        self._half = max_bytes // 2 // BYTES_PER_TOKEN  # tokens of one automaton, borders included
        self._files: dict[int, Sequence[int] | Int32] = {}  # what `files` was made of, by identity

    @property
    def automata(self) -> tuple[SuffixAutomaton, ...]:
        """The stores in the order of `SCOPES`."""
        return self.newer, self.older, self.files

    @property
    def max_tokens(self) -> int:
        """Most tokens of earlier texts that are held at a time; at least half as many of the newest ones are."""
        return 2 * self._half

    @property
    def nbytes(self) -> int:
        """Bytes held by all automata, the files' included."""
        return sum(automaton.nbytes for automaton in self.automata)

    def add_text(self, token_ids: Sequence[int] | Int32) -> None:
        """Append a text, which is a document of its own; of one beyond half the budget, the end. O(tokens)."""
        if not len(token_ids):
            return
        tokens = np.asarray(token_ids, np.int32)[-(self._half - 1) :]
        if len(self.newer) + len(tokens) + 1 > self._half:
            self.newer, self.older = SuffixAutomaton(), self.newer
        _append(self.newer, tokens)
        self.version += 1

    def set_files(self, texts: Iterable[Sequence[int] | Int32], exact: bool = True) -> None:
        """Replace the files' texts. O(tokens of the new ones), as long as none of the old ones is gone.

        A text is known again if it is the same object. Without `exact`, texts that are gone stay in large files' memory
        until they are a quarter of it, so that a change costs its own tokens and not those of all files.
        """
        wanted = {id(text): text for text in texts}
        stale = self._files.keys() - wanted.keys()
        num_stale = sum(len(self._files[key]) for key in stale)
        num_held = len(self.files)
        if stale and (exact or num_held < EXACT_TOKENS or 4 * num_stale > num_held):
            self.files, self._files, stale = SuffixAutomaton(), {}, set()
        for key, text in wanted.items():
            if key not in self._files:
                _append(self.files, text)
        self._files = {**{key: self._files[key] for key in stale}, **wanted}
        self.version += 1

    def clear(self) -> None:
        """Forget everything."""
        self.newer, self.older, self.files = SuffixAutomaton(), SuffixAutomaton(), SuffixAutomaton()
        self._files = {}
        self.version += 1

    def match(self, context: Int32, states: Int32, lengths: Int32) -> None:
        """Write state and length of the context's longest suffix in each automaton; at most CONTEXT tokens count."""
        for i, automaton in enumerate(self.automata):
            states[i], lengths[i] = automaton.follow(context[-CONTEXT:])


def joined(texts: Iterable[Sequence[int] | Int32]) -> SuffixAutomaton:
    """An automaton over several texts, with a border after each."""
    automaton = SuffixAutomaton()
    for token_ids in texts:
        _append(automaton, token_ids)
    return automaton


def _append(automaton: SuffixAutomaton, token_ids: Sequence[int] | Int32) -> None:
    automaton.extend(np.asarray(token_ids, np.int32))
    automaton.extend(BORDER)
