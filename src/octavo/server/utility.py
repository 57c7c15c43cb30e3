"""Routes besides generation: health, models, tokens, metrics and the chat page."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from .. import __version__
from ..errors import RequestError
from .errors import ApiError
from .fields import Fields
from .prompts import parse_messages
from .protocol import ChatRequest, template_kwargs
from .tools import parse_tools
from .translate import off_loop, render_chat, template_source
from .wire import JsonResponse, read_json_object

if TYPE_CHECKING:
    from .app import App


def app_of(request: Request) -> App:
    """The application that the request came to."""
    app: App = request.app
    return app


async def health(request: Request) -> Response:
    """200 when a request would be taken, 503 while shutting down or when the engine is dead."""
    app_of(request).check_ready()
    return JsonResponse({"status": "ok"})


async def version(request: Request) -> Response:
    return JsonResponse({"version": __version__})


async def load(request: Request) -> Response:
    """Requests for text that are being answered now."""
    return JsonResponse({"server_load": app_of(request).num_in_flight})


async def metrics(request: Request) -> Response:
    """Prometheus' text form."""
    text = app_of(request).engine.metrics.render()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


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


async def list_models(request: Request) -> Response:
    app = app_of(request)
    cards = [_model_card(app, name) for name in app.served_model_names]
    return JsonResponse({"object": "list", "data": cards})


async def show_model(request: Request) -> Response:
    """One model's card; hub ids have slashes, so the rest of the path is the id."""
    app = app_of(request)
    return JsonResponse(_model_card(app, app.served_name(request.path_params["name"])))


async def tokenize(request: Request) -> Response:
    """Token ids of a text, or of a conversation."""
    app = app_of(request)
    fields = Fields(await read_json_object(request, app.max_body_bytes))
    app.served_name(fields.string("model"))
    tokenizer = app.engine.tokenizer
    prompt, messages = fields.string("prompt"), fields.take("messages")
    if (prompt is None) == (messages is None):
        raise RequestError("send either prompt (a string) or messages", param="prompt")
    special = fields.flag("add_special_tokens", default=True)
    with_strings = fields.flag("return_token_strs")
    continues = fields.flag("continue_final_message")
    if prompt is not None:
        text = prompt
        tokens = await off_loop(
            len(text), lambda: tokenizer.encode(text, add_special_tokens=special)
        )
    else:
        chat = ChatRequest(
            messages=parse_messages(messages),
            add_generation_prompt=fields.flag("add_generation_prompt", default=not continues),
            continue_final_message=continues,
            template_kwargs=template_kwargs(fields.mapping("chat_template_kwargs")),
            tools=parse_tools(fields),
        )
        tokens = await render_chat(chat, app.engine)
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": app.engine.max_model_len,
        "tokens": tokens,
        "token_strs": [tokenizer.token_text(token) for token in tokens] if with_strings else None,
    }
    return JsonResponse(answer)


async def detokenize(request: Request) -> Response:
    """The text of token ids, control tokens included."""
    app = app_of(request)
    fields = Fields(await read_json_object(request, app.max_body_bytes))
    app.served_name(fields.string("model"))
    tokens = fields.take("tokens")
    size = app.engine.tokenizer.vocab_size
    if not isinstance(tokens, list) or not all(type(x) is int and 0 <= x < size for x in tokens):
        text = f"tokens must be a list of token ids, each from 0 to {size - 1}"
        raise RequestError(text, param="tokens")
    tokenizer = app.engine.tokenizer
    text = await off_loop(len(tokens), lambda: tokenizer.decode(tokens, skip_special_tokens=False))
    return JsonResponse({"prompt": text})


async def tokenizer_info(request: Request) -> Response:
    """What a client needs to use this tokenizer from afar (lm-eval does)."""
    engine = app_of(request).engine
    tokenizer = engine.tokenizer
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    source = template_source(engine) or None
    return JsonResponse(
        {
            "tokenizer_class": "octavo",
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": engine.max_model_len,
            "bos_token": None if bos is None else tokenizer.token_text(bos),
            "bos_token_id": bos,
            "eos_token": None if eos is None else tokenizer.token_text(eos),
            "eos_token_id": eos,
            "pad_token": None,
            "chat_template": source,
        }
    )


@cache
def _page() -> tuple[bytes, str]:
    """The chat page, and a policy that lets it run its own script and nothing else."""
    html = files(__package__).joinpath("static/index.html").read_bytes()
    script = re.search(rb"<script>(.*?)</script>", html, re.DOTALL)
    if script is None:
        raise ApiError(500, "The chat page is damaged: reinstall octavo.")
    digest = base64.b64encode(hashlib.sha256(script.group(1)).digest()).decode()
    return html, (
        "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        f"script-src 'sha256-{digest}'"
    )


async def chat_page(request: Request) -> Response:
    """A page to talk to the model: static, so it is open; its calls carry the key."""
    html, policy = _page()
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",
    }
    return HTMLResponse(html, headers=headers)
