"""The command line: help with examples, quick, and no command that is not there."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rankstep._version import __version__
from rankstep.cli.main import main


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"rankstep {__version__}\n"


def test_help_lists_the_commands_with_an_example(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "\n  run  " in text
    assert "rankstep run --nproc-per-node 4 train.py" in text


@pytest.mark.parametrize("words", [[], ["launch"], ["--launch"]])
def test_a_wrong_command_shows_the_usage(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: rankstep COMMAND" in capsys.readouterr().err


def test_run_help_shows_an_example_before_torchruns_flags(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["run", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: rankstep run")
    assert 0 < text.index("rankstep run --nproc-per-node 4 train.py") < text.index("--rdzv-backend")


def test_help_does_not_load_torch():
    program = "import sys; from rankstep.cli.main import main\ntry: main(['--help'])\nfinally: print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("False\n")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["nowhere.py"], ["no script nowhere.py", "no rank was started"]),
        (["-m", "nowhere.at.all"], ["no module nowhere.at.all"]),
        (["--no-python", "nowhere"], ["no program nowhere", "PATH"]),
        (["--nproc-per-node", "0", __file__], ["--nproc-per-node 0", "at least one rank"]),
        (["--nproc-per-node", "many", __file__], ["many", "--help"]),
        (["--nnodes", "2:1", __file__], ["min_nodes", "--help"]),
        (["--signals-to-handle", "SIGNOT", __file__], ["no signal SIGNOT"]),
    ],
)
def test_run_says_what_is_wrong_before_it_starts_a_rank(words, parts, capsys):
    assert main(["run", *words]) == 2
    message = capsys.readouterr().err
    assert message.startswith("rankstep run: ")
    assert [part for part in parts if part not in message] == [], message
    assert "Traceback" not in message
