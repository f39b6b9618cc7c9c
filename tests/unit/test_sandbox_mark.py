"""What bubblewrap reports of a sandbox's first process is read whole or not at all."""

from __future__ import annotations

from pathlib import Path

from sandboxes.backends.host_processes import Mark
from sandboxes.backends.launch import read_mark
from sandboxes.backends.state import Place

LINE = '{ "child-pid": 4321, "mnt-namespace": 4026532750, "pid-namespace": 4026532753 }\n'


def test_every_part_of_a_report_reads_as_none(tmp_path: Path):
    for length in range(len(LINE)):
        (tmp_path / "bubblewrap.json").write_text(LINE[:length])
        assert read_mark(Place(tmp_path, "label")) == Mark("label", None, None)


def test_a_whole_report_is_read_whatever_follows(tmp_path: Path):
    for rest in ("", '{ "exit', '{ "exit-code": 0 }\n'):
        (tmp_path / "bubblewrap.json").write_text(LINE + rest)
        assert read_mark(Place(tmp_path, "label")) == Mark("label", 4321, 4026532753)


def test_a_missing_report_reads_as_none(tmp_path: Path):
    assert read_mark(Place(tmp_path, "label")) == Mark("label", None, None)
