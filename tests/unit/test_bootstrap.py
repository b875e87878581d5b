"""What a rank prepares before the user's script runs."""

from __future__ import annotations

from multiprocessing import process
from pathlib import Path

import pytest

from rankstep.launch import bootstrap


@pytest.fixture
def config(monkeypatch):
    kept = dict(process.current_process()._config)
    monkeypatch.setattr(process.current_process(), "_config", kept)
    kept.pop("tempdir", None)
    return kept


def test_sockets_of_workers_lie_in_the_launchers_folder(config, monkeypatch, tmp_path):
    monkeypatch.setenv(bootstrap.CONTROL_PIPE, str(tmp_path / "control"))
    monkeypatch.setattr(bootstrap, "_LONGEST_FOLDER", len(str(tmp_path / "workers")))
    bootstrap._keep_files_of_workers()
    assert config["tempdir"] == str(tmp_path / "workers")
    assert Path(config["tempdir"]).stat().st_mode & 0o777 == 0o700


def test_a_path_that_is_too_long_for_a_socket_is_left_to_multiprocessing(
    config, monkeypatch, tmp_path
):
    monkeypatch.setenv(bootstrap.CONTROL_PIPE, str(tmp_path / "control"))
    monkeypatch.setattr(bootstrap, "_LONGEST_FOLDER", len(str(tmp_path / "workers")) - 1)
    bootstrap._keep_files_of_workers()
    assert "tempdir" not in config
    assert list(tmp_path.iterdir()) == []
