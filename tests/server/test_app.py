"""Routes, keys, ids and bodies: what surrounds an answer."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

import octavo
from beds.fake_engine import FakeEngine, FakeTokenizer
from beds.live_server import AppClient, strict_json
from octavo.errors import ConfigError, EngineDead, QueueFull
from octavo.server.app import make_app

KEY = "sk-secret-0123456789"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [104]},
}


def call(client: AppClient, path: str, method: str, **kwargs: Any) -> Any:
    path = path.replace("{name:path}", "fake/model")
    return client.request(method, path, json=BODIES.get(path.rstrip("/")), **kwargs)


def test_every_route_answers_with_and_without_a_trailing_slash(client: AppClient) -> None:
    for route in client.app.routes:
        for method in route.methods:
            assert call(client, route.path, method).status_code == 200, route
            assert call(client, route.path + "/", method).status_code == 200, route


def test_the_key_guards_every_route_but_health_and_the_page() -> None:
    """C101: over the server's own table, so that a new route is guarded or stands here."""
    client = AppClient(FakeEngine(), api_key=KEY)
    wrong: list[dict[str, str]] = [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {KEY}"},
        {"authorization": KEY},
        {"authorization": "Bearer"},
        {"x-api-key": KEY + "x"},
        {"x-api-key": "", "authorization": "Bearer "},
    ]
    for route in client.app.routes:
        is_open = route.path in ("/", "/health")
        for method in (*route.methods, "HEAD", "OPTIONS", "DELETE"):
            for headers in wrong:
                response = call(client, route.path, method, headers=headers)
                assert KEY not in response.text + str(response.headers)
                if not is_open:
                    assert response.status_code == 401, (route.path, method, headers)
        for headers in ({"authorization": f"bearer {KEY}"}, {"x-api-key": KEY}):
            response = call(client, route.path, min(route.methods), headers=headers)
            assert response.status_code == 200, route
            assert KEY not in response.text
    assert client.engine.submitted, "the right key opens"


@pytest.mark.parametrize(
    "path", ["//v1/models", "/v1/models/", "/v1/./models", "/V1/MODELS", "/x", "/health/../metrics"]
)
def test_no_spelling_of_a_path_gets_past_the_key(path: str) -> None:
    """C101: also what does not exist is not told apart without the key."""
    client = AppClient(FakeEngine(), api_key=KEY)

    async def ask() -> int:
        transport = httpx.ASGITransport(app=client.app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport) as http:
            url = httpx.URL("http://test").copy_with(raw_path=path.encode())
            return (await http.get(url)).status_code

    assert asyncio.run(ask()) == 401


def test_the_key_is_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    """C101."""
    caplog.set_level("DEBUG")
    client = AppClient(FakeEngine(), api_key=KEY)
    client.get("/v1/models", headers={"authorization": f"Bearer {KEY}x"})
    client.post("/v1/completions", {"prompt": 3}, headers={"x-api-key": KEY})
    assert KEY not in caplog.text


@pytest.mark.parametrize("key", ["", "  "])
def test_an_empty_key_is_a_mistake_and_not_an_open_server(key: str) -> None:
    with pytest.raises(ConfigError, match="api_key"):
        make_app(FakeEngine(), api_key=key)


def test_unknown_routes_and_methods_are_json_errors(client: AppClient) -> None:
    missing = client.get("/v1/nothing")
    assert missing.status_code == 404
    assert strict_json(missing.content)["error"]["type"] == "NotFoundError"
    for path, method, allow in (
        ("/v1/completions", "GET", "POST"),
        ("/v1/models", "DELETE", "GET, HEAD"),
        ("/health", "OPTIONS", "GET, HEAD"),
    ):
        refused = client.request(method, path)
        assert refused.status_code == 405
        assert refused.headers["allow"] == allow
        assert strict_json(refused.content)["error"]["code"] == 405


