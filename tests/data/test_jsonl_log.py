"""The append-only log loses nothing that was appended, and mends what a power cut tore."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.data.jsonl_log import JsonlLog, read_jsonl_log


def test_a_torn_last_line_is_ignored_by_readers_and_cut_off_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with JsonlLog(path) as log:
        log.append({"id": "a"})
        log.append({"id": "long", "ids": list(range(30_000))})
    whole = path.read_bytes()
    for torn in (len(whole) - 1, len(whole) - 100_000, 3):
        path.write_bytes(whole[:torn])
        kept = [line["id"] for line in read_jsonl_log(path)]
        with JsonlLog(path) as log:
            log.append({"id": "b"})
        assert [line["id"] for line in read_jsonl_log(path)] == [*kept, "b"]
        assert kept == (["a"] if torn > 3 else [])


def test_damage_before_the_end_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for damage in (b'{"id": \n', b"7\n", b"\xff\n"):
        path.write_bytes(b'{"id": "a"}\n' + damage + b'{"id": "b"}\n')
        with pytest.raises(ValueError, match=r"log\.jsonl:2 is damaged"):
            list(read_jsonl_log(path))


def test_no_file_has_no_lines(tmp_path: Path) -> None:
    assert list(read_jsonl_log(tmp_path / "none")) == []


def test_a_kill_takes_back_no_line_that_was_appended(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    script = (
        "import os, signal, sys; from pathlib import Path; from draftsmith.data.jsonl_log import JsonlLog\n"
        f"log = JsonlLog(Path({str(path)!r}))\n"
        "for i in range(5): log.append({'id': i})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script], env=dict(os.environ), timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [line["id"] for line in read_jsonl_log(path)] == [0, 1, 2, 3, 4]


def test_two_writers_of_one_file_are_refused(tmp_path: Path) -> None:
    with JsonlLog(tmp_path / "log.jsonl"), pytest.raises(ValueError, match="another process is writing"):
        JsonlLog(tmp_path / "log.jsonl")
