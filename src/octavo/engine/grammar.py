"""Structured output: which tokens may come next, for each request that asks for a form.

A matcher belongs to its request and follows its tokens, so a preemption does not touch it, and the
n answers to one prompt have one each. The executor receives packed masks alone, and samples nothing
without one. Whatever goes wrong here ends that request with an error: no answer ever goes on free
of the form it was promised in (C71).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING

from ..errors import RequestError
from ..grammar_source import matcher_of
from ..grammar_spec import GrammarSpec
from ..messages import SchedulerOutput, TokenEvent
from ..request import Request
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger("octavo")

COMPLETE = "complete"
"""finish_reason of a TokenEvent whose last token completes the grammar, and is text: "stop"."""

MAX_COMPILED, MAX_COMPILED_CHARS = 32, 2**20
"""Grammars kept for the next request that asks for the same, and their source: each may come to
20 MB by its lexer's states, or by 250 bytes for each character."""

COMPILE_SECONDS = 10.0
"""Until a request whose grammar still waits or compiles is refused."""

MAX_RUN = 56
"""Tokens that one step may append without sampling them."""

MAX_FORCED = 2048
"""Tokens that may follow each other without a choice: llguidance looks at all of them in each step,
half a second for 64 answers. Also the bound on its looks for one run, all together."""


class GrammarFault(RequestError):
    """The matcher refused a token or found no mask; the text is for the user."""


class Matcher:
    """Where one answer stands in its grammar."""

    __slots__ = ("_jumps", "_matcher", "first", "mask", "num_tokens", "unsent")

    def __init__(self, compiled: LLMatcher) -> None:
        """At the beginning, which may take long. Raises GrammarFault."""
        self.first = self
        """The one whose twin this is: they share the states of one lexer, and its bounds."""
        self._matcher = compiled
        self._jumps = False
        self.num_tokens = 0
        """Tokens taken so far."""
        self.unsent: tuple[int, ...] = ()
        """Tokens of the request that the executor does not know yet."""
        self.mask = b""
        """Which tokens may come next: bit i % 8, the lowest first, of byte i // 8."""
        self._fill(compiled.compute_ff_tokens())

    def twin(self, *, jumps: bool) -> Matcher:
        """Another one that stands where this one does, in no time. `jumps`: its advance() goes on
        where there is no choice."""
        twin = copy(self)
        twin._matcher, twin._jumps = self._matcher.deep_copy(), jumps
        return twin

    def advance(self, token_ids: Sequence[int]) -> tuple[list[int], bool]:
        """Take tokens. Returns those that it took after them, since each is the only one in its
        mask (jump-forward), and whether nothing can follow. Raises GrammarFault."""
        for token_id in token_ids:
            self._take(token_id)
        run: list[int] = []
        forced: list[int] = []
        work = 0
        # Only the first of the forced tokens is sure: it alone is in the mask. How the text behind
        # it is cut into tokens depends on where one begins.
        while not self._matcher.is_stopped():
            forced = self._matcher.compute_ff_tokens()
            work += len(forced)
            if not (self._jumps and forced) or len(run) == MAX_RUN or work > MAX_FORCED:
                break
            self._take(forced[0])
            run.append(forced[0])
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return run, True
        self._fill(forced)
        return run, False

    def _take(self, token_id: int) -> None:
        if not self._matcher.consume_token(token_id):
            raise GrammarFault(f"the grammar refused token {token_id}: {self._why()}")
        self.num_tokens += 1

    def _fill(self, forced: Sequence[int]) -> None:
        if len(forced) > MAX_FORCED:
            raise GrammarFault(f"the grammar leaves no choice for more than {MAX_FORCED} tokens")
        self.mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise GrammarFault(f"the grammar failed: {self._why()}")

    def _why(self) -> str:
        return self._matcher.get_error().partition("<")[0].strip() or "no reason given"


