"""A headless Chromium, spoken to by its DevTools protocol over two pipes: no driver, no network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

__all__ = ["Browser", "chromium"]

LIMIT_S = 60.0


def chromium() -> str | None:
    """A Chromium of this machine, None without one."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page."""

    def __init__(self, folder: Path, width: int = 1200, height: int = 900, *, dark: bool = False) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
            f"--window-size={width},{height}",
            *(["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []),
        ]
        # It reads from descriptor 3 and writes to 4.
        script = f'exec 3<&{to_read} 4>&{to_write}; exec "$0" "$@" 2>/dev/null >/dev/null'
        command = ["bash", "-c", script, str(chromium()), *options]
        self._process = subprocess.Popen(command, pass_fds=(to_read, to_write))
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._number, self._session = b"", 0, {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        self.call("Page.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        limit = time.monotonic() + LIMIT_S
        while time.monotonic() < limit:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
        raise AssertionError(f"no answer to {method}")

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._read, 2**20)
            assert data, "the browser has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path) -> None:
        """Load a page, and return when its scripts have run."""
        self.call("Page.navigate", url=path.as_uri())
        while self.value("document.readyState") != "complete":
            time.sleep(0.02)

    def value(self, expression: str) -> Any:
        """What an expression is on the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def close(self) -> None:
        """End it."""
        os.close(self._write)
        os.close(self._read)
        self._process.terminate()
        self._process.wait(LIMIT_S)