def test_no_cross_origin_access_is_granted(client: AppClient) -> None:
    """CORS is off: a page of another site may not read answers."""
    response = client.get("/v1/models", headers={"origin": "https://other.example"})
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_models_are_listed_under_the_names_served() -> None:
    client = AppClient(FakeEngine(), served_model_names=["org/one", "two"])
    listed = strict_json(client.get("/v1/models").content)
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["org/one", "two"]
    card = strict_json(client.get("/v1/models/org/one").content)
    assert card == listed["data"][0]
    assert card["object"] == "model"
    assert card["max_model_len"] == 512
    assert {"created", "owned_by", "root", "parent"} <= set(card)
    assert client.get("/v1/models/fake/model").status_code == 404
    for name in ("org/one", "two"):
        assert strict_json(client.complete(model=name).content)["model"] == name
    assert strict_json(client.complete().content)["model"] == "org/one"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_an_unknown_model_is_not_found(client: AppClient, path: str) -> None:
    response = client.post(path, {**BODIES[path], "model": "gpt-4"})
    assert response.status_code == 404
    error = strict_json(response.content)["error"]
    assert error["type"] == "NotFoundError"
    assert "fake/model" in error["message"]
    assert client.engine.submitted == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b'"x"',
        b"null",
        b'{"prompt": NaN}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"seed": 1e999}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b"[" * 5000 + b"]" * 5000,
    ],
)
@pytest.mark.parametrize("path", sorted(BODIES))
def test_a_body_that_is_no_json_object_is_a_400(
    client: AppClient, path: str, content: bytes
) -> None:
    response = client.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert strict_json(response.content)["error"]["type"] == "BadRequestError"


def test_other_kinds_of_content_are_refused(client: AppClient) -> None:
    """415: a browser sends forms, and bodies without a type, for any page that asks it to."""
    content = json.dumps({"prompt": "hi"}).encode()
    for kind, status in (
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("application/json; charset=utf-8", 200),
        ("Application/JSON", 200),
        ("application/vnd.api+json", 200),
    ):
        headers = {"content-type": kind}
        response = client.post("/v1/completions", content=content, headers=headers)
        assert response.status_code == status
    assert client.post("/v1/completions", content=content).status_code == 415
    packed_headers = {"content-encoding": "gzip", "content-type": "application/json"}
    packed = client.post("/v1/completions", content=content, headers=packed_headers)
    assert packed.status_code == 415


def test_a_body_over_the_limit_is_refused() -> None:
    """413 by its own word, and also when it comes in parts of unknown number."""
    client = AppClient(FakeEngine(), max_body_bytes=1000)
    assert client.complete(prompt="x" * 300).status_code == 200
    declared = client.complete(prompt="x" * 2000)

    async def parts() -> Any:
        for _ in range(100):
            yield b" " * 100

    kind = {"content-type": "application/json"}
    streamed = client.post("/v1/completions", content=parts(), headers=kind)
    for response in (declared, streamed):
        assert response.status_code == 413
        assert "1000" in strict_json(response.content)["error"]["message"]


def test_the_clients_request_id_is_echoed_and_never_a_key(client: AppClient) -> None:
    """C67: on every answer, errors included; cut when long; line breaks are refused."""
    headers = {"x-request-id": "my-id"}
    for response in (
        client.get("/health", headers=headers),
        client.get("/nothing", headers=headers),
        client.post("/v1/completions", {"prompt": "hi"}, headers=headers),
        client.post("/v1/completions", {"prompt": ""}, headers=headers),
    ):
        assert response.headers["x-request-id"] == "my-id"
    client.engine.submit_error = ZeroDivisionError("a fault of our own")
    broken = client.post("/v1/completions", {"prompt": "hi"}, headers=headers)
    assert (broken.status_code, broken.headers["x-request-id"]) == (500, "my-id")
    client.engine.submit_error = None
    assert "my-id" not in client.post("/v1/completions", {"prompt": "hi"}, headers=headers).text
    long = client.get("/health", headers={"x-request-id": "i" * 10**6})
    assert long.headers["x-request-id"] == "i" * 256
    for bad in (b"a\r\nset-cookie: x", b"a\nb", b"\x00", "é".encode()):
        refused = client.get("/health", headers={b"x-request-id": bad})
        assert refused.status_code == 400
        assert len(refused.headers["x-request-id"]) == 32


def test_without_an_id_of_the_client_each_request_has_its_own(client: AppClient) -> None:
    ids = {client.get("/health").headers["x-request-id"] for _ in range(5)}
    assert len(ids) == 5


def test_health_has_a_head_and_turns_503_while_shutting_down(client: AppClient) -> None:
    """C103: readiness is told before the end comes."""
    head = client.request("HEAD", "/health")
    assert (head.status_code, head.content) == (200, b"")
    client.app.draining = True
    for path in ("/health", "/ping", "/health/"):
        response = client.get(path)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
    refused = client.complete()
    assert refused.status_code == 503
    assert strict_json(refused.content)["error"]["type"] == "ServiceUnavailableError"
    assert client.get("/metrics").status_code == 200


