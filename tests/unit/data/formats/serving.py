"""A web server on loopback; the first part of a path selects how it misbehaves.

/plain/ is correct and supports ranges; /whole/ has no ranges; /chunked/ sends no length; /short/
breaks off halfway; /closing/ does so in a way that only the length reveals; /403/ and the like
answer with that status. The rest of the path is a file below a folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import SHUT_RDWR, socket
from threading import Thread
from typing import Any


class Server(ThreadingHTTPServer):
    """An HTTP server that records the method and path of each request in `asked`."""

    daemon_threads = False  # so that `server_close` waits for them

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.asked: list[tuple[str, str]] = []
        self._lines: list[socket] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def get_request(self) -> tuple[socket, Any]:
        line, address = super().get_request()
        self._lines.append(line)
        return line, address

    def server_close(self) -> None:
        """Close the connections of clients that keep them open, too."""
        for line in self._lines:
            with suppress(OSError):  # gone already
                line.shutdown(SHUT_RDWR)
        super().server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that close the connection early."""


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    with Server(folder) as server:
        thread = Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: tests check the requests themselves."""

    def _answer(self, *, body: bool) -> None:
        self.server.asked.append((self.command, self.path))
        way, _, name = self.path[1:].partition("/")
        place = self.server.folder / name
        if way.isdigit():
            self._head(int(way), 0)
        elif place.is_dir():
            links = "".join(f'<a href="{one.name}{"/" * one.is_dir()}">' for one in place.iterdir())
            self._send(links.encode(), body=body, kind="text/html")
        elif not place.is_file():
            self._head(404, 0)
        else:
            getattr(self, f"_{way}")(place.read_bytes(), body=body)

    def _plain(self, content: bytes, *, body: bool) -> None:
        wanted = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted is None:
            return self._send(content, body=body)
        start, end = int(wanted[1]), min(int(wanted[2]), len(content) - 1)
        part = content[start : end + 1]
        self._head(206, len(part), {"Content-Range": f"bytes {start}-{end}/{len(content)}"})
        self.wfile.write(part if body else b"")
        return None

    def _whole(self, content: bytes, *, body: bool) -> None:
        self._send(content, body=body)

    def _chunked(self, content: bytes, *, body: bool) -> None:
        self._head(200, None, {"Transfer-Encoding": "chunked"})
        for start in range(0, len(content) if body else 0, 5000):
            part = content[start : start + 5000]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
        self.wfile.write(b"0\r\n\r\n" if body else b"")

    def _short(self, content: bytes, *, body: bool) -> None:
        self._head(200, len(content))
        self.wfile.write(content[: len(content) // 2] if body else b"")
        self.close_connection = True

    def _closing(self, content: bytes, *, body: bool) -> None:
        self._head(200, None if body else len(content), {"Connection": "close"})
        self.wfile.write(content[: len(content) // 2] if body else b"")
        self.close_connection = True

    def _send(self, content: bytes, *, body: bool, kind: str | None = None) -> None:
        self._head(200, len(content), {"Content-Type": kind} if kind else {})
        self.wfile.write(content if body else b"")

    def _head(self, status: int, length: int | None, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (more or {}).items():
            self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()
