"""The HTTP server over the real engine loop and a tape: what a client sees, end to end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import openai

from beds.engine_bed import EngineBed, async_engine
from beds.fake_engine import FakeEngine
from beds.live_server import LiveServer
from beds.tiny_tokenizer import EOS, FIRST_BYTE


class LiveBed:
    """A server on a free port, the bed behind it, and OpenAI's own client."""

    def __init__(self, bed: EngineBed, server: LiveServer) -> None:
        self.bed = bed
        self.server = server
        self.client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    def say(self, text: str) -> None:
        """What the model would like to answer, byte by byte, and then to end."""
        wanted = [*(FIRST_BYTE + byte for byte in text.encode()), EOS]
        self.bed.model.prefers = lambda output: wanted[len(output) : len(output) + 1]


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
