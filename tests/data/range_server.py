"""A server of files that answers requests for ranges, as object stores do."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class RangeServer(ThreadingHTTPServer):
    """Waits some seconds before it answers a request for a range, if it answers such requests."""

    daemon_threads = True
    seconds = 0.0
    has_ranges = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(SimpleHTTPRequestHandler):
    server: RangeServer

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, *, has_body: bool) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        content = path.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        status = HTTPStatus.OK
        if wanted and self.server.has_ranges:
            status = HTTPStatus.PARTIAL_CONTENT
            content = content[int(wanted[1]) : int(wanted[2] or len(content)) + 1]
            time.sleep(self.server.seconds)
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Accept-Ranges", "bytes" if self.server.has_ranges else "none")
        self.end_headers()
        if has_body:
            self.wfile.write(content)


@contextmanager
def serving(folder: Path) -> Iterator[RangeServer]:
    """Serves the files of a folder while the block runs."""
    with RangeServer(("127.0.0.1", 0), partial(_Handler, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
