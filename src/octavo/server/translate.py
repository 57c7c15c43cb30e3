"""From what a request says to what the engine does: tokens in, SamplingParams out.

Precedence: what the client sets, over what the model recommends, over OpenAI's defaults.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from ..errors import RequestError
from ..outputs import Logprob
from ..sampling_params import SamplingParams
from .engine_protocol import Engine
from .parts import END_THINK, THINK, AnswerForm
from .protocol import ChatRequest, CompletionRequest, GenerateRequest
from .tools import with_tools

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions."""

INLINE_CHARS = 4096
"""Longer texts are tokenised in a thread, so that other streams go on meanwhile."""

Result = TypeVar("Result")


class Job(NamedTuple):
    """One prompt, ready for the engine."""

    token_ids: list[int]
    params: SamplingParams
    echo: str = ""
    """Text to put in front of each answer."""

    first_token: Logprob | None = None
    """Where echo comes with logprobs: the prompt's first token, which has none."""

    num_truncated: int = 0
    """Prompt tokens cut away, since the client asked for that (C55)."""

    form: AnswerForm | None = None
    """Parts to look for in each answer."""


def build_params(
    sampling: Mapping[str, Any], model_defaults: Mapping[str, float]
) -> SamplingParams:
    """SamplingParams of a request. Raises RequestError that names the field."""
    return SamplingParams(**{**model_defaults, **sampling})


def check_priority(request: GenerateRequest, engine: Engine) -> None:
    """A priority that nobody would look at is refused, not ignored."""
    policy = engine.config.scheduler.scheduling_policy
    if request.priority and policy != "priority":
        text = f"priority is {request.priority}, but the server schedules by {policy}: leave it 0"
        raise RequestError(text, param="priority")


async def chat_jobs(request: ChatRequest, engine: Engine) -> list[Job]:
    """The one prompt of a chat; it may fill what is left of the model's length."""
    check_priority(request, engine)
    params = build_params(request.sampling, engine.generation.sampling)
    token_ids = await render_chat(request, engine)
    kept = truncate(token_ids, request, engine.max_model_len, params.max_tokens or 1)
    _check_room(len(kept), params.max_tokens, engine.max_model_len, "messages")
    form = _form_of(request, token_ids, engine)
    if form is not None and form.thinking and params.grammar is not None:
        held = dataclasses.replace(params.grammar, thinking=form.thinking)
        params = dataclasses.replace(params, grammar=held)
    return [Job(kept, params, num_truncated=len(token_ids) - len(kept), form=form)]


def _form_of(request: ChatRequest, token_ids: list[int], engine: Engine) -> AnswerForm | None:
    """The parts of an answer: a template that writes </think> is one of a model that thinks."""
    tools = "" if request.tools is None else request.tools.choice
    thinking = ""
    if END_THINK in template_source(engine) and request.add_generation_prompt:
        end = engine.tokenizer.decode(token_ids[-8:], skip_special_tokens=False).rstrip()
        thinking = "open" if end.endswith(THINK) else "" if end.endswith(END_THINK) else "may"
    if not tools and not thinking:
        return None
    return AnswerForm(thinking, tools, request.include_reasoning)


def template_source(engine: Engine) -> str:
    """The text of the model's chat template."""
    template = engine.tokenizer.chat_template
    return template if isinstance(template, str) else getattr(template, "source", "")


async def render_chat(request: ChatRequest, engine: Engine) -> list[int]:
    """Token ids of a conversation, by the model's own template."""
    tokenizer = engine.tokenizer
    if tokenizer.chat_template is None:
        text = "this model has no chat template; use /v1/completions"
        raise RequestError(text, param="messages")
    messages, tools = with_tools(request.messages, request.tools, template_source(engine))
    size = sum(len(message["content"]) for message in messages)
    token_ids = await off_loop(
        size,
        lambda: tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            template_kwargs={**request.template_kwargs, **tools},
        ),
    )
    if not token_ids:
        raise RequestError("messages come to an empty prompt", param="messages")
    return token_ids


