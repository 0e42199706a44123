"""VllmSource against a small HTTP server that answers and writes files as vLLM's extraction connector does."""

import fcntl
import json
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from draftsmith.data.rows import Row
from draftsmith.hidden_states.record import CaptureSpec, check_record
from draftsmith.hidden_states.vllm_source import VllmClientConfig, VllmSource

SPEC = CaptureSpec((1, 5), "bfloat16", 4, "weights", "tokenizer", "template", "float32")
CONFIG = VllmClientConfig(concurrency=3, timeout_s=10, retries=2, backoff_s=0.01)


@dataclass
class Script:
    """How the server misbehaves."""

    folder: Path
    url: str = ""
    failures: int = 0  # answers of 503 before the first good one
    refuse: bool = False  # answer 400
    no_states: bool = False
    change: Callable[[dict[str, Any]], dict[str, Any]] = lambda tensors: tensors
    write_delay_s: float = 0.0
    prompts: list[list[int]] = field(default_factory=list)


def states_of(ids: list[int]) -> torch.Tensor:
    """[T, 2, 4], different for every token and layer."""
    return torch.tensor(ids, dtype=torch.float32)[:, None, None] % 16 + torch.arange(8.0).view(1, 2, 4) / 8


@pytest.fixture
def script(tmp_path: Path) -> Generator[Script, None, None]:
    script = Script(tmp_path)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, {"data": [{"id": "tiny"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            script.prompts.append(body["prompt"])
            assert body["model"] == "tiny" and body["max_tokens"] == 1 and body["kv_transfer_params"]["capture"]
            if script.failures > 0:
                script.failures -= 1
                self._answer(503, {"error": "busy"})
            elif script.refuse:
                self._answer(400, {"error": "prompt is longer than max_model_len"})
            elif script.no_states:
                self._answer(200, {"choices": []})
            else:
                self._answer(200, {"kv_transfer_params": {"hidden_states_path": str(self._write(body["prompt"]))}})

        def _write(self, ids: list[int]) -> Path:
            path = script.folder / f"request-{threading.get_ident()}-{time.monotonic_ns()}.safetensors"
            lock = path.with_name(path.name + ".lock").open("w")
            fcntl.flock(lock, fcntl.LOCK_EX)
            tensors = script.change({"hidden_states": states_of(ids), "token_ids": torch.tensor(ids)})

            def finish() -> None:
                time.sleep(script.write_delay_s)
                save_file(tensors, path)
                lock.close()

            threading.Thread(target=finish).start()
            return path

        def _answer(self, status: int, content: dict[str, Any]) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    script.url = f"http://127.0.0.1:{server.server_port}"
    yield script
    server.shutdown()
    server.server_close()
    thread.join()


def test_records_come_in_order_from_several_endpoints_and_leave_no_file(
    script: Script, make_rows: Callable[..., list[Row]]
) -> None:
    rows = make_rows([5, 17, 1, 9, 3] * 6)
    script.write_delay_s = 0.01  # the answer comes before the file is there, as with vLLM
    source = VllmSource([script.url, script.url + "/"], SPEC, CONFIG)
    for row, record in zip(rows, source.capture(rows), strict=True):
        check_record(record, row, SPEC)
        assert torch.equal(record.states_TLH, states_of(list(row.input_ids)).bfloat16())
    assert list(script.folder.iterdir()) == []


def test_stopping_early_cancels_what_has_not_been_asked(script: Script, make_rows: Callable[..., list[Row]]) -> None:
    rows = make_rows([5] * 200)
    records = VllmSource([script.url], SPEC, CONFIG).capture(rows)
    next(records)
    records.close()
    assert len(script.prompts) < 50 and list(script.folder.iterdir()) == []


def test_an_overloaded_server_is_asked_again(script: Script, rows: list[Row]) -> None:
    script.failures = 2
    assert len(list(VllmSource([script.url], SPEC, CONFIG).capture(rows))) == len(rows)


def test_a_server_that_stays_down_is_an_error_that_names_the_row(script: Script, rows: list[Row]) -> None:
    script.failures = 1000
    with pytest.raises(RuntimeError, match=r"row row0: http.* failed 3 times; last: HTTP 503"):
        list(VllmSource([script.url], SPEC, CONFIG).capture(rows))


def test_a_refused_row_is_not_asked_again(script: Script, rows: list[Row]) -> None:
    script.refuse = True
    with pytest.raises(ValueError, match=r"row row0 \(17 tokens\): .* refused it: HTTP 400: .*max_model_len"):
        list(VllmSource([script.url], SPEC, CONFIG).capture(rows[:1]))
    assert len(script.prompts) == 1


def test_a_server_without_extraction_is_named(script: Script, rows: list[Row]) -> None:
    script.no_states = True
    with pytest.raises(RuntimeError, match=r"returned no hidden_states_path; it is no extraction server"):
        list(VllmSource([script.url], SPEC, CONFIG).capture(rows))
    with pytest.raises(RuntimeError, match=r"endpoint http://127\.0\.0\.1:9 does not answer"):
        VllmSource(["http://127.0.0.1:9"], SPEC, CONFIG)


def test_states_of_another_request_are_refused(script: Script, rows: list[Row]) -> None:
    script.change = lambda tensors: tensors | {"token_ids": tensors["token_ids"].flip(0)}
    with pytest.raises(ValueError, match=r"row row0: the states .* are of 17 other tokens"):
        list(VllmSource([script.url], SPEC, CONFIG).capture(rows))


def test_fewer_states_than_tokens_are_refused(script: Script, rows: list[Row]) -> None:
    script.change = lambda tensors: tensors | {"hidden_states": tensors["hidden_states"][4:].clone()}
    (record, *_) = VllmSource([script.url], SPEC, CONFIG).capture(rows)
    with pytest.raises(ValueError, match=r"record row0: states are torch.bfloat16 \(13, 2, 4\), expected"):
        check_record(record, rows[0], SPEC)


def test_other_layers_than_asked_for_are_refused(script: Script, rows: list[Row]) -> None:
    spec = replace(SPEC, layers=(1, 3, 5))
    with pytest.raises(ValueError, match=r"captures \(2, 4\) \(layers, width\); wanted are layers \(1, 3, 5\) of 4"):
        list(VllmSource([script.url], spec, CONFIG).capture(rows))
