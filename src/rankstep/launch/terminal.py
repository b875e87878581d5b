"""A terminal for rank 0 that the launcher reads: progress bars and colours work, and other ranks' lines cannot cut them."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
import tty
from contextlib import suppress
from dataclasses import dataclass

_SIZE = struct.calcsize("HHHH")


@dataclass(slots=True)
class Terminal:
    """A pseudo-terminal: a rank writes at ``path``, the launcher reads from ``reader``.

    ``writer`` is held open so that it never reaches its end, whichever process opens and closes it. ``screen`` is the real terminal, whose size
    it takes on.
    """

    path: str
    reader: int
    writer: int
    screen: int
    size: bytes = b""

    def fit(self) -> None:
        """Take on the size of the real terminal, which may have changed."""
        with suppress(OSError):
            size = fcntl.ioctl(self.screen, termios.TIOCGWINSZ, b"\0" * _SIZE)
            if size != self.size:
                fcntl.ioctl(self.writer, termios.TIOCSWINSZ, size)
                self.size = size

    def close(self) -> None:
        """Close the launcher's side."""
        os.close(self.reader)
        os.close(self.writer)


def open_terminal(screen: int) -> Terminal | None:
    """Make a terminal that stands for the real one; None where there can be none.

    Args:
        screen: the real terminal's descriptor.

    Source: https://man7.org/linux/man-pages/man7/pty.7.html
    """
    if _would_be_taken_on():
        return None
    try:
        reader, writer = pty.openpty()
    except OSError:
        return None
    # As it is: the real terminal does what a terminal does with ends of lines.
    tty.setraw(writer)
    os.set_blocking(reader, False)
    made = Terminal(os.ttyname(writer), reader, writer, screen)
    made.fit()
    return made


def _would_be_taken_on() -> bool:
    """Tell whether opening a terminal makes it this process's own, whose end would send it SIGHUP."""
    if os.getsid(0) != os.getpid():
        return False
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY))
    except OSError:
        return True
    return False
