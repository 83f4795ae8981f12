"""What a request says of MCP servers: which of the operator's it means, which of their tools the model may
call, and which calls the client approves first."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from sgla.errors import InvalidField, UnsupportedField
from sgla.http.mcp.protocol import TOOL, Failure, Tool
from sgla.http.mcp.servers import ToolError, ToolServer, ToolServers
from sgla.http.request.chat import check_tool_name
from sgla.http.request.schema import MAX_TOOLS, check_count
from sgla.http.responses.input import Item, ResponsesRequest, text_of, wanted

MAX_CALLS = 64  # of one response

# Keys of a tool of type mcp that cannot be honoured, and why.
REFUSED = {
    "connector_id": "this server has no connectors",
    "tunnel_id": "this server has no tunnels",
    "headers": "the operator of this server sets what MCP servers are sent",
    "authorization": "the operator of this server sets what MCP servers are sent",
    "defer_loading": "all tools are shown to the model",
}


class Offer(msgspec.Struct):
    """The tools of one MCP server, under the label that the client gives it. ``about``: what it is for, told
    with the first tool. ``approve``: names of the tools whose calls the client approves. ``error``: why tools
    are missing."""

    label: str
    server: ToolServer
    about: str = ""
    tools: list[Tool] = []
    approve: frozenset[str] = frozenset()
    error: str = ""

    def functions(self) -> list[Item]:
        return [
            {
                "type": "function",
                "name": tool.name,
                "namespace": self.label,
                "description": "\n\n".join(filter(None, (self.about if i == 0 else "", tool.description))),
                "parameters": tool.schema,
                "server": "approve" if tool.name in self.approve else "call",
            }
            for i, tool in enumerate(self.tools)
        ]

    def item(self) -> Item:
        """What the client is told of them."""
        tools = [
            {
                "name": tool.name,
                "description": tool.description,
                "input_schema": tool.schema,
                "annotations": tool.annotations,
            }
            for tool in self.tools
        ]
        return {
            "type": "mcp_list_tools",
            "server_label": self.label,
            "tools": tools,
            "error": self.error or None,
        }


async def offers(fields: ResponsesRequest, servers: ToolServers) -> dict[str, Offer]:
    """What the request's tools of type mcp bring, by their labels. A server that cannot be reached is no
    error of the request. Raises InvalidField and UnsupportedField."""
    asked: dict[str, tuple[Item, Offer]] = {}
    for i, tool in enumerate(fields.tools or []):
        if tool.get("type") == "mcp" and servers:
            offer = offered(tool, f"tools[{i}]", servers)
            if offer.label in asked:
                raise InvalidField(
                    f"tools[{i}]: another MCP server is labeled {offer.label!r}, too", param="tools"
                )
            asked[offer.label] = (tool, offer)
    found: list[Tool] = []
    for tool, offer in asked.values():
        await asyncio.sleep(0)  # a list that is known takes no waiting
        try:
            listed = await offer.server.tools()
        except ToolError as error:
            offer.error = f"MCP server {offer.label}: {error}"
            continue
        offer.error = listed.wrong
        allowed = chosen(tool.get("allowed_tools"))
        offer.tools = [each for each in listed.tools if allowed.fits(each)]
        offer.approve = to_approve(offer.tools, tool.get("require_approval"))
        found += offer.tools
        check_count("tools", found, MAX_TOOLS)
    return {label: offer for label, (_, offer) in asked.items()}


def offered(tool: Item, path: str, servers: ToolServers) -> Offer:
    """Without its tools yet. Raises InvalidField and UnsupportedField."""
    label = wanted(tool, "server_label", path)
    check_tool_name(f"{path}.server_label", label)
    for name, why in REFUSED.items():
        if tool.get(name):
            raise UnsupportedField(f"{path}.{name}: {why}; leave it out", param="tools")
    url = tool.get("server_url")
    server = servers.find(label, url if isinstance(url, str) else None)
    if server is None:
        named = f"server_url {url[:200]!r}" if isinstance(url, str) else f"server_label {label[:200]!r}"
        raise InvalidField(
            f"{path}: {named} is none of this server's MCP servers, which are {', '.join(servers.labels)}; "
            "its operator names them by --tool-server",
            param="tools",
        )
    check_filters(tool, path)
    about = tool.get("server_description")
    return Offer(label, server, about if isinstance(about, str) else "")


def check_filters(tool: Item, path: str) -> None:
    allowed, approval = tool.get("allowed_tools"), tool.get("require_approval")
    check_names(allowed, f"{path}.allowed_tools")
    if isinstance(approval, dict):
        for name in ("always", "never"):
            check_names(approval.get(name), f"{path}.require_approval.{name}")
    if not (allowed is None or is_filter(allowed) or is_filter({"tool_names": allowed})):
        raise InvalidField(
            f"{path}.allowed_tools must be a list of names or {{tool_names, read_only}}", param="tools"
        )
    if approval in (None, "always", "never"):
        return
    if not (
        isinstance(approval, dict)
        and approval.keys() <= {"always", "never"}
        and all(is_filter(each) for each in approval.values())
    ):
        raise InvalidField(
            f"{path}.require_approval must be always, never, or {{always, never}} with "
            f"{{tool_names, read_only}}",
            param="tools",
        )


def check_names(value: Any, path: str) -> None:
    names = value.get("tool_names") if isinstance(value, dict) else value
    if isinstance(names, list) and len(names) > MAX_TOOLS:
        raise InvalidField(f"{path} has {len(names)} names; {MAX_TOOLS} is the limit", param="tools")


def is_filter(value: Any) -> bool:
    if not isinstance(value, dict) or not value.keys() <= {"tool_names", "read_only"}:
        return False
    names, read_only = value.get("tool_names"), value.get("read_only")
    return (
        names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names))
    ) and read_only in (None, True, False)


class Filter(NamedTuple):
    """Tools with these names (None: any), and of them those that only read, if ``read_only``."""

    names: frozenset[str] | None = None
    read_only: bool = False

    def fits(self, tool: Tool) -> bool:
        return (self.names is None or tool.name in self.names) and (not self.read_only or tool.read_only)


NOTHING = Filter(frozenset())


def chosen(value: Any) -> Filter:
    """What a checked filter of a request says: None, a list of names, or ``{tool_names, read_only}``."""
    fields = value if isinstance(value, dict) else {"tool_names": value}
    names = fields.get("tool_names")
    return Filter(None if names is None else frozenset(names), bool(fields.get("read_only")))


def to_approve(tools: Iterable[Tool], required: Any) -> frozenset[str]:
    """The names of those whose calls the client approves:
    as OpenAI has it, of all, unless the request says otherwise."""
    filters = {name: chosen(value) for name, value in required.items()} if isinstance(required, dict) else {}
    always = NOTHING if required == "never" else filters.get("always", Filter())
    never = filters.get("never", NOTHING)
    return frozenset(tool.name for tool in tools if always.fits(tool) and not never.fits(tool))


# calls


def approved(items: Iterable[Item], offers: Mapping[str, Offer]) -> list[Item]:
    """The calls that the conversation approves and that have not been made. Raises InvalidField."""
    asked: dict[str, Item] = {}
    found: dict[str, Item] = {}
    for i, item in enumerate(items):
        kind = item.get("type")
        if kind == "mcp_approval_request":
            asked[text_of(item, "id")] = item
        elif kind == "mcp_call":
            found.pop(text_of(item, "approval_request_id"), None)
        elif kind == "mcp_approval_response":
            name = wanted(item, "approval_request_id", f"input[{i}]")
            if name not in asked:
                raise InvalidField(
                    f"input[{i}].approval_request_id: the conversation has no request {name[:200]!r}",
                    param="input",
                )
            if item.get("approve") is True:
                found[name] = asked[name]
    if len(found) > MAX_CALLS:
        raise InvalidField(
            f"input approves {len(found)} calls; {MAX_CALLS} is the limit of one response", param="input"
        )
    names = {label: {tool.name for tool in offer.tools} for label, offer in offers.items()}
    for item in found.values():
        label, name = text_of(item, "server_label"), text_of(item, "name")
        if label not in offers or (not offers[label].error and name not in names[label]):
            raise InvalidField(
                f"tools must have the MCP server {label[:64]!r} with the tool "
                f"{name[:128]!r}, whose call was approved",
                param="tools",
            )
    return list(found.values())


def untold(offers: Mapping[str, Offer], items: Iterable[Item]) -> list[Offer]:
    """Those whose tools no item of the conversation lists yet."""
    told = {
        text_of(item, "server_label")
        for item in items
        if item.get("type") == "mcp_list_tools" and item.get("tools")
    }
    return [offer for offer in offers.values() if offer.label not in told]


def error_object(failure: Failure) -> dict[str, Any]:
    """A failed call as OpenAI tells of it."""
    if failure.kind == TOOL:
        return {"type": TOOL, "content": [{"type": "text", "text": failure.message}]}
    return {"type": failure.kind, "code": failure.code, "message": failure.message}
