"""One tree of errors: everything that a user can cause derives from OctavoError, reads as advice.

Three kinds of no: an error here means *never* (tell the caller), a returned None means *not now*
(wait or preempt), an assertion means our own bug.
"""

from __future__ import annotations


class OctavoError(Exception):
    """Base of every error that Octavo raises on purpose; its text is fit to show to a user."""


class ConfigError(OctavoError):
    """A setting has a value that can't work."""

    def __init__(self, field: str, value: object, wanted: str) -> None:
        self.field = field
        self.value = value
        self.wanted = wanted
        super().__init__(f"{field} is {value!r}, but must be {wanted}")


class ModelLoadError(OctavoError):
    """A model can't be found, fetched or read; the text says which file and what to do."""


class RequestError(OctavoError):
    """One request asks for something impossible: HTTP 400 over the wire.

    `param` names the field at fault, when one is.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        self.param = param
        super().__init__(message)


class RequestTooLarge(RequestError):
    """The request can never fit, however long it waits; both numbers are in the text."""

    def __init__(self, what: str, needed: int, available: int) -> None:
        self.needed = needed
        self.available = available
        super().__init__(f"{what}: this request needs {needed}, the limit is {available}")


class QueueFull(OctavoError):
    """The waiting queue is at its limit: HTTP 503 with Retry-After."""


class EngineFault(OctavoError):
    """A fault inside the engine ended this request; no other request is affected."""


class EngineDead(OctavoError):
    """The engine stopped on an internal fault and serves no further request."""
