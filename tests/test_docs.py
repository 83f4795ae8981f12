"""The pages of docs/: they make a site without broken links, and say what the code says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sgla import census, errors, messages
from sgla.actors import ingress, lanes
from sgla.actors import pictures as room
from sgla.cli.args import parse
from sgla.cli.several import values_of
from sgla.config import Config
from sgla.grammar import compiler, matcher, notations, sandbox, schema
from sgla.http import accepting, bodies, connections, forms
from sgla.http.app import ROUTES
from sgla.http.batches import asking, files, lines, store, upload
from sgla.http.conversations import routes as conversations
from sgla.http.mcp import process, protocol, servers
from sgla.http.media import fetch
from sgla.http.native import session_store, tokens
from sgla.http.openai import common, render
from sgla.http.openai import text as completions
from sgla.http.realtime import session
from sgla.http.request import sampling
from sgla.http.request import schema as request
from sgla.http.responses import agent, answer, compact, items, mcp
from sgla.http.state import database
from sgla.hub import gguf_header, source
from sgla.media import listen, pool, readers, sound
from sgla.model import limits
from sgla.model.registry import supported
from sgla.text import beams, prepare, regex, stops, tokenizer
from sgla.text import process as texts
from sgla.text import template as templates

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {path.name: path.read_text() for path in sorted(DOCS.glob("*.md"))}


def blocks(language: str) -> list[str]:
    return [
        block
        for text in PAGES.values()
        for block in re.findall(rf"^ *```{language}\n(.*?)^ *```", text, re.M | re.S)
    ]


def test_the_site_is_built_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",  # with --quiet no warning would count
        "-f",
        str(ROOT / "configs/mkdocs.yml"),
    ]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        [*command, "-d", str(tmp_path / "site")], capture_output=True, text=True, env=environment
    )
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "site/index.html").is_file()


NOTEBOOKS = {"experiments.md", "performance-cpu.md"}  # notes of measurements
MOST_WORDS, COLUMNS = 45, 110


@pytest.mark.parametrize("page", sorted(PAGES.keys() - NOTEBOOKS))
def test_sentences_are_short(page: str) -> None:
    """Those outside of tables, code spans not counted."""
    text = re.sub(r"^ *```.*?^ *```", "", PAGES[page], flags=re.M | re.S)
    paragraphs = re.split(r"\n\s*\n|\n(?= *(?:- |\d\. ))", re.sub(r"`[^`]*`,?", "", text))
    prose = [" ".join(one.split()) for one in paragraphs if not one.lstrip().startswith(("|", "#", "<"))]
    sentences = [one for paragraph in prose for one in re.split(r"(?<=[.;:?])\s+", paragraph)]
    assert [one for one in sentences if len(one.split()) > MOST_WORDS] == []


@pytest.mark.parametrize("page", sorted(PAGES))
def test_lines_are_short(page: str) -> None:
    """Those outside of tables and code, links not counted."""
    text = re.sub(r"^ *```.*?^ *```", "", PAGES[page], flags=re.M | re.S)
    lines = re.sub(r"\]\(\S*", "]", text).splitlines()
    assert [one for one in lines if len(one) > COLUMNS and not one.lstrip().startswith("|")] == []


def kinds_of_errors(kind: type[errors.SglaError] = errors.SglaError) -> set[type[errors.SglaError]]:
    """It, and all that the server's modules make of it."""
    return {kind}.union(*map(kinds_of_errors, kind.__subclasses__()))


def test_every_error_code_is_explained_with_its_status() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ([\w ]+) \|", PAGES["errors.md"], re.M)
    explained = {code: status for codes, status in rows for code in re.findall(r"\w+", codes)}
    assert explained == {
        kind.code: "at start" if issubclass(kind, errors.ConfigError) else str(kind.status)
        for kind in kinds_of_errors()
        if kind.__module__.startswith("sgla.")
    }


def test_architectures_that_are_named_are_supported() -> None:
    named = set(re.findall(r"`(\w+For(?:CausalLM|ConditionalGeneration))`", PAGES["models.md"]))
    assert named == {
        name for name in supported() if name.endswith(("ForCausalLM", "ForConditionalGeneration"))
    }


