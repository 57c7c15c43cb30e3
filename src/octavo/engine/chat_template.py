"""Chat templates: messages to text, as the model was trained to read them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from .chat_messages import Placeholders, normalise_messages, strings_in
from .chat_sandbox import ChatEnvironment, render_on_budget

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import jinja2

RESERVED = ("messages", "add_generation_prompt", "bos_token", "eos_token")


class ChatTemplate:
    """A chat template, compiled on first use."""

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str] | None = None,
        control_tokens: Sequence[str] = (),
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`variables` are bos_token and its like; `control_tokens` must not come from messages."""
        self.source = source
        self._variables = dict(variables or {})
        self._control_tokens = tuple(control_tokens)
        self._now = now
        self._compiled: jinja2.Template | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[str, Placeholders]:
        """The chat as text, and the stand-ins in it for text that looks like control tokens.

        continue_final_message leaves the last message open, for the model to go on with it.
        Raises RequestError for malformed messages and for whatever the template refuses.
        """
        if continue_final_message and add_generation_prompt:
            message = "continue_final_message needs add_generation_prompt to be false"
            raise RequestError(message, param="continue_final_message")
        if not isinstance(template_kwargs, Mapping | None):
            raise RequestError("template_kwargs must be a mapping", param="template_kwargs")
        if clash := set(RESERVED) & set(template_kwargs or ()):
            message = f"{sorted(clash)} can't be set: the template gets them from the request"
            raise RequestError(message, param="chat_template_kwargs")
        chat = normalise_messages(messages)
        if "developer" not in self.source:  # an older template: it knows them as system messages
            for message_ in chat:
                message_["role"] = message_["role"].replace("developer", "system")
        try:
            text, placeholders, end_mark = self._run(
                chat, dict(template_kwargs or {}), add_generation_prompt, continue_final_message
            )
        except RequestError:
            raise
        except Exception as error:  # a template can fail in any way that Python can
            reason = str(error) or type(error).__name__
            message = f"the chat template can't render these messages: {reason}"
            raise RequestError(message, param="messages") from error
        if continue_final_message:
            text, found, _ = text.rpartition(end_mark)
            if not found:
                message = "the chat template leaves out the final message, so it can't be continued"
                raise RequestError(message, param="continue_final_message")
        return text, placeholders

    def _run(
        self,
        chat: list[dict[str, Any]],
        template_kwargs: dict[str, Any],
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> tuple[str, Placeholders, str]:
        given = [chat, template_kwargs, self.source, *self._control_tokens]
        taken: set[str] = set().union(*strings_in(given))
        placeholders = Placeholders(self._control_tokens, taken)
        chat = placeholders.protect(chat)
        end_mark = ""
        if continue_final_message:
            end_mark = placeholders.new("")
            chat[-1]["content"] += end_mark
        variables = {
            "tools": None,
            "documents": None,
            **self._variables,
            **placeholders.protect(template_kwargs),
            "messages": chat,
            "add_generation_prompt": add_generation_prompt,
        }
        text = render_on_budget(self._template(), variables, placeholders)
        return text, placeholders, end_mark

    def _template(self) -> jinja2.Template:
        if self._compiled is None:
            environment = ChatEnvironment()
            environment.globals["strftime_now"] = lambda format: self._now().strftime(format)
            self._compiled = environment.from_string(self.source)
        return self._compiled
