"""Pages in a real browser: headless Chromium, driven over two pipes by its DevTools protocol.

>>> with Browser() as browser:  # doctest: +SKIP
...     visit = browser.open("file:///tmp/report.html", width=390, dark=True)
>>> visit.problems  # doctest: +SKIP
[]
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import http.server
import itertools
import json
import select
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from toy import PATIENCE_S

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium or google-chrome")

QUIET_S = 0.3
"""A page is done when it has loaded, no request is under way, and nothing was said for so long."""
FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync --disable-dev-shm-usage --disable-extensions --hide-scrollbars --remote-debugging-pipe"
)


@dataclasses.dataclass
class Visit:
    """A page as the browser found it."""

    errors: list[str] = dataclasses.field(default_factory=list)
    """Exceptions, ``console.error``, and errors that the browser itself reports."""
    failed: list[str] = dataclasses.field(default_factory=list)
    """Requests that got no answer, or an answer of 400 and above."""
    requests: list[str] = dataclasses.field(default_factory=list)
    """Addresses of all requests, the page's own first; ``data:`` is none."""
    screenshot: bytes = dataclasses.field(default=b"", repr=False)
    """PNG of the window, or with ``full`` of the whole page."""
    answer: Any = None
    """Value of the expression that was asked for."""

    @property
    def problems(self) -> list[str]:
        return self.errors + self.failed


class Browser:
    """One Chromium process; ``open`` gives every page a fresh tab."""

    def __enter__(self) -> Browser:
        assert CHROMIUM is not None
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        # The protocol speaks on descriptors 3 and 4, one JSON object at a time, each ended by a zero byte.
        shell = ["sh", "-c", 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null', "sh"]
        flags = [*FLAGS.split(), f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(
            [*shell, CHROMIUM, *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._numbers = itertools.count(1)
        self._heard = bytearray()
        self._events: list[dict[str, Any]] = []
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self._call("Browser.close")
        self._process.communicate(timeout=PATIENCE_S)
        self._profile.cleanup()

    def open(
        self,
        url: str,
        *,
        width: int = 1400,
        height: int = 900,
        dark: bool = False,
        full: bool = False,
        ask: str | None = None,
    ) -> Visit:
        """Open a page, wait until it is quiet, and take its picture.

        Arguments:
            url: ``http://…`` or ``file:///…``.
            width, height: the window in CSS pixels.
            dark: the reader prefers a dark scheme.
            full: take a picture of the whole page instead of the window.
            ask: a JavaScript expression; its value (or that of its promise) becomes ``answer``.
        """
        target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        tab = self._call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable", session=tab)
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self._call("Emulation.setDeviceMetricsOverride", metrics, tab)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", {"features": [scheme]}, tab)
        self._events.clear()
        visit = Visit()
        self._call("Page.navigate", {"url": url}, tab)
        self._wait(visit)
        if ask is not None:
            asked = {"expression": ask, "returnByValue": True, "awaitPromise": True}
            visit.answer = self._call("Runtime.evaluate", asked, tab)["result"].get("value")
            self._wait(visit, loaded=True)
        picture: dict[str, Any] = {"format": "png"}
        if full:
            size = self._call("Page.getLayoutMetrics", session=tab)["cssContentSize"]
            picture |= {"captureBeyondViewport": True, "clip": size | {"scale": 1}}
        visit.screenshot = base64.b64decode(self._call("Page.captureScreenshot", picture, tab)["data"])
        self._call("Target.closeTarget", {"targetId": target})
        return visit

    def _wait(self, visit: Visit, loaded: bool = False) -> None:
        """Take events in until the page has loaded and is quiet."""
        under_way: dict[str, str] = {}
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            event = self._events.pop(0) if self._events else self._read(QUIET_S)
            if event is None:
                if loaded and not under_way:
                    return
                continue
            method, params = event.get("method", ""), event.get("params", {})
            if method == "Page.loadEventFired":
                loaded = True
            elif method == "Network.requestWillBeSent":
                under_way[params["requestId"]] = url = params["request"]["url"]
                if not url.startswith("data:"):
                    visit.requests.append(url)
            elif method == "Network.responseReceived" and params["response"]["status"] >= 400:
                visit.failed.append(f"{params['response']['status']} {params['response']['url']}")
            elif method == "Network.loadingFinished":
                under_way.pop(params["requestId"], None)
            elif method == "Network.loadingFailed":
                url = under_way.pop(params["requestId"], "?")
                if not params.get("canceled"):
                    visit.failed.append(f"{params['errorText']} {url}")
            elif (error := _error(method, params)) is not None:
                visit.errors.append(error)
        raise TimeoutError(f"the page is never quiet; under way: {sorted(under_way.values())}")

    def _call(self, method: str, params: dict[str, Any] | None = None, session: str | None = None) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params or {}}
        if session is not None:
            message["sessionId"] = session
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\0")
        self._process.stdin.flush()
        while (answer := self._read(PATIENCE_S)) is not None:
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._events.append(answer)
        raise TimeoutError(f"Chromium does not answer {method}")

    def _read(self, patience_s: float) -> dict[str, Any] | None:
        """The next message, or None if there is none for so many seconds."""
        assert self._process.stdout is not None
        while b"\0" not in self._heard:
            if not select.select([self._process.stdout], [], [], patience_s)[0]:
                return None
            heard = self._process.stdout.read1()  # type: ignore[attr-defined]
            if not heard:
                raise RuntimeError("Chromium has ended")
            self._heard += heard
        message, _, rest = bytes(self._heard).partition(b"\0")
        self._heard = bytearray(rest)
        return json.loads(message)


def _error(method: str, params: dict[str, Any]) -> str | None:
    """What an event says went wrong, if anything."""
    if method == "Runtime.exceptionThrown":
        details = params["exceptionDetails"]
        return details.get("exception", {}).get("description", details["text"])
    if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
        return "console: " + " ".join(str(arg.get("value", arg.get("description"))) for arg in params["args"])
    if method == "Log.entryAdded" and params["entry"]["level"] == "error":
        return f"{params['entry']['text']} {params['entry'].get('url', '')}".strip()
    return None


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Address of a local server of a folder's files, without the final slash."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
