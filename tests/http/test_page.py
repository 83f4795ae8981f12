"""The page at /, used in a headless browser as a person does; skipped where no Chromium is installed."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

import chromium
import pytest
from http_fake import ScriptedIngress
from http_site import Serve, Site
from test_pictures import BASE64, PARTS, PICTURES, seeing
from video_files import clip

from sgla.http.page import assets

TEMPLATE = "{% for t in tools %}<tool_call>{{ t }}</tool_call>{% endfor %}{{ messages }}<think></think>"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]

FONT = next(name for name in assets() if name.endswith(".woff2")).removeprefix("vendor/fonts/")

browser = pytest.mark.skipif(chromium.PROGRAM is None, reason="no Chromium")


async def test_the_page_needs_nothing_from_elsewhere(serve: Serve) -> None:
    site = await serve(api_key=["k"])
    for path in ("/", "/docs"):
        async with site.http.get(path) as response:
            text = await response.text()
            assert (response.status, response.content_type) == (200, "text/html")
            assert "default-src 'none'; script-src 'self'" in response.headers["Content-Security-Policy"]
        files = [name for name in re.findall(r'(?:src|href)="(?!data:)([^"]+)', text) if name != "docs"]
        assert files
        for name in files:
            async with site.http.get(f"/{name}") as response:
                assert response.status == 200, name
        assert "<script>" not in text
    for name, (content, _) in assets().items():
        if not name.startswith("vendor/"):
            assert not re.search(rb"@import|url\(|https?://(?!www.w3.org/2000/svg)", content), name


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
    for name, kind in (("main.js", "gzip"), ("page.css", "gzip"), ("vendor/fonts/" + FONT, None)):
        for wish, packed in (("br, gzip;q=0.5", kind), ("gzip;q=0, br", None), ("identity", None)):
            headers = {"Accept-Encoding": wish}
            async with site.http.get(f"/page/{name}", headers=headers, auto_decompress=False) as response:
                body = await response.read()
                found = response.headers
            assert (found.get("Content-Encoding"), found["Vary"]) == (packed, "Accept-Encoding")
            assert found["ETag"] == f'W/"{assets()[name][1]}"'
            assert (gzip.decompress(body) if packed else body) == assets()[name][0]
            headers["If-None-Match"] = found["ETag"]
            async with site.http.get(f"/page/{name}", headers=headers) as response:
                assert response.status == 304
    for path, place in (("/docs/", "../docs"), ("/docs//", "../../docs")):
        async with site.http.get(path, allow_redirects=False) as response:
            assert (response.status, response.headers["Location"]) == (308, place)
        async with site.http.get(path) as response:
            assert (response.status, response.url.path) == (200, "/docs")
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


UP = "document.getElementById('state').className === 'up'"
SHOWN = "[...document.querySelectorAll('article .text')].map((text) => text.innerText.trim())"
STORED = "(await import('/page/store.js')).load()"


def answers(count: int) -> str:
    return f"document.querySelectorAll('article.assistant .foot').length === {count}"


async def ask(tab: chromium.Tab, text: str) -> None:
    await tab.js("document.getElementById('prompt').focus()")
    await tab.type(text)
    await tab.enter()


async def press_button(tab: chromium.Tab, name: str, at: int = -1) -> None:
    """The button of that name, the last one on the page unless ``at`` says which."""
    buttons = f"[...document.querySelectorAll('button')].filter((one) => one.textContent === {name!r})"
    await tab.js(f"{buttons}.at({at}).click()")


async def field(tab: chromium.Tab, element: str, of: str) -> Any:
    return await tab.js(f"document.getElementById('{element}').{of}")


def said(site: Site) -> list[Any]:
    """The messages of the last request."""
    return [message["content"] for message in site.ingress.jobs[-1].messages or []]


GUESSING = """(() => {
    const real = window.fetch;
    let calls = 0;
    window.fetch = async (url, options) => {
        const got = await real(url, options);
        if (url !== "metrics") return got;
        calls += 1;
        const more = `sgla:spec_verify_calls_total{a="b"} ${10 * calls}
sgla:spec_accepted_tokens_total{a="b"} ${15 * calls}
`;
        return new Response(await got.text() + more);
    };
})()"""


@browser
async def test_guesses_are_shown_where_there_are_any(site: Site, tmp_path: Path) -> None:
    async with chromium.browsing(tmp_path, site.url) as tab:
        await tab.until(UP)
        await tab.until("document.getElementById('running').textContent !== '–'")
        assert await field(tab, "accepted", "hidden") is True
        await tab.js(GUESSING)
        await tab.until("document.getElementById('accepted').textContent === '2.50'")
        assert await field(tab, "accepted", "hidden") is False


@browser
async def test_a_conversation(site: Site, tmp_path: Path) -> None:
    async with chromium.browsing(tmp_path, site.url) as tab:
        await tab.until(UP)
        shown = [await field(tab, name, "placeholder") for name in ("temperature", "max_tokens", "seed")]
        assert shown == ["0.6", "1024", "default"]
        assert "temperature0.6 generation_config.json" in await field(tab, "defaults", "textContent")
        assert "SmolLM2-135M-Instruct" in await field(tab, "about", "innerText")
        for name in ("tools", "schema"):  # what the page shows as an example is one
            example = json.loads(await field(tab, name, "placeholder"))
            await tab.js(f"document.getElementById('{name}').nextElementSibling.click()")
            assert json.loads(await field(tab, name, "value")) == example
        await tab.set("tools", "")
        await tab.set("system", "Be brief.")
        await tab.set("seed", "7")
        await tab.set("stops", "END\nFIN")
        await tab.set("max_tokens", "24")
        await ask(tab, "First <b>question</b>")
        await tab.until(answers(1))
        assert await tab.js("document.querySelector('article.user b')") is None
        assert "24 tokens" in await tab.js("document.querySelector('article.assistant .foot').innerText")
        assert await tab.js("document.querySelector('article.assistant h2').innerText") == "fake"
        (job,) = site.ingress.jobs
        assert said(site) == ["Be brief.", "First <b>question</b>"]
        assert (job.sampling.seed, job.sampling.stop, job.sampling.top_p) == (7, ["END", "FIN"], 1.0)
        assert job.sampling.grammar is not None
        assert json.loads(job.sampling.grammar.text) == example
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
        assert "ended by you" in await tab.js("document.querySelectorAll('.assistant .foot')[1].innerText")
        await tab.until("!document.getElementById('send').hidden")
        while not site.ingress.cancels:  # the server sees the hang-up a little later
            await asyncio.sleep(0.01)
        kept = await tab.js("[...document.querySelectorAll('article')].map((one) => one.className).join()")
        assert kept == "user,assistant,user,assistant"

        site.ingress.pace = 0.0
        await tab.set("top_p", "3")
        await ask(tab, "Third question")
        await tab.until(answers(3))
        error = await tab.js("document.querySelector('.error').innerText")
        assert "top_p must be greater than 0 and at most 1, got 3" in error
        assert "HTTP 400 · invalid_value · field top_p" in error
        await tab.set("top_p", "")
        await press_button(tab, "Retry")
        await tab.until(f"{answers(3)} && !document.querySelector('.error')")
        assert await tab.js("document.querySelectorAll('article').length") == 6
        assert not tab.problems


@browser
async def test_edit_retry_branch_and_what_is_kept(serve: Serve, tmp_path: Path) -> None:
    ingress = ScriptedIngress("one", TEMPLATE)
    ingress.default_sampling.values["temperature"] = 0
    site = await serve(ingress)
    earlier = "document.querySelector('[aria-label=\"Earlier version\"]').click()"
    chats = "document.querySelectorAll('#kept-chats li').length"
    async with chromium.browsing(tmp_path, site.url) as tab:
        await tab.until(UP)
        await ask(tab, "Count")
        await tab.until(answers(1))
        ingress.script = "two"
        await press_button(tab, "Retry")
        await tab.until(f"{SHOWN}.join() === 'Count,two' && {answers(1)}")
        greedy, again = (job.sampling for job in ingress.jobs)  # which would give the same answer
        assert (greedy.temperature, greedy.seed) == (0, None)
        assert again.temperature == 0.6
        assert again.seed is not None
        await tab.js(earlier)
        assert await tab.js(SHOWN) == ["Count", "one"]
        await ask(tab, "Go on")
        await tab.until(answers(2))
        assert said(site) == ["Count", "one", "Go on"]

        ingress.script = "three"
        await press_button(tab, "Edit", at=0)
        await tab.js("document.querySelector('.edit textarea').value = 'Count down'")
        await press_button(tab, "Send", at=0)
        await tab.until(f"{SHOWN}.join() === 'Count down,three' && {answers(1)}")
        assert said(site) == ["Count down"]
        assert await tab.js("document.querySelector('.version').innerText") == "2 of 2"
        await tab.js(earlier)
        assert await tab.js(SHOWN) == ["Count", "one", "Go on", "two"]

        await press_button(tab, "Branch", at=1)
        await tab.until(f"{chats} === 2")
        assert await tab.js(SHOWN) == ["Count", "one"]
        await press_button(tab, "Rename", at=0)
        await tab.js("document.querySelector('#kept-chats input').value = 'Numbers'")
        await tab.enter()
        await tab.until("document.querySelector('#kept-chats .title')?.innerText === 'Numbers'")
        written = await tab.js(f"(async () => (await {STORED}).map((chat) => chat.markdown()))()")
        assert written[0] == "# Numbers\n\n## You\n\nCount\n\n## fake\n\none\n"
        assert len(written) == 2

        await tab.call("Page.reload")
        await tab.until(f"document.readyState === 'complete' && {chats} === 2")
        await tab.js("window.confirm = () => true")
        await tab.js("[...document.querySelectorAll('#kept-chats .title')].at(1).click()")
        await tab.until(f"{SHOWN}.join() === 'Count,one,Go on,two'")
        await press_button(tab, "Delete", at=0)
        await tab.until(f"{chats} === 1")
        assert not tab.problems


@browser
async def test_what_has_come_of_an_answer_outlives_the_page(serve: Serve, tmp_path: Path) -> None:
    ingress = ScriptedIngress("word " * 4000, TEMPLATE, cut=10)
    ingress.pace = 0.02
    site = await serve(ingress)
    part = f"(async () => (await {STORED})[0]?.nodes.at(-1).message.content ?? '')()"
    async with chromium.browsing(tmp_path, site.url) as tab:
        await tab.until(UP)
        await ask(tab, "Count")
        await tab.until(f"{part}.then((text) => text.startsWith('word word'))")
        await tab.call("Page.reload")
        await tab.until(
            "document.readyState === 'complete' && !!document.querySelector('#kept-chats .title')"
        )
        await tab.js("document.querySelector('#kept-chats .title').click()")
        await tab.until("document.querySelectorAll('article').length === 2")
        assert (await tab.js(SHOWN))[1].startswith("word word")
        assert "not complete" in await tab.js("document.querySelector('article.assistant .foot').innerText")
        ingress.script, ingress.pace = "done", 0.0
        await press_button(tab, "Retry")
        await tab.until(f"{SHOWN}.join() === 'Count,done'")
        assert await tab.js("document.querySelector('.version').innerText") == "2 of 2"
        ingress.script, ingress.pace = "word " * 4000, 0.02
        await ask(tab, "More")
        await tab.until(f"{part}.then((text) => text.startsWith('word word'))")
        await tab.js("window.confirm = () => true")
        await press_button(tab, "Delete", at=0)
        await tab.until("!document.getElementById('no-chats').hidden")
        await asyncio.sleep(1.2)  # longer than a part waits to be kept
        assert await tab.js(f"(async () => (await {STORED}).length)()") == 0
        assert not tab.problems


@browser
async def test_exported_chats_come_back(serve: Serve, tmp_path: Path) -> None:
    site = await serve(ScriptedIngress("one", TEMPLATE))
    files = {
        "chat.json": "",
        "words.json": "no JSON",
        "other.json": '{"a": 1}',
        "cycle.json": '{"nodes": [{"parent": -1, "chosen": 1}, {"parent": 1, "message": {"role": "user", '
        '"content": "x"}}]}',
        "number.json": '{"nodes": [{"parent": -1}, {"parent": 0, "message": {"role": "user", "content": '
        "5}}]}",
        "call.json": '{"nodes": [{"parent": -1}, {"parent": 0, "message": '
        '{"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}}]}',
    }
    async with chromium.browsing(tmp_path / "profile", site.url) as tab:
        await tab.until(UP)
        await ask(tab, "Count")
        await tab.until(answers(1))
        await press_button(tab, "Retry")
        await tab.until("document.querySelector('.version')?.innerText === '2 of 2'")
        files["chat.json"] = await tab.js(f"(async () => JSON.stringify((await {STORED})[0]))()")
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        await tab.call("Runtime.evaluate", expression="window.confirm = () => true")
        await press_button(tab, "Delete", at=0)
        await tab.until("document.querySelectorAll('article').length === 0")
        found = await tab.call("Runtime.evaluate", expression="document.getElementById('files')")
        chosen = [str(tmp_path / name) for name in files]
        await tab.call("DOM.setFileInputFiles", files=chosen, objectId=found["result"]["objectId"])
        await tab.until(f"{SHOWN}.join() === 'Count,one'")
        assert await tab.js("document.querySelector('.version').innerText") == "2 of 2"
        assert await tab.js("document.querySelectorAll('#kept-chats li').length") == 1
        refused = await field(tab, "refused", "innerText")
        for name in files:
            assert (name in refused) == (name != "chat.json")
        assert "words.json was not imported: it is not valid JSON" in refused
        assert "cycle.json was not imported: message 0 of it is damaged" in refused
        await ask(tab, "More")
        await tab.until(answers(2))
        assert not tab.problems


@browser
async def test_it_follows_and_a_selection_stays(serve: Serve, tmp_path: Path) -> None:
    text = "\n\n".join(f"Paragraph {n} of a long answer." for n in range(60))
    ingress = ScriptedIngress(text, TEMPLATE, cut=20)
    ingress.pace = 0.02
    site = await serve(ingress)
    talk = "document.getElementById('talk')"
    rest = f"(({{scrollHeight, scrollTop, clientHeight}}) => scrollHeight - scrollTop - clientHeight)({talk})"
    blocks = "document.querySelectorAll('.block').length"
    async with chromium.browsing(tmp_path, site.url) as tab:
        await tab.size(800, 500)
        await tab.until(UP)
        await ask(tab, "Tell me")
        await tab.until(f"{blocks} > 25")
        assert await tab.js("document.querySelector('article.assistant').offsetHeight") > 500
        await tab.until(f"{rest} < 3")
        await tab.js(
            "getSelection().selectAllChildren(document.querySelectorAll('.block')[1]);"
            + f"{talk}.scrollTop = 50"
        )
        seen = await tab.js(blocks)
        await tab.until(f"{blocks} > {seen + 5}")
        assert await tab.js("getSelection().toString().trim()") == "Paragraph 1 of a long answer."
        assert await tab.js(f"{talk}.scrollTop") == 50
        await tab.js("document.getElementById('jump').click()")
        await tab.until(answers(1))
        await tab.until(f"{rest} < 3")
        assert await field(tab, "jump", "hidden")
        assert await tab.js("document.querySelectorAll('#said p').length") == 60
        await ask(tab, "Tell me more")  # below an answer that is taller than the window already
        await tab.until(f"{blocks} > 70")
        assert await tab.js(rest) < 60
        await tab.until(f"{rest} < 3")
        assert not tab.problems


HOSTILE = r"""
<script>window.hit = 1</script><img src=x onerror="window.hit = 1"><svg/onload=window.hit=1>
<iframe srcdoc="<script>parent.hit=1</script>"></iframe><style>body { display: none }</style>

