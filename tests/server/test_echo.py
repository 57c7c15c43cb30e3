"""Echo with logprobs, and prompt logprobs in their own form: what scoring clients read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from beds.fake_engine import FakeEngine, FakeTokenizer
from beds.live_server import AppClient


def echoed(client: AppClient, **body: Any) -> dict[str, Any]:
    response = client.complete(echo=True, **{"max_tokens": 0, **body})
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def test_scoring_a_prompt_gives_an_entry_for_each_of_its_tokens(client: AppClient) -> None:
    """C50, C52: echo, logprobs, max_tokens 0: the first entry is null, the text is the prompt."""
    response = client.complete(prompt="hé\n", echo=True, max_tokens=0, logprobs=2)
    body = response.json()
    (choice,) = body["choices"]
    assert choice["text"] == "hé\n"
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0
    found = choice["logprobs"]
    assert found["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "\n"]
    assert found["text_offset"] == [0, 1, 1, 2]
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    assert all(x < 0 for x in found["token_logprobs"][1:])
    assert all(2 <= len(top) <= 3 for top in found["top_logprobs"][1:])


def test_what_lm_eval_reads(client: AppClient) -> None:
    """C52: prompts as ids, one token generated: [ctxlen:-1] is the continuation, with dicts, and
    the token's own number is in its dict, the same bits."""
    prompts = [list(b"context and more"), list(b"ab")]
    body = {"echo": True, "max_tokens": 1, "logprobs": 1, "temperature": 0, "seed": 1234}
    response = client.complete(prompt=prompts, **body)
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    for prompt, choice in zip(prompts, choices, strict=True):
        found = choice["logprobs"]
        assert all(len(values) == len(prompt) + 1 for values in found.values())
        for value, top in zip(
            found["token_logprobs"][1:-1], found["top_logprobs"][1:-1], strict=True
        ):
            assert value in top.values()


@pytest.mark.parametrize("n", [1, 2])
def test_every_answer_has_the_prompts_part(client: AppClient, n: int) -> None:
    response = client.complete(prompt="abc", echo=True, max_tokens=4, logprobs=0, n=n)
    for choice in response.json()["choices"]:
        found = choice["logprobs"]
        assert found["tokens"][:3] == ["a", "b", "c"]
        assert found["text_offset"][:4] == [0, 1, 2, 3]


def test_a_bos_stands_before_the_start_of_the_text() -> None:
    """C52: it has an entry as every prompt token, and no character of the echoed text."""
    client = AppClient(FakeEngine(tokenizer=FakeTokenizer(adds_bos=True)))
    choice = echoed(client, prompt="hé", logprobs=0, max_tokens=1)
    assert choice["text"].startswith("hé")
    assert choice["logprobs"]["tokens"][:3] == ["<s>", "h", "bytes:\\xc3"]
    assert choice["logprobs"]["text_offset"][:5] == [0, 0, 1, 1, 2]


def test_prompt_logprobs_in_vllms_form(client: AppClient) -> None:
    """R68: null, then entries by token id, the prompt's own among them; at the top for a chat."""
    body = client.complete(prompt="abc", prompt_logprobs=2, max_tokens=2).json()
    found = body["choices"][0]["prompt_logprobs"]
    assert [entry and str(token) in entry for entry, token in zip(found, b"abc", strict=True)] == [
        None,
        True,
        True,
    ]
    assert all(set(x) == {"logprob", "rank", "decoded_token"} for x in found[1].values())
    assert "logprobs" not in body["choices"][0] or body["choices"][0]["logprobs"] is None
    chat = client.chat(prompt_logprobs=0, n=2).json()
    assert chat["prompt_logprobs"][0] is None
    assert all("prompt_logprobs" not in choice for choice in chat["choices"])


def test_each_form_has_the_alternatives_it_asked_for(client: AppClient) -> None:
    """C29: echo with logprobs and prompt_logprobs differ in one request."""
    choice = echoed(client, prompt="abcd", logprobs=1, prompt_logprobs=5)
    assert all(len(top) <= 2 for top in choice["logprobs"]["top_logprobs"][1:])
    assert all(5 <= len(entry) <= 6 for entry in choice["prompt_logprobs"][1:])


def test_numbers_are_strict_json(client: AppClient) -> None:
    """C47: infinities become the floor."""

    def refuse(name: str) -> None:
        raise AssertionError(name)

    for _ in range(5):
        response = client.complete(
            prompt="abcdefgh", echo=True, logprobs=3, prompt_logprobs=3, top_k=1
        )
        json.loads(response.text, parse_constant=refuse)
