"""A real vLLM: its states are those of transformers, one server generates and extracts, nothing is left behind."""

import subprocess
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch

from draftsmith.data.rows import Row
from draftsmith.data.target import ResolvedTarget
from draftsmith.hidden_states.parity import check_parity
from draftsmith.hidden_states.stream import HiddenStatesConfig, open_stream, spec_for
from draftsmith.hidden_states.transformers_source import TransformersSource
from draftsmith.hidden_states.vllm_server import Server, ServerConfig, launch, vllm_python
from draftsmith.hidden_states.vllm_source import VllmSource

LAYERS = (0, 2, 4)
SERVER = ServerConfig(max_model_len=256, max_num_batched_tokens=128, kv_cache_gib=1, skip_tokenizer=True)
CONFIG = HiddenStatesConfig(source="vllm", dtype="float32")


def _has_vllm() -> bool:
    try:
        vllm_python(SERVER)
    except ValueError:
        return False
    return True


pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not _has_vllm(), reason="no vLLM environment"),
]


@pytest.fixture(scope="module")
def target(make_target: Callable[..., ResolvedTarget]) -> ResolvedTarget:
    return make_target("llama", "float32")


@pytest.fixture(scope="module")
def server(target: ResolvedTarget, tmp_path_factory: pytest.TempPathFactory) -> Generator[Server, None, None]:
    folder = tmp_path_factory.mktemp("vllm")
    states = folder / "states"
    config = SERVER.model_copy(update={"states_folder": states})
    with launch(target, config, folder / "log", spec_for(CONFIG, target, LAYERS).layers) as server:
        group = _group(server.pid)
        assert len(group) >= 3, "the supervisor, the API server and the engine are one process group"
        yield server
    deadline = time.monotonic() + 10  # SIGKILL takes a moment in a process with gigabytes of memory
    while _group(server.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _group(server.pid) == []


def _group(pgid: int) -> list[int]:
    """The living processes of a group."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if _group_of(pid) == pgid]


def _group_of(pid: int) -> int:
    try:
        state, _, group = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[:3]
    except (FileNotFoundError, ProcessLookupError):
        return -1
    return -1 if state == "Z" else int(group)


def test_states_of_vllm_are_those_of_transformers(
    server: Server, target: ResolvedTarget, make_rows: Callable[..., list[Row]]
) -> None:
    rows = make_rows([17, 40, 9, 200, 1, 64, 150])  # 200 and 150 are prefilled in several chunks
    rows += [replace(rows[3], row_id="again"), replace(rows[3], row_id="half", input_ids=rows[3].input_ids[:140])]
    here = TransformersSource(target, LAYERS, "float32")
    there = VllmSource([server.url], spec_for(CONFIG, target, LAYERS))
    assert there.spec == here.spec
    errors = []
    for expected, found in zip(here.capture(rows), there.capture(rows), strict=True):
        difference = (found.states_TLH - expected.states_TLH).norm(dim=(0, 2)) / expected.states_TLH.norm(dim=(0, 2))
        errors.append(difference)
        assert found.row_id == expected.row_id
    assert torch.stack(errors).max() < 1e-4, errors
    report = check_parity(there, rows, target)
    print(report)
    assert report.top1_agreement == 1.0


def test_a_request_that_does_not_ask_for_states_is_plain_generation_and_writes_none(
    server: Server, make_rows: Callable[..., list[Row]]
) -> None:
    (row,) = make_rows([12])
    body = {
        "model": server.model,
        "prompt": list(row.input_ids),
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()
    assert len(answer["choices"][0]["token_ids"]) == 8 and not answer.get("kv_transfer_params")
    states = server.log.parent / "states"
    assert list(states.iterdir()) == []
    body["kv_transfer_params"] = {"include_output_tokens": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()
    path = Path(answer["kv_transfer_params"]["hidden_states_path"])
    assert path.parent == states and [file.name for file in states.glob("*.lock")] == [f"{path.name}.lock"]
    deadline = time.monotonic() + 30
    while not path.is_file() and time.monotonic() < deadline:
        time.sleep(0.05)
    for file in states.iterdir():
        file.unlink()


def test_sigterm_to_the_launcher_leaves_no_process_of_vllm(target: ResolvedTarget, tmp_path: Path) -> None:
    program = (
        "import pathlib, sys, time\n"
        "from draftsmith.data.target import ResolvedTarget\n"
        "from draftsmith.hidden_states.vllm_server import ServerConfig, launch\n"
        f"target = ResolvedTarget('tiny', pathlib.Path({str(target.path)!r}), 'w', 't', 'c', 'float32')\n"
        f"config = ServerConfig.model_validate_json({SERVER.model_dump_json()!r})\n"
        f"with launch(target, config, pathlib.Path({str(tmp_path / 'log')!r})) as server:\n"
        "    print(server.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    group = int(launcher.stdout.readline())
    assert len(_group(group)) >= 3
    launcher.terminate()
    launcher.wait(timeout=10)
    deadline = time.monotonic() + 30
    while _group(group) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _group(group) == []


def test_a_row_longer_than_the_server_allows_is_named(
    server: Server, target: ResolvedTarget, make_rows: Callable[..., list[Row]]
) -> None:
    source = VllmSource([server.url], spec_for(CONFIG, target, LAYERS))
    with pytest.raises(ValueError, match=r"row row0 \(300 tokens\): .* refused it: HTTP 400"):
        list(source.capture(make_rows([300])))


def test_a_stream_reads_from_a_server_that_the_caller_launched(
    server: Server, target: ResolvedTarget, make_rows: Callable[..., list[Row]], tmp_path: Path
) -> None:
    rows, folder = make_rows([17, 40, 9]), tmp_path / "hidden_states"
    config = CONFIG.model_copy(update={"mode": "hybrid"})
    row_ids = [row.row_id for row in rows]
    with open_stream(config, target, LAYERS, rows, folder, endpoints=[server.url]) as stream:
        first = list(stream.records(row_ids))
        second = list(stream.records(row_ids))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.states_TLH, other.states_TLH)
