"""This rank's sockets to the other ranks of its host: sending to all, hearing what came, sleeping until something does."""

from __future__ import annotations

import os
import select
import socket
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

from rankstep.collectives.posts import Peer

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankstep.collectives.neighbours import Meeting

_all: weakref.WeakSet[Channels] = weakref.WeakSet()


class Channels:
    """Messages between the ranks of one host.

    Args:
        meeting: Who they are.
        when_done: Is called with (operation, rank) for each word that a peer has done its part.

    Attributes:
        peers: The other ranks, in rank order.
    """

    def __init__(self, meeting: Meeting, when_done: Callable[[int, int], None]) -> None:
        self.peers = [Peer(r, meeting.pids[r], meeting.sockets[r]) for r in sorted(meeting.sockets)]
        self._when_done = when_done
        self._poll = select.poll()
        for peer in self.peers:
            peer.socket.setblocking(False)
            self._poll.register(peer.socket, select.POLLIN)
        self._waker = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._waker, select.POLLIN)
        sockets = [peer.socket for peer in self.peers]
        weakref.finalize(self, _close, sockets, self._waker).atexit = False
        _all.add(self)

    def hear(self) -> None:
        """Take in everything that has come."""
        for peer in [peer for peer in self.peers if not peer.ended]:
            for number in peer.hear():
                self._when_done(number, peer.rank)
            if peer.ended:
                self._poll.unregister(peer.socket)

    def send(self, message: bytes, fd: int | None = None) -> None:
        """Send to every peer. One that has ended is found out where something is expected from it."""
        for peer in self.peers:
            while not peer.ended:
                try:
                    if fd is None:
                        peer.socket.send(message)
                    else:
                        socket.send_fds(peer.socket, [message], [fd])
                except BlockingIOError:
                    self._make_room(peer)
                    continue
                except OSError:
                    pass
                break

    def _make_room(self, peer: Peer) -> None:
        """The peer does not read, maybe because it waits for this rank to read."""
        self.hear()
        room = select.poll()
        room.register(peer.socket, select.POLLOUT)
        room.poll(1)

    def sleep(self, limit_ms: int) -> bool:
        """Sleep until something comes or :meth:`wake` is called; False: the limit was reached."""
        if not self._poll.poll(limit_ms):
            return False
        with suppress(BlockingIOError):
            os.eventfd_read(self._waker)
        return True

    def wake(self) -> None:
        """End :meth:`sleep`; from any thread."""
        with suppress(OSError):
            os.eventfd_write(self._waker, 1)

    def close_in_child(self) -> None:
        """This process is a copy of the rank (a worker of a DataLoader): it must not keep the sockets open."""
        for peer in self.peers:
            peer.socket.close()
            peer.ended = True


def _close(sockets: list[socket.socket], waker: int) -> None:
    for each in sockets:
        each.close()
    os.close(waker)


def _leave_to_parent() -> None:
    for channels in list(_all):
        channels.close_in_child()


os.register_at_fork(after_in_child=_leave_to_parent)
