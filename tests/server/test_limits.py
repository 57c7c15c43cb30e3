"""Full queues, deadlines and tenants over HTTP, with the real engine loop behind it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import pytest

from beds.engine_bed import EngineBed, async_engine
from beds.fake_engine import FakeEngine
from beds.live_server import AppClient
from octavo.config import EngineConfig, SchedulerConfig
from octavo.core.fair_share import FairShare
from octavo.errors import ConfigError
from octavo.server.app import make_app


@contextmanager
def served(settings: SchedulerConfig, **app: Any) -> Iterator[tuple[EngineBed, AppClient]]:
    """A client of an app over EngineBed."""
    bed = EngineBed(scheduling=asdict(settings))
    engine = async_engine(bed)
    engine.config = EngineConfig(scheduler=settings)
    client = AppClient(FakeEngine())
    client.app = make_app(engine, **app)
    try:
        yield bed, client
    finally:
        engine.shutdown(timeout=5)


def complete(client: AppClient, key: str = "", **body: Any) -> Any:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = {"prompt": [5, 6, 7], "max_tokens": 4, **body}
    return client.post("/v1/completions", json=body, headers=headers)


@pytest.mark.parametrize("stream", [False, True])
def test_what_timed_out_before_its_first_token_is_503(stream: bool) -> None:
    """C97: with Retry-After, streamed or not; the request is gone."""
    with served(SchedulerConfig(max_queue_seconds=1e-9)) as (bed, client):
        answer = complete(client, stream=stream)
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert "timed out" in answer.json()["error"]["message"]
        assert not bed.core.has_unfinished()


def test_an_answer_cut_by_its_deadline_says_so() -> None:
    """What was generated until then is sent, with finish_reason timeout."""
    with served(SchedulerConfig()) as (bed, client):
        times = iter(range(10**6))
        bed.core.now = lambda: float(next(times))
        answer = complete(client, max_tokens=100, timeout=5).json()
        assert answer["choices"][0]["finish_reason"] == "timeout"
        assert 0 < answer["usage"]["completion_tokens"] < 100
        bad = complete(client, timeout=-1)
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "timeout")


def test_a_full_queue_of_the_real_engine_is_503() -> None:
    """C97: the limit in prompt tokens; n counts each answer."""
    with served(SchedulerConfig(max_num_seqs=1, max_num_queued_reqs=1)) as (bed, client):
        with bed.core.queue._lock:
            bed.core.queue._num_tokens[10**9] = 3
        answer = complete(client)
        assert answer.status_code == 503
        assert "1 requests wait, the limit is 1" in answer.json()["error"]["message"]
        bed.core.queue.leave(10**9)
        assert complete(client).status_code == 200


def test_priorities_reach_the_queue() -> None:
    """R95: and are refused where nobody would look at them."""
    with served(SchedulerConfig(scheduling_policy="priority")) as (_, client):
        assert complete(client, priority=-3).status_code == 200
    with served(SchedulerConfig()) as (_, client):
        answer = complete(client, priority=1)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")


@pytest.mark.parametrize(
    ("trusted", "wanted"), [(False, {"0", "1"}), (True, {"0", "1", "user anna"})]
)
def test_the_tenant_is_the_key_and_the_user_only_where_trusted(
    trusted: bool, wanted: set[str]
) -> None:
    settings = SchedulerConfig(scheduling_policy="fair_share", trust_user_field=trusted)
    with served(settings, api_key=["alpha", "beta"]) as (bed, client):
        assert complete(client, key="alpha").status_code == 200
        assert complete(client, key="beta").status_code == 200
        assert complete(client, key="beta", user="anna").status_code == 200
        assert complete(client, key="gamma").status_code == 401
        assert complete(client).status_code == 401
        order = bed.scheduler.waiting
        assert isinstance(order, FairShare)
        assert order.counters.keys() == wanted


def test_one_empty_key_among_several_is_refused() -> None:
    with pytest.raises(ConfigError, match="api_key"):
        make_app(FakeEngine(), api_key=["alpha", " "])
