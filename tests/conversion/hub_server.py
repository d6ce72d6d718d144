"""The part of the Hugging Face Hub that uploading a folder talks to, on this machine."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hub:
    """What it was sent: repositories as they were asked for, and files. `refusal`: the status of every answer."""

    address: str = ""
    repositories: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)
    refusal: int | None = None


@contextmanager
def hub() -> Iterator[Hub]:
    """A hub that takes every file whole, in the commit itself."""
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            state.tokens.add(self.headers.get("Authorization", ""))
            if state.refusal is not None:
                self._answer({"error": "You do not have\nthe rights"}, state.refusal)
            elif self.path == "/api/repos/create":
                values = json.loads(body)
                name = f"{values['organization']}/{values['name']}"
                state.repositories[name] = values
                self._answer({"url": f"{state.address}/{name}"})
            elif self.path == "/api/validate-yaml":
                self._answer({"errors": [], "warnings": []})
            elif self.path.endswith("/preupload/main"):
                how = {"uploadMode": "regular", "shouldIgnore": False}
                files = [{"path": file["path"], **how} for file in json.loads(body)["files"]]
                self._answer({"files": files})
            elif self.path.endswith("/commit/main"):
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        state.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                self._answer({"commitUrl": f"{state.address}/{self.path.split('/', 3)[3]}", "commitOid": "1"})
            else:
                self._answer({"error": self.path}, 404)

        def _answer(self, value: object, status: int = 200) -> None:
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
