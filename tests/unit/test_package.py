"""The package's own namespace."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "first", ["", "import rankstep.world.agree", "from rankstep.world import agree"]
)
def test_world_is_the_function_whatever_was_imported_first(first):
    script = (
        f"{first}\nimport rankstep\nwith rankstep.world() as world:\n    print(world.world_size)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
