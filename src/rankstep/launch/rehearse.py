"""What each node would do, told without doing it: commands, variables, and where the ranks meet."""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING

from torch.distributed import run as torchrun

from rankstep.launch.launch import rank_variables
from rankstep.launch.plan import check_program, local_ranks, meeting_place
from rankstep.world.env import is_loopback
from rankstep.world.identity import JOB, TOKEN

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

_FREE_PORT = "a free port"


def rehearse(args: argparse.Namespace, words: Sequence[str], extra: Mapping[str, str]) -> list[str]:
    """Tell line by line what `rankstep run` would do on each node; nothing is started, and no port is opened.

    Args:
        args: parsed by torchrun's parser.
        words: the command line that they were parsed from.
        extra: variables that the command sets for the ranks on top.

    Raises:
        LaunchError: the program is missing, or a flag is wrong.
    """
    check_program(args)
    ranks = local_ranks(args)
    fewest, most = torchrun.parse_min_max_nnodes(args.nnodes)
    place = meeting_place(args, most)
    each = f"{ranks} rank{'s' if ranks > 1 else ''}"
    own = {**rank_variables(args), **extra}
    if TOKEN in own:
        own[TOKEN] = "(a new secret)"
    elif TOKEN in os.environ:
        own[TOKEN] = "(yours)"
    if os.environ.get(JOB):
        own[JOB] = os.environ[JOB]
    if place is None:
        met = f"{args.rdzv_backend} at {args.rdzv_endpoint or 'this host'}, id {args.rdzv_id}"
        lines = [
            f"{args.nnodes} nodes with {each} each",
            f"who is which node and rank is decided when they meet: {met}",
            "",
            f"each node: {_line(args, words, None)}",
        ]
        return [*lines, *_node(args, None, ranks, fewest, ("?", 0), own)]
    host, port = place
    lines = [f"{most} node{'s' if most > 1 else ''} with {each} each"]
    for node in range(most):
        hosts = "listens" if node == 0 else "is met"
        shown = _FREE_PORT if port == 0 else f"port {port}"
        reach = "this host only" if is_loopback(host) else "other hosts can connect"
        lines += [
            "",
            f"node {node}: {_line(args, words, node if most > 1 else None)}",
            f"  node 0 {hosts} at {host}, {shown} ({reach})",
            *_node(args, node, ranks, most, (host, port), own),
        ]
    return lines


def _node(
    args: argparse.Namespace,
    node: int | None,
    ranks: int,
    nodes: int,
    place: tuple[str, int],
    own: Mapping[str, str],
) -> list[str]:
    host, port = place
    unknown = "(decided when they meet)"
    every = {
        "WORLD_SIZE": str(ranks * nodes) if node is not None else unknown,
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": unknown if node is None else str(node),
        "GROUP_WORLD_SIZE": unknown if node is None else str(nodes),
        "MASTER_ADDR": unknown if node is None else host,
        "MASTER_PORT": unknown if node is None else str(port) if port else f"({_FREE_PORT})",
        "TORCHELASTIC_MAX_RESTARTS": str(args.max_restarts),
        **own,
    }
    lines = [
        "  every rank:",
        *(f"    {name}={value}" for name, value in every.items()),
        f"    {shlex.join(_program(args))}",
    ]
    for local in range(ranks):
        number = f"rank {node * ranks + local}" if node is not None else "a rank"
        rank = f"RANK={node * ranks + local} " if node is not None else ""
        lines.append(f"  {number}: {rank}LOCAL_RANK={local}")
    return lines


def _program(args: argparse.Namespace) -> list[str]:
    words = [args.training_script, *args.training_script_args]
    if args.no_python and not args.run_path:
        return words
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    return [python, "-u", *(["-m"] if args.module else []), *words]


def _line(args: argparse.Namespace, words: Sequence[str], node: int | None) -> str:
    """Return the command line for one node: the one given, with the node's own number."""
    script = len(words) - 1 - len(args.training_script_args)
    flags, skip = [], False
    for word in words[:script]:
        name = word.partition("=")[0].replace("_", "-")
        if skip or name in ("--dry-run", "--node-rank"):
            # `--node-rank 1` is two words, `--node-rank=1` is one.
            skip = not skip and word.replace("_", "-") == "--node-rank"
            continue
        flags.append(word)
    if node is not None:
        flags += ["--node-rank", str(node)]
    return shlex.join(["rankstep", "run", *flags, *words[script:]])
