"""The HTTP server over the real engine loop and a tape: what a client sees, end to end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import httpx
import openai

from beds.engine_bed import EngineBed, async_engine
from beds.fake_engine import FakeEngine
from beds.live_server import LiveServer, sse_events
from beds.tiny_tokenizer import EOS
from octavo.engine.chat_template import ChatTemplate


class LiveBed:
    """A server on a free port, the bed behind it, and OpenAI's own client."""

    def __init__(self, bed: EngineBed, server: LiveServer) -> None:
        self.bed = bed
        self.server = server
        self.client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    def say(self, text: str) -> None:
        """What the model would like to answer."""
        self.bed.model.say(text)

    @contextmanager
    def template(self, source: str) -> Iterator[None]:
        """Another chat template for a while."""
        tokenizer = self.bed.tokenizer
        before = tokenizer.chat_template
        tokenizer.__dict__["chat_template"] = ChatTemplate(source)
        try:
            yield
        finally:
            tokenizer.__dict__["chat_template"] = before

    def chat(self, **body: Any) -> dict[str, Any]:
        """The message of a chat, put together if it is streamed."""
        answer = httpx.post(f"{self.server.url}/v1/chat/completions", json=body, timeout=30)
        assert answer.status_code == 200, answer.text
        if not body.get("stream"):
            message: dict[str, Any] = answer.json()["choices"][0]["message"]
            return message
        joined: dict[str, Any] = {"content": ""}
        for event in sse_events(answer.text):
            for name, value in event["choices"][0]["delta"].items():
                if name == "tool_calls":
                    calls = joined.setdefault("tool_calls", [{"function": {"arguments": ""}}])
                    for call in value:
                        calls[0]["function"]["arguments"] += call["function"]["arguments"]
                else:
                    joined[name] = joined.get(name, "") + value
        return joined


@contextmanager
def live_bed(**settings: Any) -> Iterator[LiveBed]:
    bed = EngineBed(
        **{"eos_token_ids": (EOS,), "num_blocks": 1000, "max_model_len": 3000, **settings}
    )
    engine = async_engine(bed)
    server = LiveServer(cast(FakeEngine, engine))
    live = LiveBed(bed, server)
    try:
        yield live
    finally:
        live.client.close()
        server.stop()
        engine.shutdown(timeout=5)
