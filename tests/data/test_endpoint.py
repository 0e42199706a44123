"""The client against a small real server on the loopback: retries, spreading, and answers that it must refuse."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from completion_server import Reply, answer, server

from draftsmith.data.endpoint import Completion, EndpointError, Endpoints, RetryPolicy, wait_until_healthy

FAST = RetryPolicy(timeout_s=5.0, max_retries=3, first_pause_s=0.01, longest_pause_s=0.02)


def complete(
    urls: Sequence[str], prompts: Sequence[list[int]], concurrency: int = 8, policy: RetryPolicy = FAST, **options: Any
) -> list[Completion]:
    async def run() -> list[Completion]:
        async with Endpoints(urls, concurrency, policy) as servers:
            asked = (servers.complete("tiny", prompt, {"max_tokens": 5}, **options) for prompt in prompts)
            return await asyncio.gather(*asked)

    return asyncio.run(run())


def test_token_ids_go_out_and_come_back_with_the_stop_token() -> None:
    with server(lambda body, _: (200, answer(body))) as (url, bodies):
        (found,) = complete([f"{url}/v1/"], [[5, 6]])
    assert found == Completion([7, 8, 2], "stop", None)
    assert bodies == [{"model": "tiny", "prompt": [5, 6], "return_token_ids": True, "max_tokens": 5}]


def test_kv_transfer_params_pass_in_both_directions() -> None:
    given = {"include_output_tokens": True}
    with server(lambda body, _: (200, answer(body) | {"kv_transfer_params": {"hidden_states_path": "/x"}})) as (url, b):
        (found,) = complete([url], [[5]], kv_transfer_params=given)
    assert b[0]["kv_transfer_params"] == given
    assert found.kv_transfer_params == {"hidden_states_path": "/x"}


@pytest.mark.parametrize("first", [500, 503, 429, 0])
def test_an_overloaded_or_broken_server_is_asked_again(first: int) -> None:
    with server(lambda body, count: (first, {}) if count <= 2 else (200, answer(body))) as (url, bodies):
        assert complete([url], [[5]])[0].token_ids == [6, 7, 2]
    assert len(bodies) == 3


def test_a_retry_goes_elsewhere() -> None:
    with server(lambda body, _: (503, {})) as (broken, _), server(lambda body, _: (200, answer(body))) as (sound, _b):
        assert len(complete([broken, sound], [[i] for i in range(20)])) == 20


def test_a_server_that_stays_broken_is_an_error_with_its_last_words() -> None:
    with (
        server(lambda body, _: (503, {"error": "no memory"})) as (url, bodies),
        pytest.raises(EndpointError, match=r"failed 4 times.*503.*no memory"),
    ):
        complete([url], [[5]])
    assert len(bodies) == 4


def test_a_refused_request_is_not_repeated() -> None:
    with (
        server(lambda body, _: (400, {"error": "too long"})) as (url, bodies),
        pytest.raises(EndpointError, match=r"HTTP 400.*too long"),
    ):
        complete([url], [[5]])
    assert len(bodies) == 1


def test_a_request_that_takes_too_long_is_given_up() -> None:
    def slow(body: dict[str, Any], count: int) -> tuple[int, dict[str, Any]]:
        time.sleep(0.5 if count == 1 else 0)
        return 200, answer(body)

    with server(slow) as (url, bodies):
        policy = RetryPolicy(timeout_s=0.2, max_retries=2, first_pause_s=0.01)
        assert complete([url], [[5]], policy=policy)[0].token_ids == [6, 7, 2]
    assert len(bodies) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": None}, "return_token_ids"),
        ({"prompt_token_ids": [1, 5]}, "another prompt"),
        ({"finish_reason": "abort"}, "abort"),
        ({"token_ids": []}, "0 tokens"),
        ({"token_ids": "text"}, "no completion"),
    ],
)
def test_an_answer_that_no_row_can_be_made_of_is_refused(changes: dict[str, Any], message: str) -> None:
    with (
        server(lambda body, _: (200, answer(body, **changes))) as (url, _),
        pytest.raises(EndpointError, match=message),
    ):
        complete([url], [[5]])


def test_requests_spread_over_all_endpoints_within_the_concurrency() -> None:
    lock, now, most, served = threading.Lock(), Counter[str](), Counter[str](), Counter[str]()

    def counting(name: str) -> Reply:
        def reply(body: dict[str, Any], _: int) -> tuple[int, dict[str, Any]]:
            with lock:
                now["all"] += 1
                served[name] += 1
                most["all"] = max(most["all"], now["all"])
            time.sleep(0.02)
            with lock:
                now["all"] -= 1
            return 200, answer(body)

        return reply

    with server(counting("a")) as (first, _), server(counting("b")) as (second, _b):
        complete([first, second], [[i] for i in range(40)], concurrency=6)
    assert 2 <= most["all"] <= 6
    assert min(served["a"], served["b"]) >= 10


def test_endpoints_name_their_model_and_version_and_must_agree() -> None:
    async def ask(*urls: str) -> tuple[str, str]:
        async with Endpoints(urls, 2, FAST) as servers:
            return await servers.model_name(), await servers.server_version()

    never: Reply = lambda body, _: (500, {})  # noqa: E731
    with server(never) as (one, _), server(never, model="other") as (two, _b):
        assert asyncio.run(ask(one)) == ("tiny", "9.9")
        with pytest.raises(ValueError, match=r"different models.*tiny.*other"):
            asyncio.run(ask(one, two))


def test_health_is_awaited_and_a_missing_server_is_named() -> None:
    with server(lambda body, _: (500, {})) as (url, _):
        wait_until_healthy([url, f"{url}/v1"], timeout_s=5)
    with pytest.raises(EndpointError, match=rf"not healthy.*{url}"):
        wait_until_healthy([url], timeout_s=0)


def test_no_endpoint_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(ValueError, match=r"responses\.endpoints"):
        Endpoints([], 1)


def test_a_proxy_of_the_environment_sees_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with server(lambda body, _: (200, answer(body))) as (url, _):
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
        assert complete([url], [[5]])[0].finish_reason == "stop"
