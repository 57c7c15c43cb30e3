"""What a request may say: bodies of /v1/completions and /v1/chat/completions, checked.

null means the default. Types are taken strictly (true is not 1, "3" is not 3). A field that nobody
knows is ignored with a log line; one that is known, but would change an answer in a way not built
yet, is refused: better a clear no than an answer to another question.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..errors import RequestError
from ..sampling_params import MAX_LOGPROBS
from .fields import Fields, not_yet
from .prompts import parse_messages, parse_prompt
from .structured import parse_structured
from .tools import Tools, parse_tools

SAMPLING_FIELDS = (
    *("n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids"),
    *("allowed_token_ids", "bad_words", "logprobs_mode", "logprob_token_ids", "prompt_logprobs"),
    "timeout",
)
"""Passed on as they are: SamplingParams checks them."""

SAMPLING_FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")

MAX_SALT_CHARS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """What both routes share."""

    model: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    """Fields of SamplingParams that the client set, under their names there."""
    form_field: str = ""
    """What asks for a form, if anything does: named where its grammar can't be compiled."""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    priority: int = 0
    user: str = ""
    """Whom the client says this is for; believed only where the operator says so."""
    cache_salt: str = ""
    truncate_prompt_tokens: int | None = None
    """Prompt tokens to keep; -1: what the model's length leaves."""
    truncate_left: bool = True
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    prompt_logprobs: int | None = None
    """Alternatives at each prompt token, in vLLM's form; None: not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(GenerateRequest):
    """POST /v1/completions."""

    prompts: list[str] | list[list[int]]
    echo: bool = False
    logprobs: int | None = None
    """Alternatives at each token; with echo, of the prompt too."""
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(GenerateRequest):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    tools: Tools | None = None
    include_reasoning: bool = True


def parse_completion(body: dict[str, Any]) -> CompletionRequest:
    """Check a body of /v1/completions. Raises RequestError that names the field."""
    fields = Fields(body)
    shared = _shared(fields)
    sampling = shared["sampling"]
    sampling.setdefault("max_tokens", None)
    echo = fields.flag("echo")
    logprobs = fields.integer("logprobs")
    if logprobs is not None:
        sampling["logprobs"] = logprobs
        if echo and 0 <= logprobs <= MAX_LOGPROBS:
            sampling["prompt_logprobs"] = max(logprobs, shared["prompt_logprobs"] or 0)
    if sampling["max_tokens"] == 0 and not echo and shared["prompt_logprobs"] is None:
        text = "max_tokens is 0: nothing to generate; only echo or prompt_logprobs may ask for that"
        raise RequestError(text, param="max_tokens")
    _check_best_of(fields.integer("best_of"), sampling.get("n", 1))
    request = CompletionRequest(
        **shared,
        prompts=parse_prompt(fields.take("prompt")),
        echo=echo,
        logprobs=logprobs,
        add_special_tokens=fields.flag("add_special_tokens", default=True),
    )
    fields.log_unknown()
    return request


def parse_chat(body: dict[str, Any]) -> ChatRequest:
    """Check a body of /v1/chat/completions. Raises RequestError that names the field."""
    fields = Fields(body)
    shared = _shared(fields)
    sampling = shared["sampling"]
    newer = fields.integer("max_completion_tokens")
    name = "max_tokens" if newer is None else "max_completion_tokens"
    if newer is not None:
        sampling["max_tokens"] = newer
    limit = sampling.get("max_tokens")
    if isinstance(limit, int) and limit < 1:
        raise RequestError(f"{name} is {limit!r}, but must be 1 or above", param=name)
    _chat_logprobs(fields, sampling)
    tools = parse_tools(fields)
    if tools is not None:
        sampling["grammar"] = tools.grammar(sampling["grammar"])
        shared["form_field"] = "tools"
    for name in ("add_special_tokens", "echo"):
        if fields.flag(name):
            raise not_yet(name)
    continues = fields.flag("continue_final_message")
    generation_prompt = fields.flag("add_generation_prompt", default=not continues)
    if continues and generation_prompt:
        text = "add_generation_prompt and continue_final_message exclude each other"
        raise RequestError(text, param="continue_final_message")
    request = ChatRequest(
        **shared,
        messages=parse_messages(fields.take("messages")),
        add_generation_prompt=generation_prompt,
        continue_final_message=continues,
        template_kwargs=template_kwargs(fields.mapping("chat_template_kwargs")),
        tools=tools,
        include_reasoning=fields.flag("include_reasoning", default=True),
    )
    fields.log_unknown()
    return request


def template_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Variables for the chat template. Raises RequestError for those that we set ourselves."""
    ours = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
    taken = ours | {"chat_template", "tokenize", "bos_token", "eos_token"}
    for name in kwargs:
        if name in taken:
            text = f"chat_template_kwargs may not set {name}"
            raise RequestError(text, param="chat_template_kwargs")
    return kwargs


