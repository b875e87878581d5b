"""From torchrun's flags to torch's launch configuration, with the checks and defaults that torchrun lacks."""

from __future__ import annotations

import copy
import errno
import importlib.util
import os
import shutil
import signal
import sys
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import TCPStore
from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from rankstep.errors import LaunchError
from rankstep.launch import bootstrap
from rankstep.world.ports import announce, listen, port_holder

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from torch.distributed.launcher.api import LaunchConfig

_TORCHRUN_PORT = 29500
# Seconds that ranks get after Ctrl-C, where somebody sits and waits; after other signals it is torch's 30.
_INTERRUPT_GRACE = 3.0


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """All that the elastic launcher needs.

    ``grace`` maps the signals to handle to the seconds that ranks get after each. ``store`` is the meeting point when this launcher hosts it; it lives as long as the plan. The launcher
    listens before any rank starts, so that no other process can take the port in between.
    """

    config: LaunchConfig
    command: Callable[..., object] | str
    words: list[str]
    grace: dict[int, float]
    store: TCPStore | None

    def forget_ranks(self) -> None:
        """Take the last attempt's keys out of the store, before the ranks of one node start again.

        torch leaves them there, and the new ranks would connect to the addresses of the old ones.
        """
        if self.store is None or self.config.max_nodes > 1:
            return
        for key in self.store.list_keys():
            # The elastic agent's own keys carry the run's name, the store's own begin with init/.
            if not key.startswith((self.config.run_id, "init/")):
                self.store.delete_key(key)


def plan_launch(args: argparse.Namespace, folder: Path) -> LaunchPlan:
    """Check what the user asks for and turn it into torch's launch configuration.

    One node without rendezvous settings meets on loopback, on a port that the kernel picks here and now: two jobs on
    a host never collide. Everything else means what it means to torchrun.

    Args:
        args: parsed by torchrun's parser.
        folder: for log and error files, unless the user names a folder.

    Raises:
        LaunchError: the program is missing, the port is taken, or torch refuses a flag.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html
    """
    args = copy.copy(args)
    check_program(args)
    with _flags_refused_by_torch():
        _, nodes = torchrun.parse_min_max_nnodes(args.nnodes)
        store = _meeting_point(args, nodes)
        if args.log_dir is None:
            args.log_dir = str(folder)
        config, command, words = torchrun.config_from_args(args)
    grace = _grace(args, config)
    # torch would put its own handlers in place of ours when the ranks start; it gets a signal that nobody sends.
    config.signals_to_handle = "SIGRTMAX"
    if args.no_python and not args.run_path:
        words = ["-I", "-S", bootstrap.__file__, bootstrap.EXECUTE, str(command), *words]
        command = sys.executable
    elif not args.run_path:
        # torchrun's words begin with -u, for the interpreter; the rest is the script's.
        words = [words[0], bootstrap.__file__, *words[1:]]
    return LaunchPlan(config, command, words, grace, store)


def local_ranks(args: argparse.Namespace) -> int:
    """Return how many ranks this node starts.

    Args:
        args: parsed by torchrun's parser.

    Raises:
        LaunchError: ``--nproc-per-node`` is no number from 1 and no kind of device that is there.
    """
    with _flags_refused_by_torch():
        ranks: int = torchrun.determine_local_world_size(args.nproc_per_node)
    if ranks < 1:
        raise LaunchError(
            f"--nproc-per-node {args.nproc_per_node}: a node runs at least one rank. Next: give a number from 1."
        )
    return ranks


def _grace(args: argparse.Namespace, config: LaunchConfig) -> dict[int, float]:
    seconds = float(config.shutdown_timeout or 0)
    grace: dict[int, float] = {}
    for name in config.signals_to_handle.split(","):
        try:
            grace[signal.Signals[name.strip()]] = seconds
        except KeyError as error:
            raise LaunchError(
                f"--signals-to-handle {config.signals_to_handle}: this system has no signal {name.strip()}. "
                "Next: give names such as SIGTERM, separated by commas."
            ) from error
    stated = args.shutdown_timeout is not None or "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in os.environ
    if signal.SIGINT in grace and not stated:
        grace[signal.SIGINT] = _INTERRUPT_GRACE
    return grace


@contextmanager
def _flags_refused_by_torch() -> Iterator[None]:
    try:
        yield
    except LaunchError:
        raise
    except (ValueError, AssertionError, RuntimeError, OSError) as error:
        raise LaunchError(
            f"{str(error).rstrip('.')}. Next: see `rankstep run --help` for what the flags take."
        ) from error


def meeting_place(args: argparse.Namespace, nodes: int) -> tuple[str, int] | None:
    """Return the address and port at which the ranks meet; port 0 is a free one, None what torch's rendezvous decides.

    Args:
        args: parsed by torchrun's parser.
        nodes: how many nodes there may be.
    """
    port: int | None
    if args.standalone:
        return "127.0.0.1", 0
    if args.rdzv_backend != "static":
        return None
    if args.rdzv_endpoint:
        host, port = parse_rendezvous_endpoint(args.rdzv_endpoint, _TORCHRUN_PORT)
    else:
        host, port = args.master_addr, args.master_port
    if port is None:
        return ("127.0.0.1", 0) if nodes == 1 else (host, _TORCHRUN_PORT)
    return host, port


def _meeting_point(args: argparse.Namespace, nodes: int) -> TCPStore | None:
    """Choose where the ranks meet, and listen there if it is this launcher's part; changes the arguments to match."""
    place = meeting_place(args, nodes)
    if place is None:
        return None
    host, port = place
    if port == 0 and nodes == 1:
        args.rdzv_backend, args.rdzv_endpoint, args.node_rank = "static", "", 0
        args.rdzv_id = str(uuid.uuid4())
    if args.node_rank == 0:
        store = _listen(host, port)
        port = store.port
    else:
        store = None
    args.master_addr, args.master_port = host, port
    if args.rdzv_endpoint:
        args.rdzv_endpoint = f"{f'[{host}]' if ':' in host else host}:{port}"
    return store


def _listen(host: str, port: int) -> TCPStore:
    try:
        listener = listen(host, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise LaunchError(
            f"port {port} is taken by {port_holder(port)}, so the ranks cannot meet there; none was started. Next: end "
            "that process, choose another --master-port, or leave the flag out: on one node a free port is found."
        ) from error
    announce("the launcher", listener)
    port = listener.getsockname()[1]
    return TCPStore(
        "127.0.0.1" if host == "localhost" else host,
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def check_program(args: argparse.Namespace) -> None:
    """See that what is to be run is there.

    Args:
        args: parsed by torchrun's parser.

    Raises:
        LaunchError: it is not.
    """
    program = args.training_script
    if args.module:
        # Another interpreter may see modules that this one does not.
        found = "PYTHON_EXEC" in os.environ or _module_exists(program.partition(".")[0])
        kind, looked = "module", f"{Path.cwd()} and the installed packages"
    elif args.no_python and not args.run_path:
        found, kind, looked = shutil.which(program) is not None, "program", "PATH"
    else:
        found, kind, looked = Path(program).exists(), "script", str(Path.cwd())
    if not found:
        raise LaunchError(
            f"there is no {kind} {program} (looked in {looked}); no rank was started. Next: correct its name; the "
            "launcher's own flags come before it, the program's after it."
        )


def _module_exists(name: str) -> bool:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:
        return False
    finally:
        sys.path.pop(0)
