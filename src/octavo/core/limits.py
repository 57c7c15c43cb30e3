"""The door: what can never run is refused at once, with both numbers, instead of waiting (C1)."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import RequestError, RequestTooLarge
from ..request import Request


class Limits(NamedTuple):
    """What no request can exceed, however long it waits."""

    max_model_len: int
    """Tokens of prompt and output."""
    kv_capacity: int
    """Tokens that the whole KV pool holds."""
    max_prompt_tokens: int | None
    """Prompt tokens that one step can take, where prompts are not cut."""

    def max_output_tokens(self, num_prompt_tokens: int) -> int:
        """Output tokens that are left to such a prompt; below 1: it can't run.

        The last token of an answer is never computed, so it needs no slot in the pool.
        """
        return min(self.max_model_len, self.kv_capacity + 1) - num_prompt_tokens

    def check(self, request: Request) -> None:
        """Raise RequestError if `request` can't ever run to its end."""
        num_prompt = request.num_prompt_tokens
        if num_prompt == 0:
            raise RequestError("the prompt is empty: give at least one token", param="prompt")
        if request.max_tokens < 1:
            raise RequestError("max_tokens is 0: there is nothing to generate", param="max_tokens")
        num_output = int(request.params.max_tokens != 0)  # a prompt that is only scored needs none
        if num_prompt + num_output > self.max_model_len:
            what = "max_model_len (tokens of the prompt and one of output)"
            raise RequestTooLarge(what, num_prompt + 1, self.max_model_len)
        most = num_prompt - 1 + request.max_tokens
        num_slots = max(num_prompt, min(most, self.max_model_len - 1))
        if num_slots > self.kv_capacity:
            what = "KV cache (tokens of prompt and output; raise num_kv_blocks or lower max_tokens)"
            raise RequestTooLarge(what, num_slots, self.kv_capacity)
        if self.max_prompt_tokens is not None and num_prompt > self.max_prompt_tokens:
            what = "max_num_batched_tokens (tokens of the prompt, as enable_chunked_prefill is off)"
            raise RequestTooLarge(what, num_prompt, self.max_prompt_tokens)
