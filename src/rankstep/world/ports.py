"""Ports on this host: listening on one, and finding out who holds it."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

from rankstep.world.env import is_loopback
from rankstep.world.identity import TOKEN

# The state column of /proc/net/tcp for a listening socket.
_LISTEN = "0A"
_BACKLOG = 2048


def listen(address: str, port: int) -> socket.socket:
    """Listen on a port: on loopback alone if the address is one, else where it has to be.

    A numeric address of this host is the one that all ranks connect to, so that it is enough. A name may mean another
    interface on another host, and an address may be translated on the way: then it is all interfaces.

    Args:
        address: the address by which the ranks will reach this host.
        port: the port; 0 lets the kernel choose a free one.

    Raises:
        OSError: with ``errno.EADDRINUSE`` if somebody else holds the port; `port_holder` says who.
    """
    if is_loopback(address):
        host = "127.0.0.1" if address == "localhost" else address.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    with suppress(ValueError):
        numeric = ipaddress.ip_address(address.strip("[]"))
        family = socket.AF_INET6 if numeric.version == 6 else socket.AF_INET
        try:
            return socket.create_server((str(numeric), port), family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("::", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
            )
        except OSError as error:
            # A kernel can know IPv6 and have it switched off; IPv4 then serves.
            if error.errno == errno.EADDRINUSE:
                raise
    return socket.create_server(("", port), backlog=_BACKLOG)


def announce(who: str, listener: socket.socket) -> None:
    """Say on standard error where a socket listens, if other hosts can reach it.

    Args:
        who: who listens.
        listener: the socket.
    """
    host, port = listener.getsockname()[:2]
    if not is_loopback(host):
        where = "all interfaces" if ipaddress.ip_address(host).is_unspecified else host
        # A user who has several nodes should learn of the token without reading the documents.
        open_to = "" if os.environ.get(TOKEN) else f"; {TOKEN} is not set, so no secret is compared"
        sys.stderr.write(
            f"rankstep: {who} listens on {where}, port {port}, for the other hosts{open_to}\n"
        )
        sys.stderr.flush()


def port_holder(port: int) -> str:
    """Say which process holds a port, as ``process 4711 (python train.py)``.

    Best effort: another user's processes may be hidden, and the text then says so.

    Args:
        port: a local TCP port.

    Source: https://docs.kernel.org/networking/proc_net_tcp.html
    """
    links = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(str(fd.readlink()) in links for fd in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                return f"process {process.name} ({command.decode(errors='replace').strip()})"
    return "a process that this user may not see"


def _listening_inodes(port: int) -> set[str]:
    inodes: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(fields[9])
    return inodes
