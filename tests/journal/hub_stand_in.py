"""A hub in miniature: the requests that huggingface_hub's client makes to create, fill and read a repository.

Files travel as they do for small ones on the real hub: within the commit, in base64.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

TOKEN = "hf_stand_in"
SHA = "0123456789abcdef0123456789abcdef01234567"


class Repo:
    """A repository: its files, and whether it is private."""

    def __init__(self, visibility: str) -> None:
        self.visibility = visibility
        self.files: dict[str, bytes] = {}
        self.messages: list[str] = []


class Hub:
    """The repositories, and the requests as ``METHOD path``."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[str] = []
        self.url = ""


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: Any) -> None:
        pass

    def _answer(self, status: int, body: Any = None, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _missing(self, code: str) -> None:
        self._answer(404, {"error": code}, {"X-Error-Code": code})

    @property
    def _path(self) -> list[str]:
        return [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]

    def _authorized(self) -> bool:
        self.hub.requests.append(f"{self.command} {urlsplit(self.path).path}")
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self._answer(401, {"error": "Invalid username or password."})
        return False

    def do_POST(self) -> None:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not self._authorized():
            return
        match self._path:
            case ["api", "repos", "create"]:
                asked = json.loads(body)
                name = f"{asked['organization']}/{asked['name']}"
                if asked["organization"] != "ann":
                    self._answer(403, {"error": f"You don't have the rights to create a model under {name}"})
                elif name in self.hub.repos:
                    self._answer(409, {"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"})
                else:
                    self.hub.repos[name] = Repo(asked.get("visibility", "public"))
                    self._answer(200, {"url": f"{self.hub.url}/{name}", "name": name})
            case ["api", "validate-yaml"]:
                found = yaml.safe_load(json.loads(body)["content"].split("---")[1])
                errors = [] if isinstance(found, dict) else [{"message": "no front matter"}]
                self._answer(400 if errors else 200, {"errors": errors, "warnings": []})
            case ["api", "models", user, name, "preupload", "main"]:
                names = [file["path"] for file in json.loads(body)["files"]]
                modes = {"uploadMode": "regular", "shouldIgnore": False}
                self._answer(200, {"files": [{"path": name, **modes} for name in names]})
            case ["api", "models", user, name, "commit", "main"]:
                repo = self.hub.repos[f"{user}/{name}"]
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "header":
                        repo.messages.append(line["value"]["summary"])
                    elif line["key"] == "file":
                        repo.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                url = f"{self.hub.url}/{user}/{name}/commit/{SHA}"
                self._answer(200, {"success": True, "commitOid": SHA, "commitUrl": url})
            case _:
                self._missing("RepoNotFound")

    def do_GET(self) -> None:
        if not self._authorized():
            return
        match self._path:
            case ["api", "whoami-v2"]:
                self._answer(200, {"type": "user", "name": "ann", "auth": {}})
            case ["api", "models", user, name, *rest] if f"{user}/{name}" in self.hub.repos:
                files = self.hub.repos[f"{user}/{name}"].files
                if rest[:1] == ["tree"]:
                    entries = [{"type": "file", "path": p, "size": len(d), "oid": SHA} for p, d in files.items()]
                    self._answer(200, entries)
                else:
                    siblings = [{"rfilename": path} for path in files]
                    self._answer(200, {"id": f"{user}/{name}", "sha": SHA, "siblings": siblings})
            case [user, name, "resolve", _, *path] if f"{user}/{name}" in self.hub.repos:
                data = self.hub.repos[f"{user}/{name}"].files.get("/".join(path))
                if data is None:
                    self._missing("EntryNotFound")
                else:
                    etag = hashlib.sha1(data).hexdigest()
                    self._answer(200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": SHA})
            case _:
                self._missing("RepoNotFound")

    def do_HEAD(self) -> None:
        self.do_GET()


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    """A hub on a port of this machine, until the end of the context."""
    hub = Hub()
    handler = type("Bound", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
