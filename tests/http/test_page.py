"""The page at /, used in a headless browser as a person does; skipped where no Chromium is installed."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import chromium
import pytest
from http_fake import ScriptedIngress
from http_site import Serve, Site

from sgla.http.page import assets

TEMPLATE = "{% for t in tools %}<tool_call>{{ t }}</tool_call>{% endfor %}{{ messages }}<think></think>"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}

browser = pytest.mark.skipif(chromium.PROGRAM is None, reason="no Chromium")


async def test_the_page_needs_nothing_from_elsewhere(serve: Serve) -> None:
    site = await serve(api_key=["k"])
    async with site.http.get("/") as response:
        text = await response.text()
        assert response.status == 200
        assert response.content_type == "text/html"
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    assert not re.findall(r"(?:src|href)=.(?!data:)|@import|url\(", text)


async def test_files_of_the_page(serve: Serve) -> None:
    site = await serve(api_key=["k"])
    for name, (content, etag) in assets().items():
        async with site.http.get(f"/page/{name}") as response:
            assert (response.status, await response.read()) == (200, content)
            assert "script-src 'self'" in response.headers["Content-Security-Policy"]
        async with site.http.get(f"/page/{name}", headers={"If-None-Match": f'"{etag}"'}) as response:
            assert (response.status, await response.read()) == (304, b"")
    for name in ("none.js", "__init__.py", "../app.py", "vendor/%2e%2e/__init__.py", "vendor"):
        async with site.http.get(f"/page/{name}") as response:
            assert response.status in (401, 404)
    notice = assets()["vendor/NOTICE.txt"][0].decode()
    shipped = {name.removeprefix("vendor/") for name in assets() if re.fullmatch(r"vendor/[^/]+\.js", name)}
    assert shipped == set(re.findall(r"^\S+\.js", notice, re.M))


@browser
async def test_the_api_reference(serve: Serve, tmp_path: Path) -> None:
    site = await serve(api_key=["secret"])
    async with chromium.browsing(tmp_path, f"{site.url}/docs") as tab:
        await tab.until("document.activeElement.id === 'secret'")
        await tab.type("secret")
        await tab.enter()
        text = "document.getElementById('reference').shadowRoot?.textContent ?? ''"
        await tab.until(f"({text}).includes('OpenAI: answer a chat')")
        assert not tab.problems


def answers(count: int) -> str:
    return f"document.querySelectorAll('.foot').length === {count}"


async def ask(tab: chromium.Tab, text: str) -> None:
    await tab.type(text)
    await tab.enter()


@browser
async def test_a_conversation(site: Site, tmp_path: Path) -> None:
    async with chromium.browsing(tmp_path, site.url) as tab:
        await tab.until("document.getElementById('state').className === 'up'")
        shown = [await tab.js(f"$('{name}').placeholder") for name in ("temperature", "max_tokens", "seed")]
        assert shown == ["0.6", "1024", "default"]
        assert "SmolLM2-135M-Instruct" in await tab.js("$('about').innerText")
        await tab.set("system", "Be brief.")
        await tab.set("seed", "7")
        await tab.set("stops", "END\nFIN")
        await tab.set("schema", json.dumps(SCHEMA))
        await tab.set("max_tokens", "24")
        await ask(tab, "First <b>question</b>")
        await tab.until(answers(1))
        assert await tab.js("document.querySelector('article.user b')") is None
        assert "24 tokens" in await tab.js("document.querySelector('.foot').innerText")
        (job,) = site.ingress.jobs
        assert job.messages is not None
        assert [m["content"] for m in job.messages] == ["Be brief.", "First <b>question</b>"]
        assert (job.sampling.seed, job.sampling.stop, job.sampling.top_p) == (7, ["END", "FIN"], 1.0)
        assert job.sampling.grammar is not None
        assert json.loads(job.sampling.grammar.text) == SCHEMA

        assert job.sampling.repetition_detection is not None
        assert job.sampling.max_tokens == 24

        await tab.set("schema", "")
        await tab.set("max_tokens", "")
        site.ingress.pace = 0.05
        await ask(tab, "Second question")
        await tab.until("document.querySelectorAll('article.assistant .text')[1]?.innerText.length > 10")
        await tab.press("Escape", 27)
        await tab.until(answers(2))
        assert site.ingress.jobs[-1].sampling.max_tokens == 1024  # a quarter of the context
        assert "ended by you" in await tab.js("document.querySelectorAll('.foot')[1].innerText")
        await tab.until("!document.getElementById('send').hidden")
        while not site.ingress.cancels:  # the server sees the hang-up a little later
            await asyncio.sleep(0.01)
        kept = await tab.js("messages.map((m) => m.role).join()")
        assert kept == "user,assistant,user,assistant"

        site.ingress.pace = 0.0
        await tab.set("top_p", "3")
        await ask(tab, "Third question")
        await tab.until(answers(3))
        error = await tab.js("document.querySelector('.error').innerText")
        assert "top_p must be greater than 0 and at most 1, got 3" in error
        assert "HTTP 400 · invalid_value · field top_p" in error
        await tab.set("top_p", "")
        await tab.js("[...document.querySelectorAll('.again')].at(-1).click()")
        await tab.until("messages.length === 6 && !running")
        assert await tab.js("document.querySelectorAll('article').length") == 6
        assert not tab.problems


@browser
async def test_the_live_panel(site: Site, tmp_path: Path) -> None:
    async with chromium.browsing(tmp_path, site.url) as tab:
        await tab.until("document.getElementById('kv').innerText === '16 · 40 · 256'")
        assert await tab.js("document.getElementById('held').style.width") == "6.25%"
        site.ingress.phase = "dead"
        await ask(tab, "Anyone?")
        await tab.until("document.querySelector('.error')?.innerText.includes('the model is not loaded yet')")
        assert not tab.problems


@browser
async def test_key_reasoning_and_tools(serve: Serve, tmp_path: Path) -> None:
    script = f"<think>Hm, Oslo.</think>Let me look.{CALL}"
    ingress = ScriptedIngress(script, TEMPLATE)
    site = await serve(ingress, api_key=["secret"])
    async with chromium.browsing(tmp_path, site.url) as tab:
        await tab.until("document.getElementById('locked').open")
        assert "API key" in await tab.js("document.getElementById('wanted').innerText")
        await ask(tab, "secret")
        await tab.until("document.getElementById('state').className === 'up'")
        await tab.js("document.getElementById('prompt').focus()")
        await tab.set("tools", json.dumps(TOOLS))
        await ask(tab, "Weather in Oslo?")
        await tab.until(answers(1))
        assert await tab.js("document.querySelector('.thought div').innerText") == "Hm, Oslo."
        assert await tab.js("document.querySelector('article.assistant .text').innerText") == "Let me look."
        call = "document.querySelector('.call')"
        assert await tab.js(f"{call}.querySelector('b').innerText") == "weather"
        assert json.loads(await tab.js(f"{call}.querySelector('pre').innerText")) == {"city": "Oslo"}
        ingress.script = "It is cold."
        await tab.js(f"{call}.querySelector('textarea').focus()")
        await tab.type("3 degrees")
        await tab.js(
            "[...document.querySelectorAll('button')].find((b) => b.innerText === 'Send results').click()"
        )
        await tab.until(answers(2))
        told: Any = ingress.jobs[-1].messages
        assert [m["role"] for m in told] == ["user", "assistant", "tool"]
        assert (told[2]["content"], told[2]["tool_call_id"]) == ("3 degrees", told[1]["tool_calls"][0]["id"])
        assert not tab.problems
