"""One browser for all tests of pages."""

from __future__ import annotations

import shutil
import tempfile

import pytest
from chromium import NAMES, Browser, executable


@pytest.fixture(scope="session")
def browser():
    """Give a browser, or skip."""
    program = executable()
    if program is None:
        pytest.skip(f"needs a browser, one of: {', '.join(NAMES)}")
    profile = tempfile.mkdtemp(prefix="page-browser-")
    one = Browser(program, profile)
    yield one
    one.close()
    shutil.rmtree(profile, ignore_errors=True)
