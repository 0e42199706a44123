"""A small real completion server on the loopback, as a stand-in for vLLM's HTTP interface."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[[dict[str, Any], int], tuple[int, dict[str, Any]]]


def answer(body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """What vLLM says: it continues a prompt with its last token plus one, plus two, and a stop token."""
    last = body["prompt"][-1]
    choice = {"token_ids": [last + 1, last + 2, 2], "prompt_token_ids": body["prompt"], "finish_reason": "stop"}
    return {"choices": [choice | changes]}


@contextmanager
def server(reply: Reply, model: str = "tiny") -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server on a free port; yields its URL and the bodies that it was sent."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            known = {"/health": {}, "/version": {"version": "9.9"}, "/v1/models": {"data": [{"id": model}]}}
            self.say(200 if self.path in known else 404, known.get(self.path, {}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append(body)
            status, content = reply(body, len(bodies))
            if status == 0:  # hang up without a word
                self.close_connection = True
                return
            self.say(status, content)

        def say(self, status: int, content: Any) -> None:
            payload = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *args: Any) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{http.server_address[1]}", bodies
        finally:
            http.shutdown()
