"""Numbers instead of token ids: they tell of prompts how long they are and what they share."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from hashlib import blake2b

State = bytes


class Pseudonyms:
    """A token's number is a keyed hash of it and of all tokens before it, in its scope.

    So two prompts have equal numbers exactly as far as they are equal from their beginning: all
    that the prefix cache asks of tokens. The key is drawn at random and kept nowhere; without it
    nobody can try what a number stands for, nor see a token come twice in one prompt.
    """

    def __init__(self) -> None:
        self._key = os.urandom(32)

    def begin(self, scope: str) -> State:
        """Where the prompts of a scope begin."""
        return self._hash(b"scope", scope.encode())

    def name(self, text: str) -> str:
        """Instead of a scope or tenant; the empty one stays as it is."""
        return self._hash(b"name", text.encode()).hex() if text else ""

    def extend(self, state: State, token_ids: Iterable[int]) -> tuple[State, list[int]]:
        """The numbers of tokens that follow, and where that leads."""
        numbers: list[int] = []
        for token_id in token_ids:
            state = self._hash(state, token_id.to_bytes(8, "little"))
            numbers.append(int.from_bytes(state[:7], "little"))
        return state, numbers

    def _hash(self, *parts: bytes) -> bytes:
        return blake2b(b"".join(parts), key=self._key, digest_size=16).digest()

    def runs(self, runs: Iterable[tuple[str, int, tuple[int, ...]]]) -> Iterator[tuple[int, ...]]:
        """The numbers of runs of kept prefixes, given as (scope, run that it follows, tokens)."""
        states: list[State] = []
        for scope, parent, token_ids in runs:
            before = self.begin(scope) if parent < 0 else states[parent]
            state, numbers = self.extend(before, token_ids)
            states.append(state)
            yield tuple(numbers)
