"""Ends all processes of a server: when told to, when the server itself ends, and when its launcher dies.

    python vllm_supervisor.py GRACE_S FOLDER COMMAND...

Run in a session of its own with a pipe as standard input that only the launcher holds open. The pipe closes when the
launcher wants an end, and also when the launcher is killed. (PR_SET_PDEATHSIG would do for one process, not for a
tree, and it fires when the launching *thread* ends.) FOLDER is deleted at the end. Standard library only.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time

_POLL_S = 0.1
# Between SIGTERM and SIGKILL for what is left of the group after the server itself has ended.
_STRAGGLER_S = 0.3


def main(grace_s: float, folder: str, command: list[str]) -> None:
    """Run the command until it ends or an end is asked for, then end the whole process group, this process included."""
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: ended.set())
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=_wait_for_launcher, args=(ended,), daemon=True).start()
    while server.poll() is None and not ended.wait(_POLL_S):
        pass
    if server.poll() is None:
        server.terminate()
        _wait_at_most(server, grace_s)
    os.killpg(0, signal.SIGTERM)  # our own handler ignores it
    time.sleep(_STRAGGLER_S)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _wait_for_launcher(ended: threading.Event) -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    ended.set()


def _wait_at_most(server: "subprocess.Popen[bytes]", grace_s: float) -> None:
    try:
        server.wait(timeout=grace_s)
    except subprocess.TimeoutExpired:
        print(f"the server did not end within {grace_s} s; killing it", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], sys.argv[3:])
