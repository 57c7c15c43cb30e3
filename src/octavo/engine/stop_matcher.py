"""Find stop strings in a stream of characters (Aho-Corasick), in time linear in the text.

A state is a node of the tree of all stop strings: the longest end of the text so far that is the
beginning of one of them.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache

ROOT = 0


class StopMatcher:
    """Immutable once built; the caller keeps the state."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._fallback = [ROOT]
        self.depth = [0]
        """Characters at the end of the text that may still become a stop string."""
        self.match_length = [0]
        """Length of the longest stop string that ends here; 0 for none."""
        for stop in stops:
            self._insert(stop)
        self._link()

    def scan(self, state: int, text: str) -> tuple[int, int]:
        """Feed characters until a stop string ends.

        Returns the new state, and how many characters were fed up to the end of the stop
        string; -1 if none ended in this text.
        """
        children, fallback, match_length = self._children, self._fallback, self.match_length
        for position, character in enumerate(text):
            while (following := children[state].get(character)) is None and state != ROOT:
                state = fallback[state]
            state = ROOT if following is None else following
            if match_length[state]:
                return state, position + 1
        return state, -1

    def _insert(self, stop: str) -> None:
        node = ROOT
        for character in stop:
            following = self._children[node].get(character)
            if following is None:
                following = self._children[node][character] = len(self._children)
                self._children.append({})
                self._fallback.append(ROOT)
                self.depth.append(self.depth[node] + 1)
                self.match_length.append(0)
            node = following
        self.match_length[node] = len(stop)

    def _link(self) -> None:
        """Breadth first, so that every fallback is linked before it is needed."""
        queue = deque(self._children[ROOT].values())
        while queue:
            node = queue.popleft()
            for character, child in self._children[node].items():
                queue.append(child)
                target = self._fallback[node]
                while character not in self._children[target] and target != ROOT:
                    target = self._fallback[target]
                self._fallback[child] = self._children[target].get(character, ROOT)
                # a node's own match is longer than its fallback's, so it begins earlier
                if not self.match_length[child]:
                    self.match_length[child] = self.match_length[self._fallback[child]]


@lru_cache(maxsize=64)
def matcher_for(stops: tuple[str, ...]) -> StopMatcher:
    """The matcher of these stop strings, shared by all answers that ask for them."""
    return StopMatcher(stops)
