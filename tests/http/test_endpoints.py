"""The README's table of endpoints: it is what the routes are, and each of its rows answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from http_fake import FakeIngress
from http_site import Serve

from sgla.http.app import ROUTES
from sgla.http.endpoints import updated

README = Path(__file__).parents[2] / "README.md"
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
NO_VECTORS = "unsupported_task"  # the fake model makes text
# Path, or method and path -> a body (None: none), and what else than 200 is right: a code of an error.
EXAMPLES: dict[str, tuple[Any, str | None]] = {
    "/v1/chat/completions": (CHAT, None),
    "/v1/completions": ({"prompt": "x", "max_tokens": 2}, None),
    "/v1/chat/completions/render": (CHAT, None),
    "/v1/completions/render": ({"prompt": "x"}, None),
    "/v1/responses": ({"input": "x"}, None),
    "/v1/responses/input_tokens": ({"input": "x"}, None),
    "/v1/responses/compact": ({"input": "x"}, None),
    "/v1/responses/{id}": (None, "response_not_found"),
    "/v1/responses/{id}/cancel": (None, "response_not_found"),
    "/v1/responses/{id}/input_items": (None, "response_not_found"),
    "/v1/conversations/{id}": ({"metadata": {}}, "conversation_not_found"),
    "/v1/conversations/{id}/items": ({"items": []}, "conversation_not_found"),
    "/v1/conversations/{id}/items/{item}": (None, "conversation_not_found"),
    "/v1/messages": (CHAT, None),
    "/v1/messages/count_tokens": (CHAT, None),
    "/v1/models/{id}": (None, "model_not_found"),
    "/generate": ({"text": "x"}, None),
    "/api/chat": ({**CHAT, "model": "fake"}, None),
    "/api/generate": ({"model": "fake", "prompt": "x"}, None),
    "/api/show": ({"model": "fake"}, None),
    "/api/embed": ({"model": "fake", "input": "x"}, None),
    "/api/embeddings": ({"model": "fake", "prompt": "x"}, None),
    "/open_session": ({"capacity_of_str_len": 9}, None),
    "/close_session": ({"session_id": "x"}, "session_not_found"),
    "/tokenize": ({"prompt": "x"}, None),
    "/v1/tokenize": (CHAT, None),
    "/apply-template": (CHAT, None),
    "/detokenize": ({"tokens": [65]}, None),
    "/v1/detokenize": ({"tokens": [65]}, None),
    "/parse_function_call": ({"text": "x", "tool_call_parser": "hermes"}, None),
    "/separate_reasoning": ({"text": "x", "reasoning_parser": "qwen3"}, None),
    "/abort_request": ({"abort_all": True}, None),
    "/update_weights_from_disk": ({"model_path": "x"}, None),
    "/update_weights_from_tensor": ({"serialized_named_tensors": ["eA=="]}, None),
    "/update_weights_from_ipc": ({"zmq_handles": {"GPU-1": "ipc://x"}}, None),
    "/collective_rpc": ({"method": "update_weights_from_ipc", "args": [{"GPU-1": "ipc://x"}]}, None),
    "/init_weight_transfer_engine": ({"init_info": {}}, None),
    "/update_weights": (
        {"update_info": {"names": ["x"], "dtype_names": ["y"], "shapes": [[1]], "ipc_handles_pickled": ""}},
        None,
    ),
    "/init_weights_update_group": (
        {"master_address": "x", "master_port": 1, "rank_offset": 1, "world_size": 2},
        None,
    ),
    "/update_weights_from_distributed": (
        {"names": ["x"], "dtypes": ["bfloat16"], "shapes": [[2, 3]]},
        None,
    ),
    "/destroy_weights_update_group": ({}, None),
    "/get_weights_by_name": ({"name": "x"}, None),
    "/update_weight_version": ({"new_version": "x"}, None),
    "/post_process_weights": ({"restore_weights_before_load": True}, None),
    "/weights_checker": ({"action": "snapshot"}, None),
    **dict.fromkeys(
        ("/load_lora_adapter", "/v1/load_lora_adapter"),
        ({"lora_name": "x", "lora_path": "y"}, "unsupported_parameter"),
    ),
    **dict.fromkeys(
        ("/unload_lora_adapter", "/v1/unload_lora_adapter"), ({"lora_name": "x"}, "unsupported_parameter")
    ),
    "POST /v1/files": (None, "bad_request"),
    "/v1/files/{id}": (None, "file_not_found"),
    "/v1/files/{id}/content": (None, "file_not_found"),
    "POST /v1/batches": (
        {"input_file_id": "x", "endpoint": "/v1/completions", "completion_window": "24h"},
        "file_not_found",
    ),
    "/v1/batches/{id}": (None, "batch_not_found"),
    "/v1/batches/{id}/cancel": (None, "batch_not_found"),
    "/v1/embeddings": ({"input": "x"}, NO_VECTORS),
    "/encode": ({"text": "x"}, NO_VECTORS),
    "/v1/rerank": ({"query": "x", "documents": ["y"]}, NO_VECTORS),
    "/v2/rerank": ({"query": "x", "documents": ["y"]}, NO_VECTORS),
    "/rerank": ({"query": "x", "documents": ["y"]}, NO_VECTORS),
    "/v1/score": ({"text_1": "x", "text_2": "y"}, NO_VECTORS),
    "/score": ({"text_1": "x", "text_2": "y"}, NO_VECTORS),
    "/v1/classify": ({"input": "x"}, NO_VECTORS),
    "/classify": ({"input": "x"}, NO_VECTORS),
    "/v2/embed": ({"texts": ["x"]}, NO_VECTORS),
    "/pooling": ({"input": "x"}, NO_VECTORS),
    "/generative_scoring": ({"query": "x", "items": ["y"], "label_token_ids": []}, "invalid_value"),
    "/v1/realtime": (None, "bad_request"),  # without a WebSocket
    "/invocations": (CHAT, None),
    "/page/{id}": (None, "not_found"),
    "/weights/{id}": (None, "not_found"),
    "/v1/moderations": ({"input": "x"}, NO_VECTORS),
    "/v1/audio/transcriptions": (None, "unsupported_task"),
    "/v1/audio/translations": (None, "unsupported_task"),
}


def test_the_table_is_up_to_date() -> None:
    text = README.read_text()
    assert updated(text, ROUTES) == text, "run: python -m sgla.http.endpoints README.md"


@pytest.mark.parametrize("path", sorted(ROUTES))
async def test_every_endpoint_answers(serve: Serve, path: str) -> None:
    site = await serve(FakeIngress(), admin_api_key=["boss"])
    keyed = {"Authorization": "Bearer boss"}
    for method in ROUTES[path]:
        body, code = EXAMPLES.get(f"{method} {path}") or EXAMPLES.get(path, (None, None))
        url = path.replace("{id}", "x")
        async with site.http.request(method, url, json=body, headers=keyed) as response:
            content = await response.read()
        if path.startswith("/api/embed"):  # Ollama's errors have no code
            assert "needs an embedding model" in json.loads(content)["error"]
        elif code is None:
            assert response.status == 200, content
            assert content
        else:
            assert json.loads(content)["error"]["code"] == code
    site.ingress.check()
