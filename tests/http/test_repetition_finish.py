"""What each API says of an answer that was ended because it repeated itself."""

from __future__ import annotations

import json
from typing import Any

from http_fake import FakeIngress
from http_site import Serve, Site

from sgla.defaults import GIVEN, Defaults
from sgla.messages import Event, Rejected, Repetition

MESSAGES = [{"role": "user", "content": "hi"}]
ASKED = {"max_pattern_size": 8, "min_count": 3}


class Looping(FakeIngress):
    """Every answer ends so."""

    def push(self, rid: str, message: Event | Rejected) -> None:
        if isinstance(message, Event) and message.finish is not None:
            message.finish = "repetition"
        super().push(rid, message)


async def test_each_api_has_its_word_for_it(serve: Serve) -> None:
    site = await serve(Looping())
    _, chat = await site.post("/v1/chat/completions", {"messages": MESSAGES, "repetition_detection": ASKED})
    choice = chat["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    assert site.ingress.jobs[-1].sampling.repetition_detection == Repetition(**ASKED)
    chunks = await site.sse("/v1/completions", {"prompt": "a", "stream": True})
    assert json.loads(chunks[-2])["choices"][0]["finish_reason"] == "repetition"
    _, native = await site.post("/generate", {"text": "a"})
    assert native["meta_info"]["finish_reason"]["type"] == "repetition"
    body = {"model": "", "messages": MESSAGES, "max_tokens": 99}
    _, message = await site.post("/v1/messages", body)
    assert message["stop_reason"] == "max_tokens"
    _, response = await site.post("/v1/responses", {"input": "hi"})
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    _, told = await site.post("/api/chat", {"model": "fake", "messages": MESSAGES, "stream": False})
    assert told["done_reason"] == "length"  # its clients know this and stop
    assert await realtime_details(site) == {"type": "incomplete", "reason": "max_output_tokens"}


async def realtime_details(site: Site) -> Any:
    async with site.http.ws_connect("/v1/realtime") as socket:
        await socket.send_json({"type": "response.create", "response": {"instructions": "hi"}})
        while (event := await socket.receive_json())["type"] != "response.done":
            pass
        return event["response"]["status_details"]


async def test_a_default_of_the_user_holds_for_every_request(serve: Serve) -> None:
    site = await serve(FakeIngress())
    values = {"repetition_detection": Repetition(**ASKED)}
    site.ingress.default_sampling = Defaults(values, dict.fromkeys(values, GIVEN))
    await site.post("/v1/completions", {"prompt": "a"})
    await site.post("/v1/completions", {"prompt": "a", "repetition_detection": {}})
    found = [job.sampling.repetition_detection for job in site.ingress.jobs]
    assert found == [Repetition(**ASKED), Repetition()]
    status, error = await site.post("/v1/completions", {"prompt": "a", "repetition_detection": {"size": 3}})
    assert (status, error["error"]["param"]) == (400, "repetition_detection")
