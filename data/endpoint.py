"""The client of OpenAI-compatible servers: token ids in, token ids out, over any number of endpoints.

Each request goes to the endpoint with the fewest requests in flight. A failed request is tried again after a growing,
jittered pause, preferably elsewhere; what fails for good is the caller's to count.
"""

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

_T = TypeVar("_T")

_CONNECT_TIMEOUT_S = 10.0
_HEALTH_INTERVAL_S = 0.5
_TRANSIENT = {408, 425, 429}  # and 5xx: overload, restart, proxy; any other status refuses the request itself


class EndpointError(RuntimeError):
    """A request failed for good: refused by the server, answered wrongly, or still failing after all retries."""


@dataclass(frozen=True)
class RetryPolicy:
    """How long one request may take and how it is tried again."""

    timeout_s: float = 600.0
    max_retries: int = 5
    first_pause_s: float = 0.5  # doubles with each retry; each pause is drawn between half and one and a half of it
    longest_pause_s: float = 30.0


@dataclass(frozen=True)
class Completion:
    """One answer: the ids that the server generated, and what else it said about the request."""

    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    kv_transfer_params: dict[str, Any] | None  # of an extraction server: where the hidden states lie


class _Choice(BaseModel):
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Answer(BaseModel):
    choices: list[_Choice]
    kv_transfer_params: dict[str, Any] | None = None


