"""The watchdog names the rank that the others wait for (fault 28)."""

import subprocess
import sys

from draftsmith.train.stall import EXIT_CODE, Watchdog


def test_the_report_names_the_rank_that_does_not_wait(tmp_path):
    with Watchdog(tmp_path, 0, 2, 1000) as first, Watchdog(tmp_path, 1, 2, 1000) as second:
        first.beat(7, "waiting for all ranks")
        second.beat(7, "reading rows")
        assert "stalled: rank 1." in first.report() and "rank 1 is at step 7, reading rows" in first.report()


def test_a_stalled_run_ends_by_itself(tmp_path):
    code = f"""
import time
from pathlib import Path
from draftsmith.train.stall import Watchdog
with Watchdog(Path({str(tmp_path)!r}), 0, 2, 0.3) as watchdog:
    watchdog.beat(3, "waiting for all ranks")
    time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == EXIT_CODE
    assert "stalled: rank 1" in done.stderr and "rank 1 is at step -1, not started" in done.stderr


def test_one_process_needs_no_watchdog(tmp_path):
    with Watchdog(tmp_path / "beats", 0, 1, 0.01) as watchdog:
        watchdog.beat(1, "reading rows")
    assert not (tmp_path / "beats").exists()
