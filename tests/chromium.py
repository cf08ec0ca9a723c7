"""Drive a real headless Chromium over its debugging pipe: no driver program, no package needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser", "chrome"))), None
)
"""Path of the browser, None where there is none."""

OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-default-apps", "--no-default-browser-check", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip


class Browser:
    """A browser with one page. events: everything that the page reported, in order."""

    def __init__(self, profile: Path, timeout_s: float = 120) -> None:
        assert PROGRAM is not None
        self.timeout_s, self.events, self._count, self._buffer = timeout_s, [], 0, b""
        read_end, self._out = os.pipe()
        self._in, write_end = os.pipe()
        # the browser reads commands from its file 3 and writes answers to its file 4
        command = f'exec "$0" "$@" 3<&{read_end} 4>&{write_end}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, PROGRAM, *OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(read_end, write_end), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read_end)
        os.close(write_end)
        self._session: str | None = None
        pages = [item for item in self.send("Target.getTargets")["targetInfos"] if item["type"] == "page"]
        target = (
            pages[0]["targetId"] if pages else self.send("Target.createTarget", url="about:blank")["targetId"]
        )
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:  # a test is not about how a browser ends
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; raises RuntimeError with the browser's words."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._count:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + self.timeout_s
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], max(0, deadline - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            chunk = os.read(self._in, 1 << 20)
            if not chunk:
                raise RuntimeError("the browser closed its pipe")
            self._buffer += chunk
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until a JavaScript condition holds."""
        deadline = time.monotonic() + self.timeout_s
        while not self.run(condition):
            if time.monotonic() > deadline:
                raise TimeoutError(condition)
            time.sleep(0.05)

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a local file in a window of that size and colour scheme; returns when figures are drawn."""
        self.resize(width, height)
        self.scheme(dark)
        self.send("Page.navigate", url=path.resolve().as_uri())
        self.ready()

    def ready(self) -> None:
        """Until the page is loaded and each figure is drawn."""
        self.wait(
            "document.readyState === 'complete' && location.protocol === 'file:'"
            " && !document.querySelector('.plot:not(:has(.main-svg))')"
        )
        self.settle()

    def resize(self, width: int, height: int = 900) -> None:
        """Give the page a viewport of that size in CSS pixels; below 600 it is a phone's."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip

    def scheme(self, dark: bool) -> None:
        """Prefer a dark or light colour scheme."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[feature])

    def settle(self) -> None:
        """Two animation frames: what was asked for is on the screen."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def click(self, selector: str, times: int = 1) -> None:
        """Real mouse clicks, quick ones, in the middle of the first element that matches."""
        x, y = self.run(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)});"
            " node.scrollIntoView({block: 'center'}); const box = node.getBoundingClientRect();"
            " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for count in range(1, times + 1):
            for kind in ("mousePressed", "mouseReleased"):
                self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=count)
        self.settle()

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.send("Input.insertText", text=text)
        self.settle()

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """A PNG of the page, all of its length if ``whole``."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        extra = {"captureBeyondViewport": True, "clip": clip} if whole else {}
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png", **extra)["data"]))

    def problems(self) -> list[str]:
        """Console errors and warnings, uncaught exceptions and failed loads so far."""
        found = []
        for event in self.events:
            kind, values = event.get("method"), event.get("params", {})
            if kind == "Runtime.exceptionThrown":
                found.append(json.dumps(values["exceptionDetails"])[:500])
            elif kind == "Runtime.consoleAPICalled" and values["type"] in {"error", "warning", "assert"}:
                found.append(json.dumps(values["args"])[:500])
            elif kind == "Log.entryAdded" and values["entry"]["level"] in {"error", "warning"}:
                found.append(values["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """The address of everything that the page asked for, data: and blob: aside."""
        asked = [
            e["params"]["request"]["url"]
            for e in self.events
            if e.get("method") == "Network.requestWillBeSent"
        ]
        return [url for url in asked if not url.startswith(("data:", "blob:"))]
