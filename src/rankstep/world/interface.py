"""Which network interface gloo uses: loopback on one host, the one that leads to rank 0's host on several."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from rankstep.world.env import is_loopback

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankstep.world.env import RankEnv

_VARIABLE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "lo"
# The ioctl that asks an interface for its IPv4 address, and where in the answer that lies (netdevice(7)).
_SIOCGIFADDR = 0x8915
_ADDRESS = slice(20, 24)


@contextmanager
def gloo_interface(env: RankEnv) -> Iterator[None]:
    """Tell gloo which interface to listen on, unless the user has named one.

    Left alone, gloo listens wherever the host's name points, which is the wrong interface on many hosts. It reads the
    variable whenever a group is made, so that stays set while the world is open, and groups made later use the same.

    Args:
        env: this rank's place and meeting point.

    Source: https://docs.pytorch.org/docs/stable/distributed.html#common-environment-variables
    """
    wished = any(os.environ.get(name) for name in (_VARIABLE, "TP_SOCKET_IFNAME"))
    interface = None if wished else _interface(env)
    if interface is None:
        yield
        return
    os.environ[_VARIABLE] = interface
    try:
        yield
    finally:
        os.environ.pop(_VARIABLE, None)


def _interface(env: RankEnv) -> str | None:
    names = [name for _, name in socket.if_nameindex()]
    if env.node_count == 1 or (env.master_addr is not None and is_loopback(env.master_addr)):
        return _LOOPBACK if _LOOPBACK in names else None
    if env.master_addr is None:
        return None
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: connecting a datagram socket only looks up the route.
        probe.connect((env.master_addr, env.master_port or 1))
        own = probe.getsockname()[0]
        # A host whose name points to its own loopback tells nothing about the way to the others.
        if not is_loopback(own):
            return next((name for name in names if _address(probe, name) == own), None)
    return None


def _address(probe: socket.socket, name: str) -> str | None:
    import fcntl

    with suppress(OSError):
        request = struct.pack("256s", name.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[_ADDRESS])
    return None
