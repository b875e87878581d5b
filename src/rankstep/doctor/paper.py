"""What the guard leaves: lines on the screen, and a file beside torch's error file for ``rankstep doctor DIR``."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankstep.doctor.report import Report
    from rankstep.doctor.verdict import Verdict

FILE = "guard.json"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def say(lines: Sequence[str]) -> None:
    """Print in one piece, so that ranks that share a screen do not mix their lines."""
    text = "".join(f"rankstep: {line}\n" for line in lines)
    # A closed screen must not end the guard.
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text)
        sys.stderr.flush()


def keep(verdict: Verdict, own: Report) -> None:
    """Write the verdict where the launcher keeps this rank's files; they live as long as its ``--log-dir``."""
    folder = _folder()
    if folder is None:
        return
    record = {"verdict": json.loads(verdict.as_json()), "report": json.loads(own.as_json())}
    with suppress(OSError):
        part = folder / f"{FILE}.part"
        part.write_text(json.dumps(record), "utf-8")
        part.replace(folder / FILE)


def _folder() -> Path | None:
    path = os.environ.get(_ERROR_FILE)
    folder = Path(path).parent if path else None
    return folder if folder is not None and folder.is_dir() else None
