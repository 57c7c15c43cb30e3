"""A TapeModel that takes masks: it samples only what a grammar allows, and likes to come to an end.

Its favourites are tokens that close something: with plain random choices hardly any JSON ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from beds.tape_model import TapeModel, TapeRow, mix
from octavo.messages import SchedulerOutput, StepResult

CLOSING = frozenset(b'"}],')


class MaskedModel(TapeModel):
    """`token_bytes` tells which tokens close; `prefers` overrules the choice where it may."""

    def __init__(
        self,
        *,
        token_bytes: Callable[[int], bytes],
        eos_token_ids: tuple[int, ...] = (),
        **tape: Any,
    ) -> None:
        super().__init__(**tape)
        self._bytes = [token_bytes(i) for i in range(self.vocab_size)]
        self._eos = list(eos_token_ids)
        self._closing = np.array(
            [i in eos_token_ids or self._closes(token_bytes(i)) for i in range(self.vocab_size)]
        )
        self.prefers: Callable[[list[int]], list[int]] = lambda output: []
        """From the output so far to the tokens that the model would like, the first that may."""
        self._masks: dict[int, bytes] = {}
        self.num_masks = 0

    def say(self, text: str) -> None:
        """Prefer this text, in the longest tokens that may be, and then to end."""
        wanted = text.encode()

        def next_tokens(output: list[int]) -> list[int]:
            done = b"".join(self._bytes[token_id] for token_id in output)
            if not wanted.startswith(done):
                return []
            rest = wanted[len(done) :]
            fitting = [i for i, data in enumerate(self._bytes) if data and rest.startswith(data)]
            fitting.sort(key=lambda i: len(self._bytes[i]), reverse=True)
            return fitting if rest else self._eos

        self.prefers = next_tokens

    @staticmethod
    def _closes(data: bytes) -> bool:
        return bool(data) and data[0] in CLOSING

    def submit(self, plan: SchedulerOutput) -> StepResult:
        self._masks = dict(plan.masks)
        self.num_masks += len(self._masks)
        return super().submit(plan)

    def _next_token(self, row: TapeRow) -> int:
        output = row.token_ids[row.start.num_prompt_tokens :]
        mask = self._masks.get(row.start.row)
        if row.start.params.grammar is None:
            wanted = self.prefers(output)
            return wanted[0] if wanted else super()._next_token(row)
        assert mask is not None, "a row under a grammar came without a mask"
        packed = np.frombuffer(mask, np.uint8)
        allowed = np.unpackbits(packed, count=self.vocab_size, bitorder="little").astype(bool)
        assert allowed.any(), "the grammar leaves no token"
        for token_id in self.prefers(output):
            if allowed[token_id]:
                return token_id
        draw = mix(row.histories[-1], row.start.seed)
        closing = np.flatnonzero(allowed & self._closing)
        if closing.size and draw % 4:
            return int(closing[draw // 4 % closing.size])
        ids = np.flatnonzero(allowed)
        return int(ids[draw // 4 % ids.size])