[a](javascript:window.hit=1) [b](JaVaScRiPt:window.hit=1) [c](data:text/html,<script>hit</script>) [d](https://e.example/)
![leak](https://e.example/secret.png) [e](https://e.example "x\" onmouseover=\"window.hit=1")

```js"><img src=x onerror=window.hit=1>
</code><script>window.hit = 1</script>
```

$\href{javascript:window.hit=1}{x}$ $\htmlStyle{color:red}{y}$ $\includegraphics{https://e.example/i.png}$ $x^2$ $\undefined$

<form action=https://e.example><input name=messages><button>Send</button></form> <math><mi//xlink:href="data:x,hit">
<div id="send" name="body" class="hidden" style="position:fixed">clobber</div>

| <img src=x onerror=window.hit=1> | b |
|--:|---|
| 1 | <br> |
"""  # noqa: E501


@browser
async def test_nothing_that_a_model_writes_becomes_script(serve: Serve, tmp_path: Path) -> None:
    site = await serve(ScriptedIngress(HOSTILE, TEMPLATE))
    inside = "document.querySelector('article.assistant .text')"
    async with chromium.browsing(tmp_path, site.url) as tab:
        await tab.until(UP)
        await ask(tab, "Attack")
        await tab.until(answers(1))
        await asyncio.sleep(0.1)
        assert await tab.js("window.hit") is None
        wrong = "script, img, iframe, style, form, input, [id], [name], [onerror], [onload], [onmouseover], [srcdoc]"  # noqa: E501
        assert await tab.js(f"{inside}.querySelectorAll({wrong!r}).length") == 0
        links = await tab.js(
            f"[...{inside}.querySelectorAll('a[href]')].map((link) => link.getAttribute('href'))"
        )
        assert set(links) == {"https://e.example/", "https://e.example/secret.png", "https://e.example"}
        assert await tab.js(f"{inside}.querySelectorAll('.katex').length") >= 1
        assert await tab.js(f"{inside}.querySelector('td').align") == "right"
        assert "<script>window.hit = 1</script>" in await tab.js(f"{inside}.innerText")
        assert not tab.problems


@browser
async def test_copy_where_there_is_no_https(serve: Serve, tmp_path: Path) -> None:
    site = await serve(ScriptedIngress("```python\nprint(1)\n```\n\nDone.", TEMPLATE))
    async with chromium.browsing(tmp_path, f"http://page.test:{site.port}") as tab:
        await tab.until(UP)
        assert await tab.js("navigator.clipboard === undefined")
        await ask(tab, "Code")
        await tab.until(answers(1))
        for button, text in ((".copy", "print(1)"), ("[aria-label='Copy the message']", "Code")):
            await tab.click(button)
            await tab.until(f"document.querySelector({button!r}).innerText === 'Copied'")
            await tab.js(
                "document.getElementById('prompt').value = ''; document.getElementById('prompt').focus()"
            )
            await tab.call("Input.dispatchKeyEvent", type="keyDown", commands=["paste"])
            await tab.until("document.getElementById('prompt').value !== ''")
            assert (await field(tab, "prompt", "value")).strip() == text
        assert not tab.problems


@browser
async def test_the_live_panel_and_the_banner(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    site = await serve(log_requests=True)
    async with chromium.browsing(tmp_path, site.url) as tab:
        await tab.until("document.getElementById('kv').innerText === '16 · 40 · 256'")
        assert await tab.js("document.getElementById('held').style.width") == "6.25%"
        for theme, color in (("dark", "rgb(20, 22, 27)"), ("light", "rgb(246, 247, 249)")):
            chosen = f"Object.assign(document.getElementById('theme'), {{value: {theme!r}}})"
            await tab.js(f"{chosen}.dispatchEvent(new Event('change'))")
            assert await tab.js("getComputedStyle(document.body).backgroundColor") == color
        assert await field(tab, "banner", "hidden")
        await tab.offline(True)
        await tab.until("document.getElementById('banner').innerText.includes('does not answer')")
        await ask(tab, "Anyone?")
        await tab.until("document.querySelector('.error')?.innerText.includes('The server does not answer.')")
        await tab.offline(False)
        await tab.until(f"{UP} && document.getElementById('banner').hidden")
        site.ingress.phase = "load"
        await tab.until("document.getElementById('banner').innerText.includes('not loaded yet')")
        await press_button(tab, "Retry")
        await tab.until("document.querySelector('.error')?.innerText.includes('the model is not loaded yet')")
        site.ingress.phase = "ready"
        await tab.until("document.getElementById('banner').hidden")
        assert not tab.problems
    logged = {record.fields["route"] for record in caplog.records if hasattr(record, "fields")}
    assert logged == {"/", "/v1/models", "/get_model_info", "/v1/chat/completions"}  # and no polling


@browser
async def test_key_reasoning_and_tools(serve: Serve, tmp_path: Path) -> None:
    script = f"<think>Hm, Oslo.</think>Let me look.{CALL}"
    ingress = ScriptedIngress(script, TEMPLATE)
    site = await serve(ingress, api_key=["secret"])
    async with chromium.browsing(tmp_path, site.url) as tab:
        await tab.until("document.getElementById('locked').open")
        assert "API key" in await tab.js("document.getElementById('wanted').innerText")
        await tab.type("secret")
        await tab.enter()
        await tab.until("document.getElementById('state').className === 'up'")
        await tab.set("tools", json.dumps(TOOLS))
        await ask(tab, "Weather in Oslo?")
        await tab.until(answers(1))
        assert await tab.js("document.querySelector('.thought div').innerText") == "Hm, Oslo."
        assert (
            await tab.js("document.querySelector('article.assistant .text').innerText.trim()")
            == "Let me look."
        )
        call = "document.querySelector('.call')"
        assert await tab.js(f"{call}.querySelector('b').innerText") == "weather"
        assert json.loads(await tab.js(f"{call}.querySelector('pre').innerText")) == {"city": "Oslo"}
        ingress.script = "It is cold."
        await tab.js(f"{call}.querySelector('textarea').focus()")
        await tab.type("3 degrees")
        await press_button(tab, "Send results")
        await tab.until(answers(2))
        told: Any = ingress.jobs[-1].messages
        assert [m["role"] for m in told] == ["user", "assistant", "tool"]
        assert (told[2]["content"], told[2]["tool_call_id"]) == ("3 degrees", told[1]["tool_calls"][0]["id"])
        assert not tab.problems


VIDEO = base64.b64encode(clip(frames=4)).decode()


@browser
async def test_pictures_are_dropped_pasted_and_sent(serve: Serve, tmp_path: Path) -> None:
    site = await serve(seeing())
    data = (
        "(() => { const data = new DataTransfer(); data.items.add(new File([Uint8Array.from("
        f"atob('{BASE64[0]}'), (one) => one.charCodeAt(0))], 'red.png', {{ type: 'image/png' }})); "
        "return data; })()"
    )
    drop = f"document.dispatchEvent(new DragEvent('drop', {{ dataTransfer: {data}, cancelable: true }}))"
    paste = (
        "document.getElementById('prompt').dispatchEvent("
        f"new ClipboardEvent('paste', {{ clipboardData: {data} }}))"
    )
    waiting = "document.querySelectorAll('#pictures img').length"
    async with chromium.browsing(tmp_path, site.url) as tab:
        await tab.until(f"{UP} && !document.getElementById('attach').hidden")
        await tab.js(drop)
        await tab.until(f"{waiting} === 1")
        await tab.js(paste)
        await tab.until(f"{waiting} === 2")
        await tab.js("document.querySelector('#pictures button').click()")
        await ask(tab, "What is it?")
        await tab.until(answers(1))
        (job,) = site.ingress.jobs
        assert job.messages == [
            {"role": "user", "content": [PARTS[1], {"type": "text", "text": "What is it?"}]}
        ]
        assert job.pictures == PICTURES[:1]
        assert await tab.js(
            f"{waiting} === 0 && document.querySelector('article.user img').naturalWidth === 3"
        )
        await ask(tab, "And now?")
        await tab.until(answers(2))
        assert site.ingress.jobs[-1].pictures == PICTURES[:1]
        film = drop.replace(BASE64[0], VIDEO).replace("red.png", "a.mp4").replace("image/png", "video/mp4")
        await tab.js(film)
        await tab.until("document.getElementById('pictures').innerText === 'This model takes no videos.'")
        site.ingress.facts.media["video"] = "<video>"
        await tab.js("document.getElementById('model').dispatchEvent(new Event('change'))")
        await tab.until("document.getElementById('picture-files').accept === 'image/*,video/*'")
        await tab.js(film)
        await tab.until("document.querySelectorAll('#pictures video').length === 1")
        await ask(tab, "What happens?")
        await tab.until(answers(3))
        assert {"type": "video"} in site.ingress.jobs[-1].messages[-1]["content"]
        assert [type(each).__name__ for each in site.ingress.jobs[-1].pictures] == ["Picture", "Video"]
        assert await tab.js("document.querySelectorAll('article.user video').length === 1")
        site.ingress.facts.media.clear()
        await tab.js("document.getElementById('model').dispatchEvent(new Event('change'))")
        await tab.until("document.getElementById('attach').hidden")
        await tab.js(drop)
        await tab.until("document.getElementById('pictures').innerText === 'This model takes no pictures.'")
        assert not tab.problems
