"""Errors on the wire: OpenAI's form, HTTP status as code, and never a traceback."""

from __future__ import annotations

import logging

from starlette.exceptions import HTTPException

from ..errors import EngineDead, OctavoError, QueueFull, RequestError
from ..outputs import SHUTTING_DOWN

logger = logging.getLogger("octavo.server")

MAX_MESSAGE_CHARS = 2000
"""A client's own value may stand in a message; a megabyte of it may not."""

RETRY_AFTER_SECONDS = 1

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class ApiError(HTTPException):
    """An answer that is an error: HTTP status, headers, and the body that `body()` gives."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.param = param
        super().__init__(status, message, headers)

    def body(self) -> dict[str, object]:
        """OpenAI's form; `code` is the HTTP status."""
        message = self.detail
        if len(message) > MAX_MESSAGE_CHARS:
            message = f"{message[:MAX_MESSAGE_CHARS]}... ({len(message)} characters)"
        return {
            "error": {
                "message": message,
                "type": TYPES.get(self.status_code, "InternalServerError"),
                "param": self.param,
                "code": self.status_code,
            }
        }


def unavailable(message: str) -> ApiError:
    """503 with Retry-After: clients may come back, here or elsewhere."""
    return ApiError(503, message, headers={"retry-after": str(RETRY_AFTER_SECONDS)})


def ended_by(error: str | None) -> ApiError:
    """What an answer that the engine ended with an error is told."""
    if error == SHUTTING_DOWN:
        return unavailable("The server is shutting down.")
    return ApiError(500, error or "The engine ended this answer with an error.")


def to_api_error(error: BaseException, *, draining: bool = False) -> ApiError:
    """What a client is told about `error`. A fault of our own goes to the log, not to the wire."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param)
    if isinstance(error, QueueFull):
        return unavailable(str(error))
    if isinstance(error, EngineDead) and draining:
        return unavailable("The server is shutting down.")
    if isinstance(error, OctavoError):
        return ApiError(500, str(error))
    logger.error("unexpected fault while answering", exc_info=error)
    return ApiError(500, "Internal error; the server's log has the details.")