def test_steps_name_files_that_there_are_and_what_is_in_them() -> None:
    """The pages on design say in numbered steps how to add an op, a kernel, a format, an axis."""
    files = [path for top in ("csrc", "sgla", "tests", "bench") for path in (ROOT / top).rglob("*.*")]
    steps = re.findall(r"^\d\. .*(?:\n   .*)*", PAGES["design.md"] + PAGES["execution.md"], re.M)
    named = [place for step in steps for place in re.findall(r"`([\w/]+\.\w+)(?:: (\w+))?`", step)]
    assert len(named) > 40
    for name, within in named:
        found = [path for path in files if path.as_posix().endswith(f"/{name}") and path.is_file()]
        if "/" not in name and not found and not name.endswith((".py", ".h", ".cuh", ".cpp", ".cu")):
            continue  # an attribute, such as ``methods.register``
        assert found or "NAME" in name, name
        assert any(re.search(rf"\b{within}\b", path.read_text()) for path in found) or not within, within


def test_commands_parse() -> None:
    found = [
        words
        for block in blocks("bash")
        for line in block.replace("\\\n", " ").splitlines()
        for part in line.split("&&")
        if part.strip().startswith("sgla ") and (words := shlex.split(part, comments=True))
    ]
    assert len(found) > 8
    for words in found:
        parse(words[1:])
    for line in re.findall(r"`(sgla serve [^`]+)`", PAGES["migrating.md"]):
        parse(shlex.split(line)[1:])


def test_commands_of_compositions_parse() -> None:
    [compose, _, manifest, models] = [yaml.safe_load(block) for block in blocks("yaml")]
    for name, flags in models.items():
        values_of(Path("models.yaml"), name, flags, lambda hint: None)
    parse(shlex.split(compose["services"]["sgla"]["command"]))
    pod = manifest["spec"]["template"]["spec"]
    [user] = re.findall(r"^USER (\d+)$", (DOCS.parent / "Dockerfile").read_text(), re.M)
    assert pod["securityContext"] == {"runAsNonRoot": True, "fsGroup": int(user)}  # or it cannot write
    [container] = pod["containers"]
    parse(container["args"])
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in ROUTES
    [unit] = re.findall(r"^ExecStart=/opt/sgla/bin/sgla (.*)$", PAGES["deploying.md"], re.M)
    parse(shlex.split(unit))


@pytest.mark.parametrize("page", PAGES)
def test_routes_that_are_named_exist(page: str) -> None:
    named = set(re.findall(r"`(/(?:v1|v2|api|health)[a-z_/0-9]*)`", PAGES[page]))
    known = {re.sub(r"/\{.*", "", route) for route in ROUTES}
    assert named <= known


