"""``rankstep trace``: what a recorded run did, in a paragraph, tables and a timeline, or as a file for a viewer."""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rankstep.trace import timeline
from rankstep.trace.files import READ_BYTES, TraceError, is_long, load
from rankstep.trace.steps import read_steps
from rankstep.trace.summary import paragraph, summarize
from rankstep.trace.words import size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rankstep.trace.model import Trace
    from rankstep.trace.summary import Summary

_EXAMPLE = """\
example: record steps 10 to 19, read them, and make a page of them
  rankstep run --nproc-per-node 4 --trace traces --trace-steps 10:20 train.py
  rankstep trace traces
  rankstep trace traces --html traces.html
"""
_PLAIN_WIDTH = 120
TOLD_BYTES = 20_000_000
"""What is longer takes more than a second to read."""


def main(words: list[str]) -> int:
    """Tell about a trace and return the exit code.

    Args:
        words: the command line after ``trace``.

    Raises:
        TraceError: there is no trace that can be told about.
    """
    args = _parser().parse_args(words)
    steps = None if args.steps is None else read_steps(args.steps)
    if args.step is not None and is_long(args.directory):
        # With the step before it: since its waits the ranks are compared.
        steps = range(max(0, args.step - 1), args.step + 1)
    with _telling(sys.stderr) as tell:
        trace = load(args.directory, steps, tell)
    if args.chrome is not None:
        from rankstep.trace import chrome

        if Path(args.chrome).is_dir():
            for name, text in chrome.export_ranks(trace, args.step).items():
                _write(str(Path(args.chrome) / name), text)
        else:
            _write(args.chrome, chrome.export(trace, args.step, [*map(Path, args.kineto)]))
    if args.html is not None:
        page = importlib.import_module("rankstep.trace.page")
        _write(args.html, page.render(page.fitted(trace)))
    written = args.chrome is not None or args.html is not None
    if args.json:
        json.dump(summarize(trace, args.step).as_dict(), sys.stdout, indent=2)
        sys.stdout.write("\n")
    elif not written:
        show(trace, summarize(trace, args.step), sys.stdout, brief=False)
    for notice in trace.notices if written else ():
        print(f"rankstep trace: {notice}", file=sys.stderr)  # noqa: T201
    return 0


@contextmanager
def _telling(screen: TextIO) -> Iterator[Callable[[int, int], None]]:
    """Show how much of a trace has been read, if that takes long: a bar on a terminal, a line elsewhere."""
    if not screen.isatty():
        told: list[int] = []

        def tell(_: int, total: int) -> None:
            if total > TOLD_BYTES and not told:
                told.append(total)
                print(f"reading {size(total)} ...", file=screen, flush=True)

        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=screen), transient=True) as bar:
        task = bar.add_task("", total=None, visible=False)
        yield lambda done, total: bar.update(
            task, completed=done, total=total, visible=total > TOLD_BYTES
        )


def show(trace: Trace, summary: Summary, screen: TextIO, *, brief: bool) -> None:
    """Print the paragraph and, unless brief, tables and one step's timeline.

    Args:
        trace: As it was read.
        summary: The same in figures.
        screen: Where to print; without colours if it is no terminal.
        brief: Only the paragraph.
    """
    from rich.console import Console

    from rankstep.trace.screen import tables

    terminal = screen.isatty()
    width = shutil.get_terminal_size().columns if terminal else _PLAIN_WIDTH
    console = Console(file=screen, width=width, highlight=False)
    console.print(paragraph(summary), markup=False)
    if brief:
        return
    for table in tables(summary):
        console.print()
        console.print(table)
    number = typical(summary)
    console.print(f"\n{timeline.heading(trace, number)}", style="bold", markup=False)
    for line in timeline.draw(trace, number, width):
        console.print(line, soft_wrap=True)


def typical(summary: Summary) -> int:
    """The step that took the median time of those that count.

    Args:
        summary: It has one step at least.
    """
    counted = [step for step in summary.steps if step.number in summary.counted]
    return sorted(counted, key=lambda step: step.parts.step_ns)[len(counted) // 2].number


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise TraceError(
            f"{path} cannot be written: {error.strerror}. Next: name another file."
        ) from error
    print(f"wrote {path}", file=sys.stderr)  # noqa: T201


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rankstep trace",
        description="Tells what a recorded run spent its steps on, how much communication was hidden, and who was late. "
        "docs/tracing.md defines every word.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "directory", help="what was given to `rankstep run --trace` or RANKSTEP_TRACE"
    )
    parser.add_argument("--step", type=int, metavar="N", help="tell about this step alone")
    parser.add_argument(
        "--steps",
        metavar="FIRST:LAST",
        help="read these steps only, counted from 0, without LAST; a long trace is else read from its begin as far as "
        f"{size(READ_BYTES)} go",
    )
    parser.add_argument(
        "--json", action="store_true", help="print all figures as JSON, times in ns"
    )
    parser.add_argument("--html", metavar="FILE", help="write a page that any browser opens")
    parser.add_argument(
        "--chrome",
        metavar="FILE",
        help="write a trace for ui.perfetto.dev or chrome://tracing; a directory gets one file per rank, for HTA",
    )
    parser.add_argument(
        "--kineto",
        metavar="FILE",
        action="append",
        default=[],
        help="with --chrome: merge this torch.profiler trace of a rank of the same run; may be repeated",
    )
    return parser
