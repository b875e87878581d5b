"""The documents hold what they promise: links lead somewhere, named things exist, scripts print what is shown.

A code block whose first line is ``# run: COMMAND`` is a whole script; what it prints stands in the ``text`` block after
it. A ``diff`` that is marked so holds two scripts, before and after, and both print that. Ranks are those of the pool,
which is quicker than to start new ones, and their lines are told apart as `rankstep run` does.

Where an output has changed for a good reason, ``UPDATE_DOCS=1 pytest tests/test_docs.py`` writes the new one into the page.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "changelog.d").glob("*.md")]
)
FOLDERS = (ROOT, ROOT / "src" / "rankstep", ROOT / "docs")

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FILE = re.compile(r"([\w.-]+/)+[\w.-]+\.(py|md|toml|jinja)(::\w+)?")
NAME = re.compile(r"rankstep(\.\w+)+")
MARK = re.compile(r"# run: (.+)")


@dataclass(frozen=True)
class Script:
    """A program shown on a page, how it is started, and what it prints."""

    page: Path
    place: str
    command: str
    program: str
    output: str


def prose(text):
    return FENCE.sub("", text)


def anchors(text):
    """Make the anchors that code hosts give to headings."""
    titles = (
        re.sub(r"[`*]|\]\(.*?\)|\[", "", title) for title in HEADING.findall(FENCE.sub("", text))
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page):
    broken = []
    for target in LINK.findall(INLINE.sub("", prose(page.read_text("utf-8")))):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in anchors(there.read_text("utf-8"))):
            broken.append(target)
    return broken


def missing_things(page):
    """List the files, tests and Python names of ours that a page names and that do not exist."""
    return [
        code
        for code in INLINE.findall(prose(page.read_text("utf-8")))
        if (FILE.fullmatch(code) and not file_exists(code))
        or (NAME.fullmatch(code.removesuffix("()")) and not name_exists(code.removesuffix("()")))
    ]


def file_exists(code):
    path, _, test = code.partition("::")
    files = [folder / path for folder in FOLDERS if (folder / path).is_file()]
    return any(not test or f"def {test}(" in file.read_text("utf-8") for file in files)


def name_exists(dotted):
    words = dotted.split(".")
    for length in range(len(words), 0, -1):
        try:
            thing = importlib.import_module(".".join(words[:length]))
        except ModuleNotFoundError:
            continue
        for word in words[length:]:
            # Fields of dataclasses have no value on the class.
            if word in getattr(thing, "__dataclass_fields__", ()):
                return True
            thing = getattr(thing, word, None)
        return thing is not None
    return False


def scripts(page):
    """Find the whole scripts of a page, and the output shown for each."""
    blocks = FENCE.findall(page.read_text("utf-8"))
    for number, (language, body) in enumerate(blocks):
        sides = {"python": ("",), "diff": ("-", "+")}.get(language, ())
        for side in sides:
            program = body if not side else one_side(body, side)
            command = MARK.match(program)
            if command:
                shown = blocks[number + 1] if number + 1 < len(blocks) else ("", "")
                output = shown[1] if shown[0] == "text" else None
                place = f"{page.relative_to(ROOT)}:{number}{side}"
                yield Script(page, place, command[1], program, output)


def one_side(diff, side):
    """Leave out the lines of the other side of a diff."""
    return "".join(
        line[2:] or "\n" for line in diff.splitlines(keepends=True) if line[0] in f" \n{side}"
    )


def run(program):
    """Run a script in this process and return what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(program, "script", "exec"), {"__name__": "__main__"})  # noqa: S102
    return printed.getvalue()


def run_on_rank(rank, program):
    """Do so on one rank of a pool."""
    lines = run(program).splitlines()
    return [line if rank.rank == 0 else f"[rank {rank.rank}] {line}" for line in lines]


SCRIPTS = [script for page in PAGES for script in scripts(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert not broken_links(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_things_exist(page):
    assert not missing_things(page)


def test_the_checkers_find_what_is_missing(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`\n[a](page.md#one-two) [b](#three) [c](gone.md) [d](https://example.org)\n"
        "`buckets/plan.py` `buckets/gone.py` `tests/test_docs.py::test_gone` `rankstep.world` "
        "`rankstep.buckets.StepFacts.unused` `rankstep.buckets.Gone`\n```\n[e](gone.md)\n```\n",
        encoding="utf-8",
    )
    assert broken_links(page) == ["#three", "gone.md"]
    assert missing_things(page) == [
        "buckets/gone.py",
        "tests/test_docs.py::test_gone",
        "rankstep.buckets.Gone",
    ]


def pages_linked(page):
    """Find the pages of ours that a page links to; a link to a folder stands for all in it."""
    for target in LINK.findall(prose(page.read_text("utf-8"))):
        there = (page.parent / target.partition("#")[0]).resolve()
        if "://" not in target:
            yield from there.glob("*.md") if there.is_dir() else [there]


def test_every_page_can_be_reached():
    """From the README, in one step or several."""
    reached, new = set(), {ROOT / "README.md"}
    while new:
        reached |= new
        linked = {there for page in new for there in pages_linked(page) if there.suffix == ".md"}
        new = linked - reached
    assert not set((ROOT / "docs").rglob("*.md")) - reached


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.place)
def test_scripts_print_what_is_shown(ranks, script):
    assert script.output is not None, "the block after the script is no text block"
    words = shlex.split(script.command)
    if words[0] == "python":
        lines = run(script.program).splitlines()
    else:
        world_size = int(words[words.index("--nproc-per-node") + 1])
        printed = ranks(world_size, backend=None).run(run_on_rank, script.program)
        lines = [line for of_rank in printed for line in of_rank]
    # Nobody fixes the order of two ranks' lines.
    same = sorted(lines) == sorted(script.output.splitlines())
    if not same and os.environ.get("UPDATE_DOCS"):
        before, after = f"```text\n{script.output}```", "\n".join(["```text", *lines, "```"])
        text = script.page.read_text("utf-8")
        script.page.write_text(text.replace(before, after, 1), encoding="utf-8")
        return
    assert same, "\n".join(lines)
