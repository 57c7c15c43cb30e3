"""Whatever JSON comes in: never a 500, always JSON out, and the server goes on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beds.fake_engine import FakeEngine
from beds.live_server import AppClient, sse_events, strict_json
from octavo.server.fields import HARMLESS_FIELDS, NOT_YET_FIELDS
from octavo.server.protocol import SAMPLING_FIELDS, SAMPLING_FLAGS
from octavo.server.structured import ALIASES, KINDS

FIELDS = sorted(
    {
        *SAMPLING_FIELDS,
        *SAMPLING_FLAGS,
        *HARMLESS_FIELDS,
        *NOT_YET_FIELDS,
        *("model", "prompt", "messages", "stream", "stream_options", "echo", "logprobs"),
        *("top_logprobs", "max_completion_tokens", "best_of", "logit_bias", "priority"),
        *("cache_salt", "truncate_prompt_tokens", "truncation_side", "return_token_ids"),
        *("return_tokens_as_token_ids", "response_format", "tools", "tool_choice", "modalities"),
        *("add_special_tokens", "add_generation_prompt", "continue_final_message"),
        *ALIASES,
        *("structured_outputs", "chat_template_kwargs", "tokens", "return_token_strs"),
    }
)

numbers = st.sampled_from(
    [0, 1, -1, 2, 5, 20, 21, 259, 600, 2**31, 2**63, 10**40, 0.5, -1.5, 1e300]
)
texts = st.sampled_from(
    ["", "a", "hi", "é😀", "\x00", "text", "left", "auto", "fake/model", "user"]
)
leaves = st.none() | st.booleans() | numbers | texts
names = st.sampled_from(
    ["type", "text", "role", "content", "name", "1", "-1", "include_usage", "json_schema", *KINDS]
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
bodies = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), values, max_size=5)
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "x"]), "content": values}
)
BASES: dict[str, Any] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
}


@pytest.fixture(scope="module")
def fuzzed() -> AppClient:
    return AppClient(FakeEngine())


@pytest.mark.parametrize("path", sorted(BASES))
@given(body=bodies, messages=st.none() | st.lists(message, max_size=2), keep=st.booleans())
def test_no_body_is_an_internal_error(
    fuzzed: AppClient, path: str, body: dict[str, Any], messages: Any, keep: bool
) -> None:
    """Valid bases with odd fields on top, and bodies of odd fields alone."""
    sent = {**(BASES[path] if keep else {}), **body}
    if messages is not None:
        sent["messages"] = messages
    response = fuzzed.post(path, sent)
    assert response.status_code in (200, 400, 404), (sent, response.text)
    if response.headers["content-type"].startswith("text/event-stream"):
        assert all("error" not in event for event in sse_events(response.text))
        return
    answer = strict_json(response.content)
    if response.status_code != 200:
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert answer["error"]["code"] == response.status_code


@pytest.mark.parametrize("path", sorted(BASES))
@given(content=st.binary(max_size=40))
def test_no_bytes_are_an_internal_error(fuzzed: AppClient, path: str, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = fuzzed.post(path, content=content, headers=headers)
    assert response.status_code == 400
    assert strict_json(response.content)["error"]["code"] == 400
