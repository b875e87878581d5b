"""A real browser for tests, steered through a pipe: clicks, keys and wheel arrive as from a person.

Chromium's ``--remote-debugging-pipe`` reads commands from file descriptor 3 and answers on 4, as JSON that ends with a
zero byte. So the tests need no package and no port.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",  # containers run as root, and these pages are our own
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-sync",
    "--no-first-run",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
    "--window-size=1200,900",
)
PATIENCE_S = 60

# Moves the two pipes to where Chromium looks for them, and becomes Chromium.
MOVE = """
import os, sys
orders, answers = (os.dup(int(one)) for one in sys.argv[1:3])
os.dup2(orders, 30), os.dup2(answers, 31)
os.dup2(30, 3), os.dup2(31, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def executable():
    """Find a Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One browser with one tab."""

    def __init__(self, program, profile):
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-IS",
                "-c",
                MOVE,
                str(orders),
                str(answers),
                program,
                *FLAGS,
                f"--user-data-dir={profile}",
                "--remote-debugging-pipe",
                "about:blank",
            ],
            pass_fds=(orders, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(orders)
        os.close(answers)
        self._count, self._rest, self._session, self.console = 0, b"", None, []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def close(self):
        """End the browser."""
        self._session = None
        try:
            self.send("Browser.close")
        except (OSError, EOFError, TimeoutError):
            self._process.kill()
        os.close(self._orders)
        os.close(self._answers)
        self._process.wait(PATIENCE_S)

    def send(self, method, **params):
        """Give an order, and wait for its answer."""
        self._count += 1
        order = {"id": self._count, "method": method, "params": params}
        if self._session:
            order["sessionId"] = self._session
        rest = json.dumps(order).encode() + b"\0"
        while rest:
            rest = rest[os.write(self._orders, rest) :]
        until = time.monotonic() + PATIENCE_S
        while True:
            answer = self._read(until)
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._note(answer)

    def _read(self, until):
        while b"\0" not in self._rest:
            if not select.select([self._answers], [], [], max(0, until - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            part = os.read(self._answers, 1 << 20)
            if not part:
                raise EOFError("the browser has ended")
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)

    def _note(self, event):
        """Keep what a person would see in the console, and every request for a page's parts."""
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.console.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.console.append(str([one.get("value") for one in params["args"]]))
        elif method == "Log.entryAdded" and "willReadFrequently" not in params["entry"]["text"]:
            self.console.append(
                params["entry"]["text"]
            )  # but for the advice to those who read pixels
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(("file:", "about:")):
                self.console.append(f"asked for {url}")
        elif method == "Page.javascriptDialogOpening":
            self.console.append(f"a dialog: {params['message']}")

    def open(self, path, address="", *, width=1200, height=900, dark=False):
        """Load a page and wait until it has drawn."""
        self.console.clear()
        self.size(width, height)
        self.media("", dark=dark)
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=f"{Path(path).as_uri()}{address}")
        until = time.monotonic() + PATIENCE_S
        while not self.run("document.readyState == 'complete' && !!document.body.dataset.errors"):
            if time.monotonic() > until:
                raise TimeoutError("the page does not load")
            time.sleep(0.01)
        self.frame()

    def size(self, width, height):
        """Make the window so many pixels wide and high."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **metrics)

    def media(self, kind, *, dark=False):
        """Pretend to be a screen or paper, in a light or dark room."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media=kind, features=[scheme])

    def run(self, script):
        """Give the value of a JavaScript expression."""
        answer = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def frame(self):
        """Wait until what was asked for is drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def text(self, selector):
        """Give the text a person sees in an element."""
        one = f"document.querySelector({json.dumps(selector)})"
        return self.run(f"(one => one.checkVisibility() ? one.innerText : '')({one})")

    def table(self, selector):
        """Give the texts of a table's cells, row by row, but for rows that are folded."""
        rows = f"document.querySelectorAll({json.dumps(selector + ' tr')})"
        return self.run(
            f"[...{rows}].filter(row => row.checkVisibility())"
            ".map(row => [...row.cells].map(cell => cell.innerText.trim()))"
        )

    def mouse(self, kind, x, y, **more):
        """Move, press, release or turn the wheel at a place of the window."""
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.frame()

    def click(self, x, y):
        """Press and release."""
        self.mouse("mousePressed", x, y, button="left", clickCount=1)
        self.mouse("mouseReleased", x, y, button="left", clickCount=1)

    def key(self, key, *, shift=False):
        """Press a key; a single letter also types it."""
        text = {"text": key} if len(key) == 1 else {}
        more = {"key": key, "modifiers": 8 * shift}
        self.send("Input.dispatchKeyEvent", type="keyDown", **more, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **more)
        self.frame()

    def picture(self, path, *, whole=True):
        """Save what is seen as PNG."""
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        Path(path).write_bytes(base64.b64decode(data["data"]))

    def paper(self, path):
        """Save what would be printed as PDF."""
        data = self.send("Page.printToPDF", printBackground=False, preferCSSPageSize=True)
        Path(path).write_bytes(base64.b64decode(data["data"]))