class Grammars:
    """Compiles grammars, from any thread; holds the matchers of the engine's live requests."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        jump_forward: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self._jump_forward = jump_forward
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._compiled: OrderedDict[GrammarSpec, Matcher] = OrderedDict()
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()
        self.live: dict[int, Matcher] = {}
        """By request id; for the engine's thread alone."""

    def is_compiled(self, spec: GrammarSpec) -> bool:
        """Whether compile() would return at once."""
        with self._lock:
            return spec in self._compiled

    def compile(self, spec: GrammarSpec) -> Matcher:
        """One whose twins are for this grammar. Raises RequestError that says what is wrong."""
        with self._lock:
            if (compiled := self._compiled.get(spec)) is not None:
                self._compiled.move_to_end(spec)
                return compiled
        with self._vocabulary_lock:
            vocabulary = self._vocabulary
        # Its first mask is the slowest, and this may be any thread.
        compiled = Matcher(matcher_of(spec, vocabulary))
        with self._lock:
            self._compiled[spec] = compiled
            sizes = [len(kept.source) for kept in self._compiled]
            while len(sizes) > MAX_COMPILED or sum(sizes) > MAX_COMPILED_CHARS:
                self._compiled.popitem(last=False)
                del sizes[0]
        return compiled

    def start(self, request: Request) -> None:
        """Give a request its matcher, if it asks for a form. Raises RequestError."""
        spec = request.params.grammar
        if spec is None:
            return
        jumps = self._jump_forward and request.params.takes_forced_tokens
        self.live[request.request_id] = self.compile(spec).twin(jumps=jumps)

    def drop(self, request_id: int) -> None:
        """The request ended, or never began."""
        self.live.pop(request_id, None)

    def masked(self, plan: SchedulerOutput, requests: Mapping[int, Request]) -> SchedulerOutput:
        """The plan with the masks of its rows, and the tokens that were appended to them."""
        matchers = {requests[i].row: m for i, m in self.live.items() if i in requests}
        rows = [entry.row for entry in plan.scheduled if entry.row in matchers]
        known = {start.row for start in plan.starts}
        forced = [(row, matchers[row].unsent) for row in rows if row not in known]
        for row in rows:
            matchers[row].unsent = ()
        return plan._replace(
            masks=tuple((row, matchers[row].mask) for row in rows),
            forced=tuple((row, token_ids) for row, token_ids in forced if token_ids),
        )

    def advance(
        self, event: TokenEvent, extend: Callable[[int, Sequence[int]], TokenEvent]
    ) -> TokenEvent:
        """Take the tokens of an event, and append with `extend` (the scheduler's) those that can be
        no others. The event comes back with them, and with an end where the grammar puts one:
        finish_reason "complete", or "error" without the tokens that the grammar refused."""
        matcher = self.live.get(event.request_id)
        if matcher is None:
            return event
        if event.finish_reason is not None:
            self.drop(event.request_id)
            return event
        try:
            run, complete = matcher.advance(event.token_ids)
        except Exception as fault:
            if not isinstance(fault, GrammarFault):
                logger.exception("the grammar of request %d failed", event.request_id)
            self.drop(event.request_id)
            with self._lock:  # its twins may have used up what one may use: the next start anew
                for spec in [s for s, first in self._compiled.items() if first is matcher.first]:
                    del self._compiled[spec]
            error = str(fault) or f"internal error in the grammar: {type(fault).__name__}"
            return TokenEvent(event.request_id, (), (), "error", None, error)
        if run:
            more = extend(event.request_id, run)
            matcher.unsent = more.token_ids
            event = more._replace(token_ids=event.token_ids + more.token_ids)
        if complete and event.finish_reason is None:
            event = event._replace(finish_reason=COMPLETE)
        if event.finish_reason is not None:
            self.drop(event.request_id)
        return event

    def warm_up(self) -> None:
        """Build what the first grammar of a process waits for, from any thread."""
        with self._vocabulary_lock:
            assert self._vocabulary

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        """The tokens as bytes; control tokens never match text, and those past the end nothing."""
        from llguidance import LLTokenizer, TokenizerWrapper

        # Each half holds Python's lock for about 80 ms; streams that run may go on in between.
        vocabulary = _Vocabulary(self.tokenizer, self._vocab_size, self._eos_token_ids)
        wrapper = TokenizerWrapper(vocabulary)
        bare = LLTokenizer(wrapper, eos_token=vocabulary.eos_token_ids, slices=[])
        time.sleep(0.01)
        return bare.with_slices(LLTokenizer.general_slices())


class _Vocabulary:
    """The attributes that llguidance reads from a tokenizer, and a call that encodes."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> None:
        """A model without an end-of-sequence token gets one that it can't produce."""
        known = min(vocab_size, tokenizer.vocab_size)
        self.tokens = [tokenizer.token_bytes(i) for i in range(known)]
        self.tokens += [b""] * (vocab_size - known)
        if not eos_token_ids:
            self.tokens.append(b"<end>")
        self.eos_token_ids = eos_token_ids or [vocab_size]
        self.eos_token_id = self.eos_token_ids[0]
        self.special_token_ids = sorted({*tokenizer.special_ids, *self.eos_token_ids})
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode(), add_special_tokens=False, parse_special=False)