def _shared(fields: Fields) -> dict[str, Any]:
    """Arguments that both kinds of request have in common."""
    fields.refuse_not_yet()
    if fields.take("modalities") not in (None, [], ["text"]):
        raise RequestError("modalities other than text are not supported", param="modalities")
    sampling = {name: value for name in SAMPLING_FIELDS if (value := fields.take(name)) is not None}
    for name in SAMPLING_FLAGS:
        if fields.take(name) is not None:
            sampling[name] = fields.flag(name)
    processors = fields.mapping("logits_processors")
    if processors:
        sampling["logits_processors"] = processors
    bias = fields.mapping("logit_bias")
    if bias:
        sampling["logit_bias"] = _logit_bias(bias)
    form_field, sampling["grammar"] = parse_structured(fields) or ("", None)
    stream = fields.flag("stream")
    prompt_logprobs = fields.integer("prompt_logprobs")
    if prompt_logprobs is not None and stream:
        text = "prompt_logprobs are not sent with stream=true; echo with logprobs is"
        raise RequestError(text, param="prompt_logprobs")
    options = Fields(fields.mapping("stream_options"))
    if options.body and not stream:
        raise RequestError("stream_options needs stream=true", param="stream_options")
    return {
        "model": fields.string("model"),
        "sampling": sampling,
        "form_field": form_field,
        "stream": stream,
        "include_usage": options.flag("include_usage"),
        "continuous_usage": options.flag("continuous_usage_stats"),
        "priority": fields.integer("priority") or 0,
        "user": fields.string("user") or "",
        "cache_salt": _cache_salt(fields.string("cache_salt")),
        "truncate_prompt_tokens": _truncation(fields.integer("truncate_prompt_tokens")),
        "truncate_left": _truncation_side(fields.string("truncation_side")),
        "return_token_ids": fields.flag("return_token_ids"),
        "tokens_as_ids": fields.flag("return_tokens_as_token_ids"),
        "prompt_logprobs": prompt_logprobs,
    }


def _logit_bias(bias: dict[str, Any]) -> tuple[tuple[int, Any], ...]:
    """JSON's string keys as token ids; the values are checked by SamplingParams."""
    pairs = []
    for key, value in bias.items():
        # int() would also take " 1", "+1" and "1_0".
        if not (key.isascii() and key.isdigit() and len(key) <= 18):
            text = f"logit_bias has the key {key[:64]!r}, but keys must be token ids"
            raise RequestError(text, param="logit_bias")
        pairs.append((int(key), value))
    return tuple(pairs)


def _cache_salt(salt: str | None) -> str:
    if salt is None:
        return ""
    if not salt or len(salt) > MAX_SALT_CHARS or any(c in "@/\\\0" for c in salt):
        text = f"cache_salt must be 1 to {MAX_SALT_CHARS} characters, none of them @, /, \\ or NUL"
        raise RequestError(text, param="cache_salt")
    return salt


def _truncation(keep: int | None) -> int | None:
    if keep is not None and keep != -1 and keep < 1:
        text = f"truncate_prompt_tokens is {keep}, but must be 1 or above, or -1"
        raise RequestError(text, param="truncate_prompt_tokens")
    return keep


def _truncation_side(side: str | None) -> bool:
    if side not in (None, "left", "right"):
        text = f"truncation_side is {side[:64]!r}, but must be left or right"
        raise RequestError(text, param="truncation_side")
    return side != "right"


def _check_best_of(best_of: int | None, n: object) -> None:
    """best_of = n asks for nothing; sglang's benchmark sends best_of 1."""
    if best_of is None or best_of == n:
        return
    if isinstance(n, int) and best_of < n:
        raise RequestError(f"best_of is {best_of}, but must be at least n ({n})", param="best_of")
    raise RequestError("best_of above n is not supported yet", param="best_of")


def _chat_logprobs(fields: Fields, sampling: dict[str, Any]) -> None:
    """Chat says logprobs=true and top_logprobs=k where SamplingParams says logprobs=k."""
    wanted = fields.flag("logprobs")
    top = fields.integer("top_logprobs")
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        text = f"top_logprobs is {top}, but must be a whole number from 0 to {MAX_LOGPROBS}"
        raise RequestError(text, param="top_logprobs")
    if top and not wanted:
        raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
    if wanted:
        sampling["logprobs"] = top or 0
