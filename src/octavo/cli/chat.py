"""octavo chat: a conversation in the terminal, or one answer with --prompt."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import OctavoError, RequestTooLarge
from .answer import Timing, load, params_of, read_prompt, stream_answer, whole_text

if TYPE_CHECKING:
    from ..engine.llm import LLM
    from ..sampling_params import SamplingParams

HELP = """\
/clear   forget the conversation
/help    this text
/exit    leave, as /quit and Ctrl-D do
Ctrl-C   stop the answer"""


class Conversation:
    """Messages so far, and the engine that answers them."""

    def __init__(
        self, llm: LLM, params_for: Callable[[int], SamplingParams], system: str | None
    ) -> None:
        """params_for: those of a prompt of so many tokens."""
        self.llm = llm
        self.params_for = params_for
        self.system = system
        self.messages: list[dict[str, Any]] = []
        self.clear()

    def clear(self) -> None:
        """Forget all but the system prompt."""
        self.messages = [] if self.system is None else [message("system", self.system)]

    def ask(self, text: str) -> Timing:
        """Answer on stdout. What an interrupt leaves of the answer stays in the conversation; a
        turn that failed leaves nothing."""
        asked = [*self.messages, message("user", text)]
        prompt_ids = self.llm.tokenizer.apply_chat_template(asked)
        params = self.params_for(len(prompt_ids))
        pieces: list[str] = []
        try:
            timing = stream_answer(self.llm, prompt_ids, params, pieces)
        except KeyboardInterrupt:
            self.messages = [*asked, message("assistant", "".join(pieces))]
            raise
        self.messages = [*asked, message("assistant", "".join(pieces))]
        return timing


def message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def run(args: argparse.Namespace) -> int:
    """One answer with --prompt, else a conversation until Ctrl-D."""
    prompt = None if args.prompt is None else read_prompt(args.prompt)
    with contextlib.closing(load(args)) as llm:
        params_for = partial(params_of, llm, args)
        params_for(1)  # a wrong flag is told before the first question
        system = None if args.system is None else whole_text(args.system)
        conversation = Conversation(llm, params_for, system)
        if prompt is None:
            return converse(conversation)
        timing = conversation.ask(prompt)
        print(flush=True)
    print(f"{timing} | load: {llm.load_seconds:.2f} s", file=sys.stderr)
    return 0


def converse(conversation: Conversation) -> int:
    """Read, answer, repeat. An error ends one answer, never the conversation."""
    if sys.stdin is None:
        raise OctavoError("stdin is closed, so there is nobody to talk to: give --prompt TEXT")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # bytes that are no UTF-8 become U+FFFD
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (editing and history for input())
        print("Ctrl-C stops an answer, Ctrl-D leaves, /help helps.", file=sys.stderr)
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            if interactive:
                print()
            return 0
        except KeyboardInterrupt:
            print("\n(Ctrl-D leaves)", file=sys.stderr)
            continue
        if line in ("/exit", "/quit"):
            return 0
        if line.startswith("/"):
            obey(conversation, line)
        elif line:
            answer(conversation, line)


def obey(conversation: Conversation, command: str) -> None:
    """A line that starts with a slash."""
    if command == "/clear":
        conversation.clear()
    elif command != "/help":
        print(f"unknown command {command}", file=sys.stderr)
    if command != "/clear":
        print(HELP, file=sys.stderr)


def answer(conversation: Conversation, text: str) -> None:
    """One turn; neither an interrupt nor an error ends the conversation."""
    try:
        conversation.ask(text)
        print()
    except KeyboardInterrupt:
        print("\n(stopped)", file=sys.stderr)
    except RequestTooLarge as error:
        print(f"octavo: {error}; /clear starts over", file=sys.stderr)
    except OctavoError as error:
        print(f"octavo: {error}", file=sys.stderr)
