"""Where each rank's streams go: torch's own settings first, what they leave to the screen through our pipes."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankstep.launch.output import Output
    from rankstep.launch.screen import Stream

_LAST_WORDS_S = 0.4
"""So long the ranks have, once one of them has ended without a word, to say so; then torch ends them."""


class _ErrorFiles(dict[int, str]):
    """Where ranks leave their exceptions, by local rank; the first look waits a moment.

    Note [Last words]
        torch looks here when it has seen that a rank has failed, right before it sends SIGTERM to all others. That may be
        a millisecond after a `kill -9`, and what the kernel tells the others' guards takes some more.
    """

    def __init__(self, paths: dict[int, str]) -> None:
        super().__init__(paths)
        self._looked = False

    def __getitem__(self, local_rank: int) -> str:
        if not self._looked:
            self._looked = True
            time.sleep(_LAST_WORDS_S)
        return super().__getitem__(local_rank)


class RankLogs(DefaultLogsSpecs):
    """torchrun's ``--log-dir``, ``--redirects``, ``--tee`` and ``--local-ranks-filter``, and pipes for the rest.

    Rank 0 has a terminal of its own, where this process has one, so that progress bars and colours work in it.

    Args:
        output: reads the pipes.
        settings: what torch has made of the flags.
        on_restart: called before the ranks start again, when those of the last attempt are gone.
        keep: whether all that the ranks write is kept in files too, beside torch's own in the run's folder.

    Source: https://docs.pytorch.org/docs/stable/elastic/multiprocessing.html#torch.distributed.elastic.multiprocessing.LogsSpecs
    """

    def __init__(
        self,
        output: Output,
        settings: DefaultLogsSpecs,
        on_restart: Callable[[], None],
        *,
        keep: bool,
    ) -> None:
        super().__init__(
            log_dir=settings._root_log_dir,
            redirects=settings._redirects,
            tee=settings._tee,
            local_ranks_filter=settings._local_ranks_filter,
        )
        self._output = output
        self._on_restart = on_restart
        self._keep = keep

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Choose the paths for one start of the ranks; torch calls it with their variables."""
        destination = super().reify(envs)
        streams: list[tuple[Stream, dict[int, str], bool]] = [
            ("stdout", destination.stdouts, sys.stdout.isatty()),
            ("stderr", destination.stderrs, sys.stderr.isatty()),
        ]
        for local_rank, env in envs.items():
            rank, attempt = int(env["RANK"]), int(env["TORCHELASTIC_RESTART_COUNT"])
            if attempt and local_rank == 0:
                self._on_restart()
                allowed = env["TORCHELASTIC_MAX_RESTARTS"]
                print(f"rankstep: restart {attempt} of {allowed}", file=sys.stderr, flush=True)  # noqa: T201
            for stream, paths, terminal in streams:
                path = paths[local_rank]
                # "" is the screen; a rank left out by the filter is sent to the null device, and heard all the same.
                if path and path != os.devnull:
                    continue
                folder = Path(destination.error_files[local_rank]).parent
                file = folder / f"{stream}.log" if self._keep else None
                own = terminal and rank == 0 and not path
                if own:
                    paths[local_rank] = self._output.terminal(rank, stream, attempt, file=file)
                # Where no other terminal can be had, rank 0 writes to this one, unless it is to be kept as well.
                if not own or (file is not None and not paths[local_rank]):
                    paths[local_rank] = self._output.pipe(
                        rank, stream, attempt, shown=not path, file=file
                    )
        # Last, since what is above looks there, too.
        return replace(destination, error_files=_ErrorFiles(destination.error_files))