DEFAULTS = Config()
# The beginning of a row in the tables of limits -> what the code has.
LIMITS: dict[str, tuple[float, ...]] = {
    "body, inflated": (DEFAULTS.max_body_bytes,),
    "bodies of all requests": (DEFAULTS.request_memory_bytes,),
    "time for the body": (bodies.BODY_SECONDS,),
    "- a large body that makes room": (bodies.PATIENCE,),
    "values in a JSON text": (census.LIMITS["values"], 1 << 16),
    "strings in it": (census.LIMITS["strings"],),
    "backslashes in it": (census.LIMITS["backslashes"],),
    "members of objects": (census.LIMITS["members of objects"],),
    "lists and objects": (census.LIMITS["lists and objects"],),
    "characters of a number": (census.MAX_NUMBER,),
    "depth of nesting": (census.MAX_DEPTH,),
    "fields of a body": (request.MAX_FIELDS,),
    "fields whose integers": (request.MAX_REWRITTEN,),
    "messages of a conversation": (request.MAX_MESSAGES,),
    "parts and calls": (request.MAX_PARTS,),
    "tools": (request.MAX_TOOLS,),
    "characters of a tool's name": (request.MAX_TOOL_NAME,),
    "prompts": (request.MAX_CHOICES,),
    "items of `allowed_token_ids`": (request.MAX_ALLOWED, messages.MAX_BIASES),
    "characters of a grammar": (messages.MAX_GRAMMAR,),
    "`stop` and `stop_regex`": (request.MAX_STOPS, request.MAX_STOP_CHARS, request.MAX_STOPS_CHARS),
    "`stop_regex`, repetitions": (regex.POSITIONS,),
    "`bad_words`": (sampling.MAX_WORDS, request.MAX_STOP_CHARS, messages.MAX_WORD_TOKENS),
    "`logits_processors`": (sampling.MAX_PROCESSORS,),
    "stop tokens that": (messages.MAX_STOP_IDS,),
    "`logprob_token_ids`": (common.MAX_LOGPROB_IDS,),
    "beams of": (beams.MAX_WIDTH,),
    "choices of a grammar": (notations.MAX_CHOICES,),
    "characters of a `chat_template`": (templates.MAX_SOURCE,),
    "characters of a name": (request.MAX_NAME, session_store.MAX_NAME),
    "pictures of a prompt, sounds, videos": (readers.MOST,),
    "- the file of one": (DEFAULTS.max_media_bytes, DEFAULTS.max_image_pixels),
    "- characters of its URL": (fetch.MAX_URL, DEFAULTS.media_redirects, DEFAULTS.media_timeout),
    "- CPU time to decode": (DEFAULTS.media_cpu_seconds, pool.BUSY * DEFAULTS.media_cpu_seconds),
    "- memory of the process that does": (ingress.PROCESS, ingress.PIXEL, ingress.SECOND // sound.RATE),
    "- seconds of a video": (DEFAULTS.max_video_seconds, DEFAULTS.max_video_frames),
    "- seconds of a sound": (sound.SHORTEST, DEFAULTS.max_audio_seconds),
    "- samples a second": (*listen.RATES, listen.CHANNELS),
    "- files of a client": (fetch.AT_ONCE, fetch.OWN_NAMES),
    "- what they become": (room.TOGETHER, room.MOST, room.PATIENCE),
    "`custom_id`": (lines.MAX_ID,),
    "`/tokenize`": (tokens.MAX_CHARS, tokens.MAX_TOKENS),
    "`/detokenize`": (tokens.MAX_IDS,),
    "texts of either": (tokens.MAX_TEXTS,),
    "`/v1/completions/render`": (render.MAX_REPEATED,),
    "tokens beyond the context": (prepare.CUT,),
    "a session of `/v1/realtime`": (session.MAX_MESSAGE,),
    "- items |": (session.MAX_ITEMS,),
    "- silence": (session.IDLE_SECONDS,),
    "logprobs, alternatives": (request.MAX_LOGPROBS,),
    "- where the answer shows": (request.MAX_REPEATED,),
    "- of a prompt that a stream": (completions.MAX_AT_ONCE,),
    "numbers of hidden states": (request.MAX_LOGPROBS, request.MAX_REPEATED),
    "tokens of a summary": (compact.LONGEST,),
    "calls of MCP tools by a response": (mcp.MAX_CALLS,),
    "its handshake of TLS": (accepting.HANDSHAKE_SECONDS,),
    "the first header": (connections.HEADER_SECONDS,),
    "the next header": (connections.IDLE_SECONDS,),
    "a client that reads nothing": (connections.UNREAD_SECONDS,),
    "what a client leaves unread": (DEFAULTS.sink_limit_bytes,),
    "all headers": (connections.HEADER_BYTES,),
    "what the system holds": (accepting.SEND_BYTES,),
    "tokens of all sessions": (session_store.MAX_TOKENS,),
    "turns of a session": (session_store.MAX_TURNS,),
    "items of a conversation": (conversations.MAX_ADDED,),
    "a page of a list": (items.PAGE,),
    "what a response repeats": (answer.MAX_ECHOED,),
    "requests of a client that wait": (database.WAITING,),
    "fields of its form": (forms.MAX_FIELDS, forms.MAX_LINES),
    "size of a file": (files.MOST_BYTES,),
    "time for a file": (upload.SECONDS, forms.SILENT),
    "age of a file": (files.TTL,),
    "lines of a batch": (lines.MAX_LINES,),
    "an answer in a batch": (asking.MAX_ANSWER,),
    "batches of a client": (store.MOST_UNENDED,),
    "batches of all clients": (store.MOST,),
    "CPU time of a new grammar": (compiler.FIRST,),
    "CPU time of a grammar": (compiler.TIMEOUT,),
    "memory to compile": (sandbox.MEMORY,),
    "grammars of a client": (compiler.WAITING,),
    "characters of one, also": (messages.MAX_GRAMMAR,),
    "parts of a schema": (schema.SCHEMAS,),
    "memory of its process beside": (protocol.MEMORY,),
    "time to connect": (servers.START,),
    "time of a call": (DEFAULTS.tool_timeout,),
    "an answer to a ping": (servers.SILENT,),
    "names, descriptions": (protocol.LIST,),
    "age of the list": (servers.AGE,),
    "one message; an event": (process.ANSWER,),
    "messages in a second": (process.PACE,),
    "output of a call": (protocol.MOST,),
    "outputs of the calls": (agent.MAX_OUTPUTS,),
    "calls of a client to it": (servers.AT_ONCE,),
    "calls that a request approves": (mcp.MAX_CALLS,),
    "CPU time of one": (texts.SECONDS, texts.SECONDS * texts.BUSY),
    "memory of its process |": (texts.MEMORY,),
    "text that comes out": (texts.MOST,),
    "texts of one client": (lanes.HELD,),
    "config.json": (source.MAX_JSON,),
    "an index of tensors": (source.MAX_INDEX,),
    "layers; heads": (limits.LAYERS, limits.HEADS, limits.HEAD_DIM),
    "width; width": (limits.WIDTH, limits.INNER),
    "experts": (limits.EXPERTS,),
    "tokens of the vocabulary": (limits.VOCAB,),
    "ids that end": (source.MAX_ENDS,),
    "header of a GGUF": (gguf_header.MOST_BYTES,),
    "- its keys": (gguf_header.MOST_ENTRIES,),
    "- items of its lists": (gguf_header.MOST_ITEMS,),
    "ordinary text": (tokenizer.PROBE_SECONDS,),
    "automata of lists of stop strings": (stops.KEPT,),
    "automata of lists of stop expressions": (regex.AUTOMATA,),
    "compiled grammars": (compiler.ENTRIES,),
    "- in each worker": (matcher.KEPT, matcher.KEPT_BYTES),
    "refused grammars": (compiler.REFUSALS,),
}
UNITS = {
    "Mi": 1 << 20,
    "MiB": 1 << 20,
    "KiB": 1 << 10,
    "GiB": 1 << 30,
    "second": 1,
    "seconds": 1,
    "minute": 60,
    "minutes": 60,
    "hour": 3600,
    "days": 86400,
}


def amounts(cell: str) -> set[float]:
    """What a cell says, in bytes, seconds or pieces."""
    words = (
        cell.replace("`", " ").replace(";", " ").replace("an hour", "1 hour").replace("a minute", "1 minute")
    )
    found = re.findall(r"(?<![\w.])([\d,]*\d(?:\.\d+)?) ?(\w+)?", words)
    return {float(number.replace(",", "")) * UNITS.get(unit, 1) for number, unit in found}


def test_limits_are_those_of_the_code() -> None:
    limits = PAGES["operating.md"].partition("\n## Limits\n")[2].partition("\n## ")[0]
    rows = [row for row in re.findall(r"^\| (.*) \|$", limits, re.M) if not row.startswith("---")]
    for beginning, values in LIMITS.items():
        found = [row for row in rows if row.startswith(beginning)]
        assert len(found) == 1, (beginning, found)
        told = amounts(found[0].split(" | ")[1])
        assert told >= set(map(float, values)), (found[0], told)
