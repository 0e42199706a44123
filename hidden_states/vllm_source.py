"""Records from running vLLM servers: token ids out by HTTP, states back through a file that the server writes.

A server answers a one-token completion with the path of `<request>.safetensors` (`hidden_states` [T, L, H] in
ascending layer order, `token_ids` [T]); the file appears while its companion `.lock` is held. So server and client
share a disk. Both files are deleted as soon as they are read.
"""

import fcntl
import itertools
import time
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch
from pydantic import BaseModel, Field
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from draftsmith.data.rows import Row
from draftsmith.hidden_states.record import CaptureSpec, Record

# Statuses that another try can change: overload, restart, proxy.
_TRANSIENT = {408, 429, 500, 502, 503, 504}
# Requests in flight plus finished ones that wait for their turn, per request in flight: bounds memory.
_AHEAD = 4


class VllmClientConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """How the extraction servers are asked."""

    concurrency: int = Field(default=8, ge=1, description="requests in flight, over all endpoints")
    timeout_s: float = Field(default=600.0, gt=0, description="for one request and for its file to be written")
    retries: int = Field(default=4, ge=0, description="further tries after a connection error or an overloaded server")
    backoff_s: float = Field(default=0.5, ge=0, description="pause before the first retry; doubles with each")


class VllmSource:
    """Captures rows with extraction servers. Fulfils `record.Source`."""

    def __init__(self, urls: Sequence[str], spec: CaptureSpec, config: VllmClientConfig | None = None) -> None:
        if not urls:
            raise ValueError("hidden_states.endpoints is empty; give the URL of an extraction server")
        self.spec = spec
        self._config = config or VllmClientConfig()
        self._urls = [url.rstrip("/") for url in urls]
        self._client = httpx.Client(timeout=self._config.timeout_s, trust_env=False)
        self._models = [self._ask_model(url) for url in self._urls]

    def capture(self, rows: Iterable[Row]) -> Generator[Record, None, None]:
        """Records in the order of `rows`, `concurrency` requests at a time, spread over the endpoints in turn."""
        turns = itertools.cycle(range(len(self._urls)))
        waiting: deque[Future[Record]] = deque()
        pool = ThreadPoolExecutor(self._config.concurrency, thread_name_prefix="hidden-states-vllm")
        try:
            for row in rows:
                waiting.append(pool.submit(self._capture_row, row, next(turns)))
                if len(waiting) >= self._config.concurrency * _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _capture_row(self, row: Row, endpoint: int) -> Record:
        answer = self._post(row, endpoint)
        path = (answer.get("kv_transfer_params") or {}).get("hidden_states_path")
        if path is None:
            raise RuntimeError(
                f"row {row.row_id}: {self._urls[endpoint]} returned no hidden_states_path; it is no extraction server. "
                "Launch it with the extract_hidden_states method, as `draftsmith` does, or leave endpoints empty."
            )
        states_TLH, token_ids_T = self._read(Path(path), row)
        if token_ids_T.tolist() != list(row.input_ids):
            raise ValueError(
                f"row {row.row_id}: the states in {path} are of {len(token_ids_T)} other tokens "
                f"(the row has {len(row.input_ids)}); the server mixed up requests"
            )
        if states_TLH.shape[1:] != (len(self.spec.layers), self.spec.hidden_size):
            raise ValueError(
                f"row {row.row_id}: {self._urls[endpoint]} captures {tuple(states_TLH.shape[1:])} (layers, width); "
                f"wanted are layers {self.spec.layers} of {self.spec.hidden_size}. Launch the server with these layers."
            )
        return Record(row.row_id, token_ids_T, states_TLH.to(getattr(torch, self.spec.dtype)))

    def _post(self, row: Row, endpoint: int) -> dict[str, Any]:
        # `capture` is read by our connector, which writes nothing for other requests; the stock one ignores it.
        body = {
            "model": self._models[endpoint],
            "prompt": list(row.input_ids),
            "max_tokens": 1,
            "temperature": 0,
            "return_token_ids": True,
            "kv_transfer_params": {"capture": True},
        }
        url = f"{self._urls[endpoint]}/v1/completions"
        for attempt in itertools.count():
            try:
                response = self._client.post(url, json=body)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if response.status_code == 200:
                    answer: dict[str, Any] = response.json()
                    return answer
                problem = f"HTTP {response.status_code}: {response.text[:500]}"
                if response.status_code not in _TRANSIENT:
                    raise ValueError(f"row {row.row_id} ({len(row.input_ids)} tokens): {url} refused it: {problem}")
            if attempt >= self._config.retries:
                raise RuntimeError(f"row {row.row_id}: {url} failed {attempt + 1} times; last: {problem}")
            time.sleep(self._config.backoff_s * 2**attempt)
        raise AssertionError("unreachable")

    def _read(self, path: Path, row: Row) -> tuple[Tensor, Tensor]:
        """Wait until the server has written the file, read it into memory and delete it."""
        lock = path.with_name(path.name + ".lock")
        try:
            _wait_for_writer(lock, self._config.timeout_s)
            tensors = load(path.read_bytes())
            return tensors["hidden_states"], tensors["token_ids"].to(torch.int64)
        except (OSError, SafetensorError, KeyError) as error:
            raise RuntimeError(
                f"row {row.row_id}: the states file {path} cannot be read ({error!r}). The server must run on this "
                "machine, or share this path; its log says more."
            ) from error
        finally:
            path.unlink(missing_ok=True)
            lock.unlink(missing_ok=True)

    def _ask_model(self, url: str) -> str:
        try:
            response = self._client.get(f"{url}/v1/models")
            response.raise_for_status()
            return str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
            raise RuntimeError(f"endpoint {url} does not answer as an OpenAI-compatible server ({error!r})") from error


def _wait_for_writer(lock: Path, timeout_s: float) -> None:
    """Return when the server has released the lock that it took before it answered."""
    deadline = time.monotonic() + timeout_s
    with lock.open() as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{lock} was still held after {timeout_s:.0f} s") from None
                time.sleep(0.002)
