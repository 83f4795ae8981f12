"""A headless Chromium, driven over its remote debugging protocol: just enough to use a page as a person
does."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
    "--remote-debugging-port=0",
    "--window-size=1200,800",
    # a host that browsers do not trust as they trust this one
    "--host-resolver-rules=MAP page.test 127.0.0.1",
]
PATIENCE = 20.0


class Tab:
    """One page. ``problems``: what the page logged as an error, and exceptions that it did not catch."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._reader = asyncio.ensure_future(self._read())
        self.problems: list[str] = []

    async def _read(self) -> None:
        async for frame in self._socket:
            message = json.loads(frame.data)
            if "id" in message:
                self._replies.pop(message["id"]).set_result(message)
            elif message["method"] == "Runtime.exceptionThrown":
                self.problems.append(str(message["params"]["exceptionDetails"]))
            elif message["method"] == "Log.entryAdded" and message["params"]["entry"]["source"] != "network":
                self.problems.append(message["params"]["entry"]["text"])

    async def call(self, method: str, **params: Any) -> Any:
        number = next(self._ids)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        message = await asyncio.wait_for(reply, PATIENCE)
        assert "error" not in message, message
        return message["result"]

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        await self.until("location.protocol !== 'about:' && document.readyState === 'complete'")

    async def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        reply = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while not await self.js(expression):
            now = asyncio.get_running_loop().time()
            assert now < deadline, f"never true: {expression}\n{await self.js('document.body.innerText')}"
            await asyncio.sleep(0.02)

    async def type(self, text: str) -> None:
        """Into the element that has the focus."""
        await self.call("Input.insertText", text=text)

    async def click(self, selector: str) -> None:
        """The middle of an element, with the mouse."""
        box = await self.js(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: "
            f"'center'}});"
            " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            at = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
            await self.call("Input.dispatchMouseEvent", type=kind, **at)

    async def press(self, key: str, code: int, text: str = "", modifiers: int = 0) -> None:
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def enter(self) -> None:
        await self.press("Enter", 13, "\r")

    async def set(self, element: str, value: str) -> None:
        """Fill a field of the page."""
        await self.js(f"document.getElementById({element!r}).value = {json.dumps(value)}")

    async def offline(self, offline: bool) -> None:
        """Cut the page off from the server, or give it back."""
        await self.call("Network.enable")
        rates = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        await self.call("Network.emulateNetworkConditions", offline=offline, **rates)

    async def dark(self, dark: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def size(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    async def screenshot(self, path: Path) -> None:
        reply = await self.call("Page.captureScreenshot")
        path.write_bytes(base64.b64decode(reply["data"]))

    async def close(self) -> None:
        self._reader.cancel()
        await self._socket.close()


@contextlib.asynccontextmanager
async def browsing(folder: Path, url: str) -> AsyncIterator[Tab]:
    """A tab that shows ``url``; the browser keeps its profile in ``folder`` and ends with the block."""
    assert PROGRAM is not None
    process = await asyncio.create_subprocess_exec(
        PROGRAM,
        *FLAGS,
        f"--user-data-dir={folder}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        port = await _port(folder / "DevToolsActivePort")
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                (target,) = [entry for entry in await response.json() if entry["type"] == "page"]
            tab = Tab(await session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0))
            try:
                await tab.open(url)
                yield tab
            finally:
                await tab.close()
    finally:
        process.terminate()
        await process.wait()


async def _port(path: Path) -> int:
    """The port that the browser writes down once it listens."""
    async with asyncio.timeout(PATIENCE):
        while not path.exists() or not path.read_text().strip():
            await asyncio.sleep(0.02)
    return int(path.read_text().split()[0])
