"""Use a page in a real browser: headless Chromium, driven through a pipe in its DevTools protocol."""

import base64
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.report.browser import CHROMIUM

KEYS = {"Enter": 13, "Escape": 27, "Tab": 9}


class Browser:
    """with Browser(profile, width=390, dark=True) as browser: browser.open(url); browser.run("document.title")

    `problems` holds what the page and the network complained about, `requests` every address that was asked for.
    """

    def __init__(self, profile: Path, *, width: int = 1100, height: int = 900, dark: bool = False):
        self.profile, self.size, self.dark = profile, (width, height), dark
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.number, self.session, self.rest = 0, "", b""

    def __enter__(self) -> "Browser":
        assert CHROMIUM is not None
        theirs_in, self.out = os.pipe()
        self.into, theirs_out = os.pipe()
        command = [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
            "--disable-dev-shm-usage", "--remote-debugging-pipe", f"--user-data-dir={self.profile}", "about:blank",
        ]  # fmt: skip
        redirect = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'  # it reads commands from 3 and answers on 4
        self.process = subprocess.Popen(
            ["bash", "-c", redirect, "chromium", *command],
            pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        (page,) = (t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for part in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{part}.enable")
        width, height = self.size
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if self.dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.session = ""
            self.call("Browser.close")
            self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()
            os.close(self.out)
            os.close(self.into)

    def call(self, method: str, **params: Any) -> Any:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self.number:
            self._note(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def open(self, url: str) -> None:
        opened = self.call("Page.navigate", url=url)
        assert "errorText" not in opened, f"{url}: {opened['errorText']}"
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression, once it is known."""
        got = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in got, got["exceptionDetails"]
        return got["result"].get("value")

    def until(self, true: str, seconds: float = 60) -> Any:
        """Wait for an expression to be true; its value."""
        end = time.monotonic() + seconds
        while not (value := self.run(true)):
            assert time.monotonic() < end, f"this did not happen: {true}"
            time.sleep(0.02)
        return value

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of an element, where something may cover it."""
        box = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{box}.scrollIntoView({{block: 'center'}})")
        x, y = self.run(
            f"(() => {{ const b = {box}.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; }})()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Into the element that has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, ctrl: bool = False) -> None:
        written = {"text": "\r"} if key == "Enter" and not ctrl else {}
        for kind, text in (("keyDown", written), ("keyUp", {})):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key],
                modifiers=2 * ctrl, **text,
            )  # fmt: skip

    def picture(self, path: Path) -> None:
        """The whole page as PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            part = os.read(self.into, 1 << 16)
            assert part, f"Chromium ended with exit code {self.process.wait()}"
            self.rest += part
        message, _, self.rest = self.rest.partition(b"\0")
        read: dict[str, Any] = json.loads(message)
        return read

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(params["exceptionDetails"].get("exception", {}).get("description", str(params)))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning"):
                self.problems.append(" ".join(str(arg.get("value")) for arg in params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
