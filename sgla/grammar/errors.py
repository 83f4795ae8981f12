"""Why a grammar is refused."""

from __future__ import annotations


class GrammarError(ValueError):
    """The grammar is wrong, too large or asks for something that cannot be honoured.
    The message is for the user.

    ``unsupported``: it is right, but this server cannot do it."""

    def __init__(self, message: str, unsupported: bool = False) -> None:
        super().__init__(message)
        self.unsupported = unsupported
