"""The page at / on a narrow screen, by keyboard and for screen readers, in a headless browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chromium
import pytest
from http_fake import ScriptedIngress
from http_site import Serve
from test_page import CALL, TEMPLATE, TOOLS, UP, answers, ask, press_button

pytestmark = pytest.mark.skipif(chromium.PROGRAM is None, reason="no Chromium")

ADDRESS = "https://e.example/" + "long" * 40
ANSWER = f"""# Top

`code` and {ADDRESS}

## Below

| city | people | {"a long column " * 5}| {"x" * 60} |
|---|--:|---|---|
| Oslo | 700,000 | {"some text " * 6}| more |

```python
x = 1  # {"a long line " * 10}
```

$$x = {" + ".join(f"x_{{{n}}}" for n in range(60))}$$

{CALL}"""
CONTROLS = ":is(button, input:not([type=file]), select, textarea, a[href], summary, [tabindex='0'])"
# Controls in ``place`` that are shown, and of these the ones that cannot be pressed where they are after they
# were scrolled to.
LOST = """((place) => {
  const shown = [...document.querySelectorAll(place)].filter((each) => each.checkVisibility({ opacityProperty: true }));
  return [shown.length, shown.filter((each) => {
    each.scrollIntoView({ block: "center", inline: "nearest" });
    const box = each.getClientRects()[0], at = document.elementFromPoint(box.x + box.width / 2, box.y + Math.min(box.height, 40) / 2);
    return box.left < 0 || box.right > innerWidth + .5 || box.height < 12 || !each.contains(at);
  }).map((each) => each.outerHTML.slice(0, 99))];
})"""  # noqa: E501
# What scrolls sideways, and texts with too little contrast.
WIDE = """[...document.querySelectorAll("html, body, header, #talk, #chats, #panel, .pairs, #ask")].filter((each) => each.checkVisibility())
  .filter((each) => each.scrollWidth > Math.max(each.clientWidth, each.offsetWidth)).map((each) => `${each.tagName} ${each.id}`)"""  # noqa: E501
PALE = """(() => {
  const parts = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255).map((v) => (v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = (each) => { for (; each; each = each.parentElement) { const back = parts(getComputedStyle(each).backgroundColor); if (back[3] !== 0) return back; } };
  const pale = (each, color) => {
    const [a, b] = [light(parts(color)), light(behind(each))].sort((x, y) => y - x), ratio = (a + .05) / (b + .05);
    return ratio < 4.5 ? [`${ratio.toFixed(2)} ${each.outerHTML.slice(0, 80)}`] : [];
  };
  return [...document.querySelectorAll("body *")].filter((each) => each.checkVisibility({ opacityProperty: true }) && !each.matches(":disabled, option")).flatMap((each) => [
    ...([...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim()) ? pale(each, getComputedStyle(each).color) : []),
    ...(each.placeholder ? pale(each, getComputedStyle(each, "::placeholder").color) : []),
  ]);
})()"""  # noqa: E501
NAMED = {"button", "checkbox", "combobox", "dialog", "DisclosureTriangle", "link", "log", "region", "form"}
NAMED |= {"complementary", "image", "navigation", "spinbutton", "status", "textbox"}


async def talked(tab: chromium.Tab) -> None:
    """Leave a conversation of all that an answer may have, in two versions."""
    await tab.until(UP)
    await tab.set("tools", json.dumps(TOOLS))
    await ask(tab, "Weather? " + "long" * 40)
    await tab.until(answers(1))
    await press_button(tab, "Retry")
    await tab.until("document.querySelector('.version')?.innerText === '2 of 2'")
    await tab.until("!document.querySelector('.act:disabled')")  # the answer is whole, and focus stays
    await tab.js("document.querySelectorAll('details').forEach((each) => { each.open = true; })")


def page() -> ScriptedIngress:
    return ScriptedIngress(f"<think>Hm.</think>{ANSWER}", TEMPLATE)


async def tree(tab: chromium.Tab) -> list[tuple[str, str, dict[str, Any]]]:
    """Role, name and properties of what a screen reader finds, in its order."""
    nodes = {node["nodeId"]: node for node in (await tab.call("Accessibility.getFullAXTree"))["nodes"]}

    def under(node: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
        if not node.get("ignored"):
            said = {each["name"]: each["value"].get("value") for each in node.get("properties", [])}
            yield node["role"]["value"], node.get("name", {}).get("value", "").strip(), said
        for child in node.get("childIds", []):
            if child in nodes:
                yield from under(nodes[child])

    return list(under(next(node for node in nodes.values() if "parentId" not in node)))


async def open_drawer(tab: chromium.Tab, name: str) -> None:
    await tab.js(f"document.querySelector('.drawer[aria-controls={name}]').click()")


async def test_on_a_narrow_screen_all_can_be_read_and_reached(serve: Serve, tmp_path: Path) -> None:
    site = await serve(page())
    async with chromium.browsing(tmp_path, site.url) as tab:
        await tab.size(400, 800)
        await talked(tab)
        for dark in (False, True):
            await tab.dark(dark)
            for drawer in ("", "chats", "panel"):
                if drawer:
                    await open_drawer(tab, drawer)
                places = [f"#{drawer} {CONTROLS}"] if drawer else [f"header {CONTROLS}", f"main {CONTROLS}"]
                count, lost = await tab.js(f"{LOST}({', '.join(places)!r})")
                assert count >= {"": 20, "chats": 3, "panel": 25}[drawer]
                found = {"lost": lost, "wide": await tab.js(WIDE), "pale": await tab.js(PALE)}
                assert found == {"lost": [], "wide": [], "pale": []}, (dark, drawer)
            await tab.press("Escape", 27)
        await tab.js("document.getElementById('key').click()")
        assert await tab.js("document.getElementById('locked').getBoundingClientRect().width") <= 400
        assert not tab.problems


@pytest.mark.parametrize("width", [400, 1280])
async def test_a_screen_reader_finds_names_and_an_order(serve: Serve, tmp_path: Path, width: int) -> None:
    site = await serve(page())
    async with chromium.browsing(tmp_path, site.url) as tab:
        await tab.size(width, 800)
        await talked(tab)
        assert await tab.js("document.scrollingElement.scrollHeight") == 800  # the header stays
        for drawer in ("chats", "panel"):
            await open_drawer(tab, drawer)
            found = await tree(tab)
            assert [each for each in found if each[0] in NAMED and not each[1]] == []
            assert [each for each in found if each[0] == "generic" and each[2].get("focusable")] == []
            assert [said["live"] for role, name, said in found if (role, name) == ("log", "Answer")] == [
                "polite"
            ]
            levels = [said["level"] for role, _, said in found if role == "heading"]
            assert levels == [1, 2, 2, 3, 4]  # the page's, of two messages, and those of the answer
        of_settings = found[[name for _, name, _ in found].index("Settings and load") :]
        names = [name for role, name, _ in of_settings if role == "button"]
        assert len(names) == 6
        assert len(set(names)) == len(names)


async def test_the_keyboard_goes_where_the_eye_does(serve: Serve, tmp_path: Path) -> None:
    site = await serve(page())
    here = "document.activeElement.closest('header, nav, main, aside')?.tagName ?? 'BODY'"
    async with chromium.browsing(tmp_path, site.url) as tab:
        await tab.size(1280, 800)
        await talked(tab)
        await tab.js("document.getElementById('model').focus()")
        seen = ["HEADER"]
        while seen[-1] != "BODY" and len(seen) < 7:
            await tab.press("Tab", 9)
            place = await tab.js(here)
            if place != seen[-1]:
                seen.append(place)
        assert seen == ["HEADER", "NAV", "MAIN", "ASIDE", "BODY"]
        await tab.size(400, 800)
        for name, tag in (("chats", "NAV"), ("panel", "ASIDE")):
            button = f"document.querySelector('.drawer[aria-controls={name}]')"
            await tab.js(f"{button}.focus()")
            await tab.enter()
            await tab.press("Tab", 9)
            assert await tab.js(here) == tag
            await tab.press("Escape", 27)
            assert await tab.js(f"document.activeElement === {button}")
            assert not await tab.js(f"document.getElementById('{name}').checkVisibility()")
        assert not tab.problems
