"""Echo with logprobs, and prompt logprobs in their own form: what scoring clients read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from beds.fake_engine import FakeEngine, FakeTokenizer, Piece
from beds.live_server import AppClient
from beds.tiny_files import write_tiny_gguf
from octavo.engine.async_llm import AsyncLLM
from octavo.sampling_params import SamplingParams


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


@pytest.mark.parametrize("num_late", [1, 2])
def test_an_answer_whose_time_was_over_before_its_prompt_was_scored(num_late: int) -> None:
    """One of the n has the scores of the prompt, or none has; that is no fault."""

    def script(prompt: list[int], params: SamplingParams, index: int) -> Iterator[Piece]:
        if index < 2 - num_late:
            yield Piece("a", (97,))
        yield Piece(finish_reason="timeout")

    body = AppClient(FakeEngine(script=script)).chat(prompt_logprobs=0, n=2)
    if num_late == 2:
        assert body.status_code == 503
        return
    chat = body.json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert [choice["finish_reason"] for choice in chat["choices"]] == ["timeout"] * 2
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


def test_new_fields_reach_the_engine_as_they_were_sent(client: AppClient) -> None:
    """C40, R69: and a word of several tokens stays one word."""
    response = client.complete(
        bad_words=["at the"],
        logprob_token_ids=[4],
        logprobs_mode="processed",
        logits_processors={"dry": {"multiplier": 0.5}},
        max_tokens=1,
    )
    assert response.status_code == 200, response.text
    (job,) = client.engine.submitted
    assert job.params.bad_words == ("at the",)
    assert job.params.logprob_token_ids == (4,)
    assert job.params.logprobs_mode == "processed"
    assert job.params.logits_processors == (("dry", (("multiplier", 0.5),)),)
    assert response.json()["choices"][0]["logprobs"] is not None


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_client_tells_a_greedy_continuation_by_equal_bits(tmp_path: Path, backend: str) -> None:
    """C43, C50: a whole server over a tiny model, as lm-eval uses it: the model's own greedy answer
    is recognised as such, another is not, and the sum over it is that of the answer's logprobs."""
    write_tiny_gguf(tmp_path / "tiny.gguf")
    engine = AsyncLLM(str(tmp_path / "tiny.gguf"), backend=backend, num_kv_blocks=64)
    try:
        client = AppClient(engine)
        context = [5, 9, 17, 33, 21, 8]
        greedy = {"temperature": 0, "ignore_eos": True, "logprobs": 1}
        answer = client.complete(
            prompt=context, max_tokens=5, return_token_ids=True, **greedy
        ).json()["choices"][0]
        own = [*context, *answer["token_ids"]]
        other = [*context, *(3 + (i + 1) % 40 for i in answer["token_ids"])]
        body = client.complete(prompt=[own, other, own], echo=True, max_tokens=1, **greedy).json()
        verdicts, sums = [], []
        for choice, prompt in zip(body["choices"], (own, other, own), strict=True):
            found = choice["logprobs"]
            assert len(found["tokens"]) == len(prompt) + 1
            scored = found["token_logprobs"][len(context) : -1]
            tops = found["top_logprobs"][len(context) : -1]
            verdicts.append(
                all(x == max(top.values()) for x, top in zip(scored, tops, strict=True))
            )
            sums.append(sum(scored))
        assert verdicts == [True, False, True]
        assert sums[0] == sums[2] == sum(answer["logprobs"]["token_logprobs"])
    finally:
        engine.shutdown(timeout=5)


def test_a_prompt_that_fills_the_model_is_scored_and_no_longer_one(tmp_path: Path) -> None:
    """C50, C1: max_model_len tokens with max_tokens 0, in all scoring forms and for n answers; an
    answer of one token does not fit, and is refused with both numbers."""
    write_tiny_gguf(tmp_path / "tiny.gguf")
    path = str(tmp_path / "tiny.gguf")
    engine = AsyncLLM(path, backend="reference", max_model_len=24, num_kv_blocks=8)
    try:
        client = AppClient(engine)
        prompt = [5 + 3 * i % 40 for i in range(24)]
        for n in (1, 3):
            body = client.complete(
                prompt=prompt, echo=True, max_tokens=0, logprobs=1, prompt_logprobs=0, n=n
            ).json()
            assert [len(x["logprobs"]["token_logprobs"]) for x in body["choices"]] == [24] * n
            assert len({json.dumps(x["logprobs"]) for x in body["choices"]}) == 1
            assert len(body["choices"][0]["prompt_logprobs"]) == 24
            assert body["usage"]["completion_tokens"] == 0
        for longer, number in (({"max_tokens": 1}, 24), ({"prompt": [*prompt, 5]}, 25)):
            body = {"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 1, **longer}
            refused = client.complete(**body)
            assert refused.status_code == 400
            message = refused.json()["error"]["message"]
            assert "context length is 24 tokens" in message
            assert f"prompt alone has {number} tokens" in message
    finally:
        engine.shutdown(timeout=5)
