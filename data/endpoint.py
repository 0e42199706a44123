"""The client of OpenAI-compatible servers: token ids in, token ids out, over any number of endpoints.

Each request goes to the endpoint with the fewest requests in flight. A failed request is tried again after a growing,
jittered pause, preferably elsewhere; what fails for good is the caller's to count.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


class EndpointError(RuntimeError):
    """A request failed for good: refused by the server, or still failing after all retries."""


@dataclass(frozen=True)
class Completion:
    """One answer: the ids that the server generated, and what else it said about the request."""

    prompt_ids: list[int]
    token_ids: list[int]
    finish_reason: str
    kv_transfer_params: dict[str, Any] | None


class Endpoints:
    """Thread-safe; share one among worker threads. Close it, or use it as a context manager."""

    def __init__(self, urls: Sequence[str], timeout_s: float = 600.0, max_retries: int = 5) -> None:
        if not urls:
            raise ValueError("no endpoint was given; set responses.endpoints or let the run launch a server")
        self.urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self.max_retries = max_retries
        # trust_env off: a proxy from the environment must not see requests to a loopback server.
        self._client = httpx.Client(timeout=httpx.Timeout(timeout_s, connect=10.0), trust_env=False)
        self._in_flight: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __enter__(self) -> "Endpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def model_name(self) -> str:
        """The model that the first endpoint serves."""
        data = self._send("GET", "/v1/models", None)["data"]
        return str(data[0]["id"])

    def server_version(self) -> str:
        """The server's own version, or 'unknown'."""
        try:
            return str(self._send("GET", "/version", None)["version"])
        except (EndpointError, KeyError):
            return "unknown"

    def complete(self, model: str, prompt_ids: Sequence[int], **options: Any) -> Completion:
        """Generate from token ids. Raises EndpointError; also when the server does not return token ids."""
        body = {"model": model, "prompt": list(prompt_ids), "return_token_ids": True, **options}
        answer = self._send("POST", "/v1/completions", body)
        choice = answer["choices"][0]
        token_ids = choice.get("token_ids")
        if token_ids is None:
            raise EndpointError(
                "the server returned no token_ids; it must support return_token_ids (vLLM does), because text that is "
                "tokenised again is not what the target generated"
            )
        echoed = choice.get("prompt_token_ids")
        if echoed is not None and list(echoed) != list(prompt_ids):
            raise EndpointError("the server answered another prompt: its prompt_token_ids are not those that were sent")
        return Completion(
            list(prompt_ids), list(token_ids), str(choice["finish_reason"]), answer.get("kv_transfer_params")
        )

    def _send(self, verb: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        pause, reason, avoided = _FIRST_PAUSE_S, "", ""
        for attempt in range(self.max_retries + 1):
            if attempt:
                time.sleep(pause * random.uniform(0.5, 1.5))
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            url = self._take(avoided)
            try:
                response = self._client.request(verb, url + path, json=body)
                if response.status_code == 200:
                    answer: dict[str, Any] = response.json()
                    return answer
                reason = f"{url}: HTTP {response.status_code}: {response.text[:300]}"
                if response.status_code < 500 and response.status_code not in (408, 425, 429):
                    raise EndpointError(reason)  # the request itself is refused; asking again changes nothing
            except (httpx.TransportError, ValueError) as error:
                reason = f"{url}: {type(error).__name__}: {error}"
            finally:
                with self._lock:
                    self._in_flight[url] -= 1
            avoided = url
        raise EndpointError(f"failed {self.max_retries + 1} times, last: {reason}")

    def _take(self, avoided: str) -> str:
        with self._lock:
            others = [url for url in self.urls if url != avoided] or self.urls
            url = min(others, key=lambda candidate: self._in_flight[candidate])
            self._in_flight[url] += 1
            return url
