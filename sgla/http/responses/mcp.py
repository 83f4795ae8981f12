"""What a request says of MCP servers: which of the operator's it means, which of their tools the model may call, and which calls the client
approves first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from sgla.errors import InvalidField, UnsupportedField
from sgla.http.mcp.protocol import TOOL, Failure, Tool
from sgla.http.mcp.servers import ToolError, ToolServer, ToolServers
from sgla.http.responses.input import Item, ResponsesRequest, wanted

# Keys of a tool of type mcp that cannot be honoured, and why.
REFUSED = {
    "connector_id": "this server has no connectors",
    "tunnel_id": "this server has no tunnels",
    "headers": "the operator of this server sets what MCP servers are sent",
    "authorization": "the operator of this server sets what MCP servers are sent",
    "defer_loading": "all tools are shown to the model",
}


class Offer(msgspec.Struct):
    """The tools of one MCP server, under the label that the client gives it. ``about``: what it is for, told with the first tool.
    ``approve``: names of the tools whose calls the client approves. ``error``: why tools are missing."""

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
    """What the request's tools of type mcp bring, by their labels. A server that cannot be reached is no error of the request. Raises
    InvalidField and UnsupportedField."""
    asked: dict[str, tuple[Item, Offer]] = {}
    for i, tool in enumerate(fields.tools or []):
        if tool.get("type") == "mcp" and servers:
            offer = offered(tool, f"tools[{i}]", servers)
            if offer.label in asked:
                raise InvalidField(
                    f"tools[{i}]: another MCP server is labeled {offer.label!r}, too", param="tools"
                )
            asked[offer.label] = (tool, offer)
    for tool, offer in asked.values():
        try:
            listed = await offer.server.tools()
        except ToolError as error:
            offer.error = f"MCP server {offer.label}: {error}"
            continue
        offer.error = listed.wrong
        allowed = tool.get("allowed_tools")
        if isinstance(allowed, list):
            allowed = {"tool_names": allowed}
        offer.tools = [each for each in listed.tools if allowed is None or fits(each, allowed)]
        offer.approve = frozenset(
            each.name for each in offer.tools if needs_approval(each, tool.get("require_approval"))
        )
    return {label: offer for label, (_, offer) in asked.items()}


def offered(tool: Item, path: str, servers: ToolServers) -> Offer:
    """Without its tools yet. Raises InvalidField and UnsupportedField."""
    label = wanted(tool, "server_label", path, "tools")
    for name, why in REFUSED.items():
        if tool.get(name):
            raise UnsupportedField(f"{path}.{name}: {why}; leave it out", param="tools")
    url = tool.get("server_url")
    server = servers.find(label, url if isinstance(url, str) else None)
    if server is None:
        named = f"server_url {url[:200]!r}" if isinstance(url, str) else f"server_label {label[:200]!r}"
        raise InvalidField(
            f"{path}: {named} is none of this server's MCP servers, which are {', '.join(servers.labels)}; its operator names "
            "them by --tool-server",
            param="tools",
        )
    check_filters(tool, path)
    about = tool.get("server_description")
    return Offer(label, server, about if isinstance(about, str) else "")


def check_filters(tool: Item, path: str) -> None:
    allowed, approval = tool.get("allowed_tools"), tool.get("require_approval")
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
            f"{path}.require_approval must be always, never, or {{always, never}} with {{tool_names, read_only}}",
            param="tools",
        )


def is_filter(value: Any) -> bool:
    if not isinstance(value, dict) or not value.keys() <= {"tool_names", "read_only"}:
        return False
    names, read_only = value.get("tool_names"), value.get("read_only")
    return (
        names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names))
    ) and read_only in (None, True, False)


def fits(tool: Tool, wanted: Mapping[str, Any]) -> bool:
    names, read_only = wanted.get("tool_names"), wanted.get("read_only")
    return (names is None or tool.name in names) and (not read_only or tool.read_only)


def needs_approval(tool: Tool, required: Any) -> bool:
    """As OpenAI has it: every call, unless the request says otherwise."""
    if not isinstance(required, dict):
        return required != "never"
    if "never" in required and fits(tool, required["never"]):
        return False
    return "always" not in required or fits(tool, required["always"])


# calls ----------------------------------------------------------------------------------------------------------------


def approved(items: Iterable[Item], offers: Mapping[str, Offer]) -> list[Item]:
    """The calls that the conversation approves and that have not been made. Raises InvalidField."""
    asked: dict[str, Item] = {}
    found: dict[str, Item] = {}
    for i, item in enumerate(items):
        kind = item.get("type")
        if kind == "mcp_approval_request":
            asked[str(item.get("id"))] = item
        elif kind == "mcp_call":
            found.pop(str(item.get("approval_request_id")), None)
        elif kind == "mcp_approval_response":
            name = wanted(item, "approval_request_id", f"input[{i}]")
            if name not in asked:
                raise InvalidField(
                    f"input[{i}].approval_request_id: the conversation has no request {name[:200]!r}",
                    param="input",
                )
            if item.get("approve") is True:
                found[name] = asked[name]
    for item in found.values():
        offer = offers.get(str(item.get("server_label")))
        if offer is None or (not offer.error and item.get("name") not in {tool.name for tool in offer.tools}):
            raise InvalidField(
                f"tools must have the MCP server {str(item.get('server_label'))[:64]!r} with the tool "
                f"{str(item.get('name'))[:128]!r}, whose call was approved",
                param="tools",
            )
    return list(found.values())


def error_object(failure: Failure) -> dict[str, Any]:
    """A failed call as OpenAI tells of it."""
    if failure.kind == TOOL:
        return {"type": TOOL, "content": [{"type": "text", "text": failure.message}]}
    return {"type": failure.kind, "code": failure.code, "message": failure.message}
