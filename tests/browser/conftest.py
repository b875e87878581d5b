"""One browser for all tests of pages."""

from __future__ import annotations

import shutil
import tempfile

import pytest
from chromium import NAMES, Browser, executable

from rankstep.trace.page import render


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


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    """Give ``pages(trace)``, the file of its page."""
    folder = tmp_path_factory.mktemp("pages")

    def write(trace, **options):
        path = folder / f"{len(list(folder.iterdir()))}.html"
        path.write_text(render(trace, **options), encoding="utf-8")
        return path

    return write


@pytest.fixture
def quiet(browser):
    """Fail a test whose page has complained, asked for something, or opened a dialog."""
    yield
    assert browser.console == []
    assert browser.run("document.body.dataset.errors") == "0"
