"""A fake engine and a client in process, fresh for each test."""

from __future__ import annotations

import pytest

from beds.fake_engine import FakeEngine
from beds.live_server import AppClient


@pytest.fixture
def client() -> AppClient:
    return AppClient(FakeEngine())