def test_a_dead_engine_is_an_error_in_json(client: AppClient) -> None:
    client.engine.submit_error = EngineDead("the engine stopped on an internal fault")
    assert client.complete().status_code == 500
    client.engine.die()
    assert client.get("/health").status_code == 503
    assert client.complete(stream=True).status_code == 503


def test_a_full_queue_says_when_to_come_back(client: AppClient) -> None:
    """C97, the wire's part; a request of several prompts is taken whole or not at all."""
    client.engine.submit_error = QueueFull("4 requests are waiting")
    response = client.chat(stream=True)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert "4 requests" in strict_json(response.content)["error"]["message"]


def test_a_request_of_many_prompts_is_taken_whole_or_not_at_all() -> None:
    """C97: what was queued before the queue was full is taken back."""
    engine = FakeEngine(max_num_seqs=1, max_queued=2)
    engine.hold()
    assert AppClient(engine).complete(prompt=["a", "b", "c", "d"]).status_code == 503
    engine.release()
    engine.shutdown(5)
    assert len(engine.submitted) == 3
    assert sorted(engine.aborted) == [0, 1, 2]


def test_tokens_to_text_and_back(client: AppClient) -> None:
    text = "hé 漢\n<|im_end|>"
    body = strict_json(
        client.post("/tokenize", {"prompt": text, "return_token_strs": True}).content
    )
    assert body["tokens"] == list(text.encode())
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == 512
    back = client.post("/detokenize", {"tokens": body["tokens"]})
    assert strict_json(back.content) == {"prompt": text}
    assert strict_json(client.post("/tokenize", {"prompt": ""}).content)["tokens"] == []


@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {"prompt": "x" * 5000}), ("/detokenize", {"tokens": [120] * 5000})],
)
def test_a_long_text_is_tokenised_off_the_event_loop(
    client: AppClient, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams of others go on meanwhile."""
    used: list[int] = []
    for name in ("encode", "decode"):
        work = getattr(client.engine.tokenizer, name)

        def note(*args: Any, work: Any = work, **kwargs: Any) -> Any:
            used.append(threading.get_ident())
            return work(*args, **kwargs)

        monkeypatch.setattr(client.engine.tokenizer, name, note)
    assert client.post(path, body).status_code == 200
    assert used
    assert threading.get_ident() not in used


def test_conversations_are_tokenised_as_chat_does_it(client: AppClient) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    body = strict_json(client.post("/tokenize", {"messages": messages}).content)
    client.chat(messages=messages)
    assert body["tokens"] == client.engine.submitted[0].prompt
    without = {"messages": messages, "add_generation_prompt": False}
    assert len(strict_json(client.post("/tokenize", without).content)["tokens"]) < body["count"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": 3}),
        ("/tokenize", {"prompt": "a", "messages": []}),
        ("/tokenize", {"messages": []}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": "1"}),
        ("/detokenize", {"tokens": [259]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [True]}),
        ("/detokenize", {"tokens": [10**30]}),
    ],
)
def test_wrong_token_requests_are_refused(client: AppClient, path: str, body: Any) -> None:
    assert client.post(path, body).status_code == 400


def test_the_tokenizer_tells_about_itself() -> None:
    client = AppClient(FakeEngine(tokenizer=FakeTokenizer(adds_bos=True)))
    info = strict_json(client.get("/tokenizer_info").content)
    assert (info["bos_token"], info["eos_token"]) == ("<s>", "<|im_end|>")
    assert info["chat_template"] == "chatml"


def test_version_and_load(client: AppClient) -> None:
    assert strict_json(client.get("/version").content) == {"version": octavo.__version__}
    assert strict_json(client.get("/load").content) == {"server_load": 0}
    assert client.get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")


def test_the_page_stands_alone_and_writes_no_html(client: AppClient) -> None:
    """It works offline, and what a model says is text, never markup."""
    response = client.get("/")
    page = response.text
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy
    for word in ("http://", "https://", "innerHTML", "outerHTML", "insertAdjacentHTML", "eval("):
        assert word not in page, word
    assert "document.write" not in page
    assert page.count("<script") == 1
    assert 'name="viewport"' in page
    for needed in ("v1/chat/completions", "AbortController", "tok/s", "textContent"):
        assert needed in page, needed
