"""Routes besides generation: health, models, tokens, metrics and the chat page."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import RequestError
from .errors import ApiError
from .prompts import parse_messages
from .protocol import ChatRequest, Fields, template_kwargs
from .translate import render_chat
from .wire import Exchange

if TYPE_CHECKING:
    from .app import App


async def health(app: App, exchange: Exchange) -> None:
    """200 when a request would be taken, 503 while shutting down or when the engine is dead."""
    app.check_ready()
    await exchange.send_json({"status": "ok"})


async def version(app: App, exchange: Exchange) -> None:
    await exchange.send_json({"version": __version__})


async def load(app: App, exchange: Exchange) -> None:
    """Requests for text that are being answered now."""
    await exchange.send_json({"server_load": app.num_in_flight})


async def metrics(app: App, exchange: Exchange) -> None:
    """Prometheus' text form."""
    content_type = b"text/plain; version=0.0.4; charset=utf-8"
    await exchange.send_bytes(200, content_type, app.engine.metrics.render())


def _model_card(app: App, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": app.engine.created,
        "owned_by": "octavo",
        "root": app.engine.model_name,
        "parent": None,
        "max_model_len": app.engine.max_model_len,
    }


async def list_models(app: App, exchange: Exchange) -> None:
    cards = [_model_card(app, name) for name in app.served_model_names]
    await exchange.send_json({"object": "list", "data": cards})


async def show_model(app: App, exchange: Exchange) -> None:
    """One model's card; hub ids have slashes, so the rest of the path is the id."""
    name = exchange.path.removeprefix("/v1/models/")
    await exchange.send_json(_model_card(app, app.served_name(name)))


async def tokenize(app: App, exchange: Exchange) -> None:
    """Token ids of a text, or of a conversation."""
    fields = Fields(await exchange.read_json_object(app.max_body_bytes))
    app.served_name(fields.string("model"))
    tokenizer = app.engine.tokenizer
    prompt, messages = fields.string("prompt"), fields.take("messages")
    if (prompt is None) == (messages is None):
        raise RequestError("send either prompt (a string) or messages", param="prompt")
    special = fields.flag("add_special_tokens", default=True)
    with_strings = fields.flag("return_token_strs")
    continues = fields.flag("continue_final_message")
    if prompt is not None:
        tokens = tokenizer.encode(prompt, add_special_tokens=special)
    else:
        request = ChatRequest(
            messages=parse_messages(messages),
            add_generation_prompt=fields.flag("add_generation_prompt", default=not continues),
            continue_final_message=continues,
            template_kwargs=template_kwargs(fields.mapping("chat_template_kwargs")),
        )
        tokens = await render_chat(request, app.engine)
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": app.engine.max_model_len,
        "tokens": tokens,
        "token_strs": [tokenizer.token_text(token) for token in tokens] if with_strings else None,
    }
    await exchange.send_json(answer)


async def detokenize(app: App, exchange: Exchange) -> None:
    """The text of token ids, control tokens included."""
    fields = Fields(await exchange.read_json_object(app.max_body_bytes))
    app.served_name(fields.string("model"))
    tokens = fields.take("tokens")
    size = app.engine.tokenizer.vocab_size
    if not isinstance(tokens, list) or not all(type(x) is int and 0 <= x < size for x in tokens):
        text = f"tokens must be a list of token ids, each from 0 to {size - 1}"
        raise RequestError(text, param="tokens")
    text = app.engine.tokenizer.decode(tokens, skip_special_tokens=False)
    await exchange.send_json({"prompt": text})


async def tokenizer_info(app: App, exchange: Exchange) -> None:
    """What a client needs to use this tokenizer from afar (lm-eval does)."""
    tokenizer = app.engine.tokenizer
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    template = tokenizer.chat_template
    source = template if isinstance(template, str) else getattr(template, "source", None)
    await exchange.send_json(
        {
            "tokenizer_class": "octavo",
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": app.engine.max_model_len,
            "bos_token": None if bos is None else tokenizer.token_text(bos),
            "bos_token_id": bos,
            "eos_token": None if eos is None else tokenizer.token_text(eos),
            "eos_token_id": eos,
            "pad_token": None,
            "chat_template": source,
        }
    )


@cache
def _page() -> tuple[bytes, bytes]:
    """The chat page, and a policy that lets it run its own script and nothing else."""
    html = files(__package__).joinpath("static/index.html").read_bytes()
    script = re.search(rb"<script>(.*?)</script>", html, re.DOTALL)
    if script is None:
        raise ApiError(500, "The chat page is damaged: reinstall octavo.")
    digest = base64.b64encode(hashlib.sha256(script.group(1)).digest())
    policy = (
        b"default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; img-src data:; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; script-src 'sha256-"
    )
    return html, policy + digest + b"'"


async def chat_page(app: App, exchange: Exchange) -> None:
    """A page to talk to the model: static, so it is open; its calls carry the key."""
    html, policy = _page()
    headers = (
        (b"content-security-policy", policy),
        (b"x-content-type-options", b"nosniff"),
        (b"cache-control", b"no-cache"),
    )
    await exchange.send_bytes(200, b"text/html; charset=utf-8", html, headers)
