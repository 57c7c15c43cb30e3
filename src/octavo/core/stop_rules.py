"""When a request is done, as far as token ids tell; stop strings are found by the engine."""

from __future__ import annotations

from ..request import Request


def find_stop(request: Request, token_id: int, max_model_len: int) -> tuple[str | None, int | None]:
    """(finish_reason, stop_reason) now that `token_id` is the newest token; (None, None): go on.

    An end or stop id is "stop", with the id as stop_reason if it is the user's own; the last
    allowed token is "length". The first min_tokens tokens end nothing (C41).
    """
    params = request.params
    num_tokens = len(request.token_ids)
    num_output = num_tokens - request.num_prompt_tokens
    if num_output > params.min_tokens:
        if token_id in request.eos_token_ids and not params.ignore_eos:
            return "stop", None
        if token_id in params.stop_token_ids:
            return "stop", token_id
    if num_output >= request.max_tokens or num_tokens >= max_model_len:
        return "length", None
    return None, None