async def completion_jobs(request: CompletionRequest, engine: Engine) -> list[Job]:
    """One job for each prompt. Raises RequestError before anything runs."""
    check_priority(request, engine)
    params = build_params(request.sampling, engine.generation.sampling)
    default_max_tokens = params.max_tokens is None
    if default_max_tokens:
        # Checks min_tokens against the default, too.
        params = dataclasses.replace(params, max_tokens=COMPLETION_MAX_TOKENS)
    jobs = []
    for prompt in request.prompts:
        token_ids = await _tokenise(prompt, request, engine)
        limit = engine.max_model_len
        kept = truncate(token_ids, request, limit, 1 if default_max_tokens else params.max_tokens)
        if default_max_tokens:
            _check_room(len(kept), None, limit, "prompt")
            room = max(1, min(COMPLETION_MAX_TOKENS, engine.max_output_tokens(len(kept))))
            own = params if room == COMPLETION_MAX_TOKENS else _shorter(params, room)
        else:
            _check_room(len(kept), params.max_tokens, limit, "prompt")
            own = params
        echo = _echo_text(prompt, token_ids, kept, engine) if request.echo else ""
        first = None
        if request.echo and request.logprobs is not None:
            text, data = engine.tokenizer.token_text(kept[0]), engine.tokenizer.token_bytes(kept[0])
            first = Logprob(kept[0], text, data, 0.0)
        jobs.append(Job(kept, own, echo, first, len(token_ids) - len(kept)))
    return jobs


def _shorter(params: SamplingParams, max_tokens: int) -> SamplingParams:
    """The default of max_tokens never turns a prompt that fits into an error."""
    min_tokens = min(params.min_tokens, max_tokens)
    return dataclasses.replace(params, max_tokens=max_tokens, min_tokens=min_tokens)


async def _tokenise(
    prompt: str | list[int], request: CompletionRequest, engine: Engine
) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    special = request.add_special_tokens
    token_ids = await off_loop(
        len(prompt), lambda: engine.tokenizer.encode(prompt, add_special_tokens=special)
    )
    if not token_ids:
        raise RequestError("prompt is empty; it must hold at least one token", param="prompt")
    return token_ids


async def off_loop(size: int, work: Callable[[], Result]) -> Result:
    """Do `work` on a text of `size` characters: here, or in a thread if it would hold others up."""
    if size <= INLINE_CHARS:
        return work()
    return await asyncio.to_thread(work)


def truncate(
    token_ids: list[int], request: GenerateRequest, max_model_len: int, max_tokens: int | None
) -> list[int]:
    """What the client's own truncate_prompt_tokens leaves; nothing is ever cut without it."""
    keep = request.truncate_prompt_tokens
    if keep is None:
        return token_ids
    if keep == -1:
        keep = max(1, max_model_len - max(1, max_tokens or 1))
    if keep > max_model_len:
        text = f"truncate_prompt_tokens is {keep}, but the model's length is {max_model_len}"
        raise RequestError(text, param="truncate_prompt_tokens")
    if len(token_ids) <= keep:
        return token_ids
    return token_ids[-keep:] if request.truncate_left else token_ids[:keep]


def _check_room(num_prompt: int, max_tokens: int | None, max_model_len: int, param: str) -> None:
    """Refuse what can't fit, with the numbers; nothing is cut silently."""
    least = 1 if max_tokens is None else max_tokens
    if num_prompt + least <= max_model_len:
        return
    limit = f"This model's maximum context length is {max_model_len} tokens"
    if num_prompt + min(least, 1) > max_model_len or max_tokens is None:
        text = f"{limit}, but the {param} alone has {num_prompt} tokens"
        text += " and leaves no room for an answer" if num_prompt <= max_model_len else ""
        raise RequestError(f"{text}. Shorten it, or set truncate_prompt_tokens.", param=param)
    text = f"{limit}, but {num_prompt + max_tokens} were asked for"
    text += f" ({num_prompt} in the {param}, max_tokens {max_tokens})."
    raise RequestError(text, param="max_tokens")


def _echo_text(
    prompt: str | list[int], token_ids: list[int], kept: list[int], engine: Engine
) -> str:
    """The prompt as text: exactly what was sent, or what its (kept) ids say (C50)."""
    if isinstance(prompt, str) and len(kept) == len(token_ids):
        return prompt
    vocab_size = engine.tokenizer.vocab_size
    for token_id in kept:
        if token_id >= vocab_size:
            text = f"prompt has the token id {token_id}, but the vocabulary ends at {vocab_size}"
            raise RequestError(text, param="prompt")
    return engine.tokenizer.decode(kept, skip_special_tokens=False)