class AsyncEndpoints:
    """The servers of one run, with at most `concurrency` requests in flight over all. An async context manager."""

    def __init__(self, urls: Sequence[str], concurrency: int, policy: RetryPolicy | None = None) -> None:
        if not urls:
            raise ValueError(
                "responses.endpoints is empty and no server was launched; give the URL of a running server"
            )
        self.urls = [base_url(url) for url in urls]
        self.policy = policy or RetryPolicy()
        # trust_env off: a proxy from the environment must not see requests to a loopback server.
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(self.policy.timeout_s, connect=_CONNECT_TIMEOUT_S, pool=None),
            # Requests beyond the limit wait for a connection (pool=None: as long as it takes).
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
            trust_env=False,
        )
        self._in_flight: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def model_name(self) -> str:
        """The model that all endpoints serve. Raises ValueError when they serve different ones."""
        answers = await asyncio.gather(*(self._send("GET", "/v1/models", None, url) for url in self.urls))
        try:
            names = [str(answer["data"][0]["id"]) for answer in answers]
        except (KeyError, IndexError, TypeError) as error:
            raise EndpointError(f"{self.urls} do not list their model at /v1/models ({error!r})") from error
        if len(set(names)) > 1:
            served = ", ".join(f"{url}: {name}" for url, name in zip(self.urls, names, strict=True))
            raise ValueError(f"responses.endpoints serve different models ({served}); give servers of one target")
        return names[0]

    async def server_version(self) -> str:
        """The first server's own version, or 'unknown' (OpenAI's interface knows none; vLLM's does)."""
        try:
            return str((await self._send("GET", "/version", None, self.urls[0]))["version"])
        except (EndpointError, KeyError):
            return "unknown"

    async def complete(
        self,
        model: str,
        prompt_ids: Sequence[int],
        sampling: Mapping[str, Any],
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> Completion:
        """Generate from token ids. `sampling` holds fields of the request (max_tokens, temperature, ...).

        `kv_transfer_params` {"include_output_tokens": true} lets an extraction server keep the states of prompt and
        answer in the same request. Raises EndpointError.
        """
        body = {"model": model, "prompt": list(prompt_ids), "return_token_ids": True, **sampling}
        if kv_transfer_params is not None:
            body["kv_transfer_params"] = dict(kv_transfer_params)
        return _checked(await self._send("POST", "/v1/completions", body), prompt_ids)

    async def _send(self, verb: str, path: str, body: dict[str, Any] | None, only: str = "") -> dict[str, Any]:
        pause, problem, avoided = self.policy.first_pause_s, "", ""
        for attempt in range(self.policy.max_retries + 1):
            if attempt:
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
                pause = min(2 * pause, self.policy.longest_pause_s)
            url = only or self._freest(avoided)
            self._in_flight[url] += 1
            try:
                response = await self._client.request(verb, url + path, json=body)
                if response.status_code == 200:
                    answer = response.json()
                    if isinstance(answer, dict):
                        return answer
                problem = f"{url}: HTTP {response.status_code}: {response.text[:300]}"
                if response.status_code < 500 and response.status_code not in _TRANSIENT:
                    raise EndpointError(problem)
            except (httpx.TransportError, ValueError) as error:
                problem = f"{url}: {type(error).__name__}: {error}"
            finally:
                self._in_flight[url] -= 1
            avoided = url
        raise EndpointError(f"failed {self.policy.max_retries + 1} times, last: {problem}")

    def _freest(self, avoided: str) -> str:
        others = [url for url in self.urls if url != avoided] or self.urls
        random.shuffle(others)  # so that ties do not all go to the first
        return min(others, key=lambda url: self._in_flight[url])


class Endpoints:
    """The same for callers with threads: a context manager whose `complete` waits; share one among the threads."""

    def __init__(self, urls: Sequence[str], concurrency: int = 256, policy: RetryPolicy | None = None) -> None:
        self._servers = AsyncEndpoints(urls, concurrency, policy)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="endpoints", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._wait_for(self._servers.__aexit__())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def complete(self, model: str, prompt_ids: Sequence[int], **sampling: Any) -> Completion:
        """See AsyncEndpoints.complete; the fields of the request are given as keywords."""
        return self._wait_for(self._servers.complete(model, prompt_ids, sampling))

    def _wait_for(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


def base_url(url: str) -> str:
    """The server's root, whether or not /v1 was given with it."""
    return url.rstrip("/").removesuffix("/v1")


def wait_until_healthy(urls: Sequence[str], timeout_s: float) -> None:
    """Return once every server answers GET /health with 200. Raises EndpointError naming those that do not in time."""
    deadline = time.monotonic() + timeout_s
    missing = {base_url(url): "not asked" for url in urls}
    with httpx.Client(timeout=min(_CONNECT_TIMEOUT_S, max(timeout_s, 0.1)), trust_env=False) as client:
        while True:
            for url in list(missing):
                try:
                    status = client.get(f"{url}/health").status_code
                except httpx.TransportError as error:
                    missing[url] = f"{type(error).__name__}: {error}"
                    continue
                missing[url] = f"HTTP {status}"
                if status == 200:
                    del missing[url]
            if not missing:
                return
            if time.monotonic() > deadline:
                raise EndpointError(
                    f"not healthy after {timeout_s:.0f} s: " + ", ".join(f"{u} ({why})" for u, why in missing.items())
                )
            time.sleep(_HEALTH_INTERVAL_S)


def _checked(raw: dict[str, Any], prompt_ids: Sequence[int]) -> Completion:
    """The server's answer, if it is one that rows can be made of."""
    try:
        answer = _Answer.model_validate(raw)
        choice = answer.choices[0]
    except (ValidationError, IndexError) as error:
        raise EndpointError(f"the server's answer is no completion: {str(raw)[:300]}") from error
    if choice.token_ids is None:
        raise EndpointError(
            "the server returned no token_ids; it must support return_token_ids (vLLM does), because text that is "
            "tokenised again is not what the target generated"
        )
    if choice.prompt_token_ids is not None and choice.prompt_token_ids != list(prompt_ids):
        raise EndpointError("the server answered another prompt: its prompt_token_ids are not those that were sent")
    if choice.finish_reason not in ("stop", "length") or not choice.token_ids:
        raise EndpointError(f"no whole answer: finish_reason {choice.finish_reason!r}, {len(choice.token_ids)} tokens")
    reason: Literal["stop", "length"] = "stop" if choice.finish_reason == "stop" else "length"
    return Completion(choice.token_ids, reason, answer.kv_transfer_params)
