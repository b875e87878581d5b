"""Start the ranks of this node, carry their output, stop them in time, and say last what went wrong first."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import elastic_launch

from rankstep.errors import LaunchError
from rankstep.launch.bootstrap import CONTROL_PIPE, LAUNCHER_PID
from rankstep.launch.logs import RankLogs
from rankstep.launch.output import Output
from rankstep.launch.plan import local_ranks, plan_launch
from rankstep.launch.report import exit_code, read_failures, write_report
from rankstep.launch.watch import Watch
from rankstep.world.cores import threads_per_rank
from rankstep.world.identity import TOKEN

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping

    from rankstep.launch.plan import LaunchPlan


def launch(args: argparse.Namespace) -> int:
    """Run the ranks of this node to their end and return the exit code.

    0 if all ranks succeeded; else the code of the rank that failed first (128 and the signal if one killed it), and
    the report about it is the last thing on the screen. 130 after Ctrl-C, 128 and the signal after others.

    Args:
        args: parsed by torchrun's parser (`torch.distributed.run.get_args_parser`).

    Raises:
        LaunchError: no rank could be started.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html
    """
    _hush_torch()
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="rankstep-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        variables = {LAUNCHER_PID: str(os.getpid()), **rank_variables(args)}
        stack.enter_context(_variables(variables))
        return _run(plan_launch(args, folder), folder, keep=args.log_dir is not None)


def rank_variables(args: argparse.Namespace) -> dict[str, str]:
    """Return what the launcher adds to the variables that torch sets for the ranks of this node.

    Args:
        args: parsed by torchrun's parser.

    Raises:
        LaunchError: the flags are wrong.
    """
    ranks = local_ranks(args)
    fewest, _, most = str(args.nnodes).partition(":")
    variables = {}
    if ranks > 1 and not os.environ.get("OMP_NUM_THREADS"):
        variables["OMP_NUM_THREADS"] = str(threads_per_rank(ranks))
    if most not in ("", fewest):
        # torch 2.13 tells a node that joins later where the ranks meet only if they meet anew in each round.
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    elif fewest == "1":
        # Several nodes have no safe way to tell each other one: there the user sets it.
        variables[TOKEN] = secrets.token_hex(16)
    return variables


def _run(plan: LaunchPlan, folder: Path, *, keep: bool) -> int:
    code = 1
    with ExitStack() as stack:
        watch = Watch(folder, plan.grace)
        stack.callback(watch.close)
        output = Output(folder)
        last_words = ""
        # With --run-path the ranks open their files themselves, and cannot open pipes.
        if type(plan.config.logs_specs) is DefaultLogsSpecs and isinstance(plan.command, str):
            plan.config.logs_specs = RankLogs(
                output, plan.config.logs_specs, plan.forget_ranks, keep=keep
            )
        try:
            with _variables({CONTROL_PIPE: str(watch.control_pipe)}):
                # Recorded like torchrun, which hands the first failure on to a launcher above it.
                record(elastic_launch(plan.config, plan.command))(*plan.words)
            code = 0
        except ChildFailedError as error:
            failures = read_failures(error, watch.ended_at)
            code = exit_code(failures[0])
            last_words = write_report(failures, output.tail(failures[0].rank))
        except SignalException as error:
            code = 128 + error.sigval
            last_words = f"rankstep: stopped by {error.sigval.name}"
        except Exception as error:
            raise LaunchError(
                f"the launcher could not start the ranks or lost hold of them: {type(error).__name__}: {error}. "
                "Next: run it again with LOGLEVEL=INFO to see each step of torch's elastic launcher."
            ) from error
        finally:
            left = watch.kill_ranks() if code else []
            output.close()
        if left:
            last_words = (
                f"rankstep: killed what the ranks had left running: {', '.join(left)}\n{last_words}"
            )
        if last_words:
            print(last_words, file=sys.stderr, flush=True)  # noqa: T201
    return code


def _hush_torch() -> None:
    """Keep the elastic launcher's running commentary off the screen, unless LOGLEVEL asks for it."""
    if "LOGLEVEL" in os.environ:
        return
    for name in ("torch.distributed.elastic", *logging.root.manager.loggerDict):
        if name.startswith(
            ("torch.distributed.elastic", "torch.distributed.run", "torch.distributed.launcher")
        ):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the ranks to inherit, and put back what was there."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
