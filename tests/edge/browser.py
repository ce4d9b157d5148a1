"""A headless Chromium by its debugging protocol: enough to open a page, look at it, and click."""

from __future__ import annotations

import base64
import shutil
import subprocess
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import trio
from trio_websocket import open_websocket_url

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio_websocket import WebSocketConnection

NAMES = ("chromium-headless-shell", "chrome-headless-shell", "chromium", "google-chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One open page. problems: what the browser complained about, policy violations included."""

    def __init__(self, socket: WebSocketConnection) -> None:
        self._socket = socket
        self._id = 0
        self.problems: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._id += 1
        await self._socket.send_message(
            msgspec.json.encode({"id": self._id, "method": method, "params": params}).decode()
        )
        while True:
            answer = msgspec.json.decode(await self._socket.get_message())
            if answer.get("id") == self._id:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    async def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str, limit_s: float = 90.0) -> Any:
        """Wait until an expression is true, return its value."""
        with trio.fail_after(limit_s):
            while not (value := await self.evaluate(expression)):
                await trio.sleep(0.1)
            return value

    async def open(self, url: str) -> None:
        for domain in ("Runtime", "Log", "Page", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def screenshot(self, path: Path) -> None:
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


@asynccontextmanager
async def browser_page(width: int = 1400, height: int = 1200) -> AsyncIterator[Page]:
    """A page in a browser of its own, whose process and profile end with the block."""
    assert BROWSER is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += [
            f"--user-data-dir={profile}",
            "--remote-debugging-port=0",
            f"--window-size={width},{height}",
            "about:blank",
        ]
        process = await trio.lowlevel.open_process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port_file = Path(profile) / "DevToolsActivePort"
            with trio.fail_after(30):
                while not (port_file.exists() and (lines := port_file.read_text().splitlines())[1:]):
                    await trio.sleep(0.05)
            async with httpx.AsyncClient() as client:
                targets = (await client.get(f"http://127.0.0.1:{lines[0]}/json/list")).json()
            url = next(target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page")
            async with open_websocket_url(url, max_message_size=1 << 26) as socket:
                yield Page(socket)
        finally:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()
