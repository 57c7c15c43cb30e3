"""One answer's tokens to pieces of text: whole characters only, stop strings never in part."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from ..outputs import Logprob
from .detokenizer import Detokenizer, Run
from .stop_matcher import ROOT, matcher_for

if TYPE_CHECKING:
    from ..messages import TokenLogprobs
    from ..sampling_params import SamplingParams
    from .tokenizer import Tokenizer


class Piece(NamedTuple):
    """What an answer gains. Joined, the pieces are the whole answer, however it was cut."""

    text: str
    token_ids: tuple[int, ...]
    """The tokens whose text this is."""

    logprobs: tuple[Logprob, ...]
    """One for each of token_ids, if asked for; their bytes, joined, are the text's."""

    finish_reason: str | None
    stop_reason: int | str | None


class TextStream:
    """One per answer. Text comes out token by token, a token as soon as all of it is certain:
    its characters are whole, and none of them may still be part of a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._matcher = matcher_for(params.stop) if params.stop else None
        self._state = ROOT
        self._num_decoded = 0
        self._held: deque[Run] = deque()
        self._num_held = 0
        """Characters in _held."""
        self._unshown: deque[tuple[int, TokenLogprobs | None]] = deque()
        self._finished = False
        self.num_tokens = 0
        """Tokens taken up to the end, those that are no text included."""

    def push(
        self,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] = (),
        finish_reason: str | None = None,
        stop_reason: int | None = None,
    ) -> Piece:
        """Take what the scheduler reports about this answer; returns what can be shown now.

        With finish_reason "stop" the last token is the end-of-sequence or stop id, which is not
        text; with "complete" it is text that completes a grammar. A stop string that is found
        here ends the answer: finish_reason is "stop" and stop_reason the string, and whatever
        comes later is ignored.
        """
        shown = _Shown([], [], [])
        if self._finished:
            return Piece("", (), (), None, None)
        num_tokens = self.num_tokens + len(token_ids)
        if finish_reason == "stop":
            token_ids = token_ids[:-1]
        elif finish_reason == "complete":
            finish_reason = "stop"
        for i, token_id in enumerate(token_ids):
            self.num_tokens += 1
            self._unshown.append((token_id, logprobs[i] if logprobs else None))
            for run in self._detokenizer.push(token_id):
                if stop := self._take(run, shown):
                    return self._piece(shown, "stop", stop)
        self.num_tokens = num_tokens
        if finish_reason is not None:
            for run in self._detokenizer.finish():
                if stop := self._take(run, shown):
                    return self._piece(shown, "stop", stop)
            self._release(self._num_held, shown)
        return self._piece(shown, finish_reason, stop_reason)

    def _take(self, run: Run, shown: _Shown) -> str | None:
        """Look for stop strings in a run, show what is certain; returns the stop string found."""
        self._num_decoded += len(run.pieces)
        self._held.append(run)
        self._num_held += len(run.text)
        if self._matcher is None:
            self._release(self._num_held, shown)
            return None
        fed = 0
        while True:
            self._state, used = self._matcher.scan(self._state, run.text[fed:])
            if used < 0:
                break
            fed += used
            # Text of the first min_tokens tokens ends nothing
            if self._num_decoded > self._params.min_tokens:
                return self._stop(len(run.text) - fed, shown)
        self._release(self._num_held - self._matcher.depth[self._state], shown)
        return None

    def _stop(self, num_after: int, shown: _Shown) -> str:
        """End the answer at the stop string that ends `num_after` characters before the end."""
        assert self._matcher is not None
        length = self._matcher.match_length[self._state]
        end = self._num_held - num_after
        stop = "".join(run.text for run in self._held)[end - length : end]
        keep = end if self._params.include_stop_str_in_output else end - length
        keep -= self._release(keep, shown)
        if keep > 0:
            self._show(_cut(self._held[0], keep), shown)
        self._held.clear()
        return stop

    def _release(self, num_certain: int, shown: _Shown) -> int:
        """Show the held runs that lie within the first `num_certain` characters; returns how
        many characters that is."""
        before = self._num_held
        while self._held and len(self._held[0].text) <= num_certain:
            run = self._held.popleft()
            num_certain -= len(run.text)
            self._num_held -= len(run.text)
            self._show(run, shown)
        return before - self._num_held

    def _show(self, run: Run, shown: _Shown) -> None:
        shown.text.append(run.text)
        for data in run.pieces:
            token_id, logprobs = self._unshown.popleft()
            shown.token_ids.append(token_id)
            if logprobs is not None:
                shown.logprobs.append(self._logprob(token_id, data, logprobs))

    def _logprob(self, token_id: int, data: bytes, given: TokenLogprobs) -> Logprob:
        """An entry whose bytes are what the token adds to the text; a control token that is
        left out of the text adds none, but is named. Alternatives stand each for itself."""
        text = data.decode("utf-8", "replace") if data else self._tokenizer.token_text(token_id)
        num_top = self._params.logprobs
        top = alternatives(self._tokenizer, given, num_top)
        return Logprob(token_id, text, data, given.logprob, given.rank, top)

    def _piece(
        self, shown: _Shown, finish_reason: str | None, stop_reason: int | str | None
    ) -> Piece:
        self._finished = finish_reason is not None
        return Piece(
            "".join(shown.text),
            tuple(shown.token_ids),
            tuple(shown.logprobs),
            finish_reason,
            stop_reason,
        )


def alternatives(
    tokenizer: Tokenizer, given: TokenLogprobs, num_top: int | None
) -> tuple[Logprob, ...]:
    """Entries of the best tokens, then of those that were named and are not among them."""
    ranked = [(i, logprob, rank) for rank, (i, logprob) in enumerate(given.top[:num_top], start=1)]
    ids = {i for i, *_ in ranked}
    ranked += [(i, logprob, 0) for i, logprob in dict(given.named).items() if i not in ids]
    return tuple(
        Logprob(i, tokenizer.token_text(i), tokenizer.token_bytes(i), logprob, rank)
        for i, logprob, rank in ranked
    )


def prompt_logprobs(
    tokenizer: Tokenizer, token_ids: list[int], known: list[TokenLogprobs], num_top: int
) -> tuple[Logprob | None, ...]:
    """One entry for each of a prompt's tokens; None for the first, which follows nothing."""
    entries: list[Logprob | None] = [None]
    for token_id, given in zip(token_ids[1:], known, strict=True):
        text, data = tokenizer.token_text(token_id), tokenizer.token_bytes(token_id)
        top = alternatives(tokenizer, given, num_top)
        entries.append(Logprob(token_id, text, data, given.logprob, given.rank, top))
    return tuple(entries)


class _Shown(NamedTuple):
    """What the piece in the making has so far."""

    text: list[str]
    token_ids: list[int]
    logprobs: list[Logprob]


def _cut(run: Run, num_characters: int) -> Run:
    """The first characters of a run, with the tokens (the last cut short) that they come from."""
    text = run.text[:num_characters]
    raw = run.carried + b"".join(run.pieces)
    ends = (n for n in range(len(raw), 0, -1) if raw[:n].decode("utf-8", "replace") == text)
    left = next(ends, 0) - len(run.carried)
    pieces: list[bytes] = []
    for data in run.pieces:
        if left <= 0:
            break
        pieces.append(data[:left])
        left -= len(data)
    return Run(tuple(pieces), text, run.carried)
