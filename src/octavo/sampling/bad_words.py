"""Sequences of tokens that an output may not hold: the last token of one is barred where the
output ends with the rest of it (R69, C40)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from ..kernels.api import Array


class BadWords:
    """One request's sequences, and as much of its output as they look back on."""

    __slots__ = ("_always", "_longer", "_recent")

    def __init__(self, sequences: Iterable[Sequence[int]], output: Iterable[int]) -> None:
        distinct = {tuple(ids) for ids in sequences}
        always = sorted(ids[0] for ids in distinct if len(ids) == 1)
        self._always: Array = np.array(always, np.int64)
        self._longer: dict[int, list[tuple[list[int], int]]] = {}
        """(all but the last, the last), by the last but one: few are looked at in a step."""
        longest = 1
        for ids in sorted(distinct):
            if len(ids) > 1:
                self._longer.setdefault(ids[-2], []).append((list(ids[:-1]), ids[-1]))
                longest = max(longest, len(ids))
        self._recent: deque[int] = deque(output, maxlen=longest - 1)

    def append(self, token_id: int) -> None:
        """The output grew."""
        self._recent.append(token_id)

    def barred_ids(self) -> Array:
        """[N] int64: what may not come next."""
        candidates = self._longer.get(self._recent[-1], ()) if self._recent else ()
        if not candidates:
            return self._always
        recent = list(self._recent)
        found = [last for prefix, last in candidates if recent[-len(prefix) :] == prefix]
        return np.concatenate([self._always, np.array(found, np.int64)]) if found else self._always
