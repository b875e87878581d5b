"""Where ``rankstep doctor`` asks a running rank: a Unix socket without a file, for processes of the same user alone."""

from __future__ import annotations

import json
import os
import selectors
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rankstep.doctor.channel import STORE_ERRORS

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankstep.doctor.report import Report

NAME = "rankstep-guard-"
"""The rank's pid follows; the name is not in the file system, and vanishes with the process."""

_ASKING_S = 1.0
_CREDENTIALS = struct.Struct("3i")


class Desk:
    """Answers one question at a time.

    Args:
        selector: Calls :meth:`_serve` when somebody comes.
        where: Returns the reports of all ranks.
    """

    def __init__(self, selector: selectors.BaseSelector, where: Callable[[], list[Report]]) -> None:
        self._where = where
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        try:
            self._listener.bind(f"\0{NAME}{os.getpid()}")
            self._listener.listen(4)
        except OSError:
            # Another guard of this process is about to close; nobody misses a second desk.
            self._listener.close()
            return
        selector.register(self._listener, selectors.EVENT_READ, self._serve)

    def close(self) -> None:
        """Serve nobody any more."""
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            with connection:
                connection.settimeout(_ASKING_S)
                if user_of(connection) != os.getuid():
                    return
                answer: dict[str, Any]
                try:
                    answer = {"reports": [json.loads(r.as_json()) for r in self._where()]}
                except STORE_ERRORS as error:
                    answer = {"error": f"the ranks' store does not answer ({error})"}
                connection.sendall(json.dumps(answer).encode())


def user_of(connection: socket.socket) -> int:
    """Who is at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    return int(user)
