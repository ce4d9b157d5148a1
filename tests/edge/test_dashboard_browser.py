"""The dashboard as an operator meets it: in a real browser, with the key, the event stream and hostile text. Needs a Chromium."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import httpx
import pytest
import trio

from narwhal_trio import open_router
from narwhal_trio.config import parse_config
from narwhal_trio.engine_sim import EngineConfig, TimeModel
from narwhal_trio.engine_sim.run import run_engine
from tests.edge.browser import BROWSER, Page, browser_page

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed"),
    pytest.mark.xdist_group("browser"),
]

EVIL = '<img src=x onerror="window.broken=1"><script>window.broken=1</script>'
KEY = "open+/=sesame?>"


@asynccontextmanager
async def served(*, key: str = "") -> AsyncIterator[str]:
    """A router with a simulated engine of each role, on sockets; its URL."""
    async with trio.open_nursery() as nursery:
        engines = []
        for name, role in (("p0", "prefill"), ("d0", "decode")):
            config = EngineConfig(name=name, model=EVIL, role=role, time=TimeModel())  # type: ignore[arg-type]
            _, url = await nursery.start(run_engine, "127.0.0.1:0", config)
            engines.append({"iid": name, "url": url, "role": role})
        document = {
            "model": EVIL,
            "engines": engines,
            "slo": {"ttft_s": 2.0, "tpot_s": 0.1},
            "serving": {"admission": "open"},
            "auth": {"admin_key_env": "KEY" if key else ""},
            "journal": {"path": ""},
        }
        async with (
            open_router(parse_config(document, environ={"KEY": key}), environ={"KEY": key}) as router,
            trio.open_nursery() as serving,
        ):
            urls: list[str] = await serving.start(router.serve, ["127.0.0.1:0"])
            yield urls[0]
            serving.cancel_scope.cancel()
        nursery.cancel_scope.cancel()


async def ask(url: str, **fields: object) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        await client.post(f"{url}/v1/completions", json={"prompt": EVIL, "max_tokens": 8, "ignore_eos": True, **fields})


def text_of(selector: str) -> str:
    return f"document.querySelector({selector!r}).innerText"


async def check_unhurt(page: Page) -> None:
    assert page.problems == []
    assert await page.evaluate("window.broken") is None
    assert await page.evaluate("document.querySelectorAll('img').length") == 0
    assert await page.evaluate("document.getElementById('model').textContent") == EVIL


async def test_the_page_shows_engines_running_requests_endings_and_placements() -> None:
    async with served() as url, browser_page() as page, trio.open_nursery() as nursery:
        await page.open(f"{url}/narwhal/dashboard")
        await page.until(f"{text_of('#engines')}.includes('p0')")
        await page.until(f"{text_of('#feed')} === 'live'")
        assert await page.evaluate(text_of("#status")) == "ready"
        await ask(url)
        await ask(url, max_tokens="seven")
        nursery.start_soon(lambda: ask(url, max_tokens=4000))
        await page.until(f"{text_of('#running')}.includes('stream') || {text_of('#running')}.includes('write')")
        ended = await page.until(f"{text_of('#recent')}.includes('invalid_request') && {text_of('#recent')}")
        assert "completed" in ended
        assert "p0 → d0" in ended
        assert await page.evaluate("document.querySelectorAll('#recent .line i.t5').length") == 1
        assert "request_ended" in await page.evaluate(text_of("#events"))
        await page.evaluate("[...document.querySelectorAll('#recent button')].at(-1).click()")
        placements = await page.until(f"{text_of('#placements')}.includes('chosen') && {text_of('#placements')}")
        assert "resident_decode_tokens 0" in placements
        await check_unhurt(page)
        nursery.cancel_scope.cancel()


async def test_with_a_key_the_page_asks_for_it_and_keeps_it_for_the_session() -> None:
    async with served(key=KEY) as url, browser_page() as page:
        await page.open(f"{url}/narwhal/dashboard")
        await page.until("!document.getElementById('login').hidden")
        enter = "document.getElementById('key').value = {!r}; document.querySelector('#login button').click()"
        for wrong in ("wrong", "sésame"):
            await page.evaluate("document.getElementById('denied').textContent = ''")
            await page.evaluate(enter.format(wrong))
            await page.until(f"{text_of('#denied')}.includes('not accepted')")
        await page.evaluate(enter.format(KEY))
        await page.until(f"{text_of('#engines')}.includes('d0')")
        await page.until(f"{text_of('#feed')} === 'live'")  # the event stream takes the key, too
        page.problems.clear()  # the browser notes each 403
        await page.call("Page.reload")
        await page.until("document.readyState === 'complete' && !!document.getElementById('engines')")
        await page.until(f"{text_of('#engines')}.includes('d0')")
        assert await page.evaluate("Object.keys(localStorage).length + document.cookie.length") == 0
        await check_unhurt(page)


async def test_a_router_that_goes_away_and_comes_back_is_told() -> None:
    async with browser_page() as page:
        async with served() as url:
            await page.open(f"{url}/narwhal/dashboard")
            await page.until(f"{text_of('#engines')}.includes('p0')")
        await page.until(f"{text_of('#status')} === 'no answer'")
        assert await page.evaluate(f"{text_of('#engines')}.includes('p0')")  # the last picture stays
