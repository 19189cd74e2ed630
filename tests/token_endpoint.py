"""A real token endpoint on this machine, for tests."""

from __future__ import annotations

import base64
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

CLIENT_SECRET = "gehe/im %&+="


@dataclass
class TokenEndpoint:
    """Answers as ``answer`` says, a status and a body; else with a token of ``life_s`` to whoever knows the secret.

    ``hold``: nothing is answered before it is set.
    """

    issue: Callable[[int], str]
    life_s: int = 600
    answer: tuple[int, Any] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    hold: threading.Event | None = None
    asked: list[dict[str, str]] = field(default_factory=list)
    given: list[str] = field(default_factory=list)
    url: str = ""

    def respond(self, authorization: str, form: str) -> tuple[int, Any]:
        self.asked.append({name: values[0] for name, values in parse_qs(form).items()})
        if self.hold is not None:
            self.hold.wait()
        if self.answer is not None:
            return self.answer
        expected = base64.b64encode(b"worker+1:gehe%2Fim+%25%26%2B%3D").decode()
        if authorization != f"Basic {expected}":
            return 401, {"error": "invalid_client", "error_description": f"not {authorization}"}
        self.given.append(self.issue(self.life_s))
        return 200, {"access_token": self.given[-1], "token_type": "Bearer", "expires_in": self.life_s}


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """A client that does not like our certificate, or has gone, is no news."""


@contextmanager
def served(issue: Callable[[int], str], *, port: int = 0, tls: Path | None = None) -> Iterator[TokenEndpoint]:
    """``tls``: a folder with ``cert.pem`` and ``key.pem``."""
    endpoint = TokenEndpoint(issue)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            form = self.rfile.read(int(self.headers["Content-Length"])).decode()
            status, body = endpoint.respond(self.headers.get("Authorization", ""), form)
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in endpoint.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = _Server(("127.0.0.1", port), Handler)
    if tls is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(tls / "cert.pem", tls / "key.pem")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    endpoint.url = f"http{'s' if tls else ''}://127.0.0.1:{server.server_address[1]}/token"
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
