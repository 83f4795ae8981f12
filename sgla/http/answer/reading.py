"""How the outputs of one chat are read: what its fields and the model's dialect make of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec

from sgla.http.answer.collect import Choice
from sgla.http.answer.parts import PlainReader, Reader
from sgla.http.ids import random_id
from sgla.http.request.chat import chosen_tools
from sgla.http.request.sampling import BUDGETS
from sgla.http.request.schema import ChatRequest, SamplingFields, ThinkingSwitch, unsupported
from sgla.http.server import Server
from sgla.messages import Event, Grammar, SamplingParams, Thinking
from sgla.text.process import BoundedTemplate
from sgla.text.reasoning.harmony import FINAL
from sgla.text.reasoning.think import Think
from sgla.text.tools.cursor import ARGUMENTS, CALL, CONTENT, REASONING, Piece
from sgla.text.tools.families import Dialect, dialect_of, written_as_told
from sgla.text.tools.parser import OutputParser
from sgla.text.tools.writing import arguments, grammar_of, text_input

TAIL = 16  # tokens at a prompt's end in which a tag that opens reasoning is looked for


class Reading:
    """Made once a request; ``reader`` once a choice.
    Raises BadRequest kinds for tools that are wrong or cannot be had."""

    def __init__(self, server: Server, fields: ChatRequest, budget: int | None = None) -> None:
        """``budget``: a wish for how many tokens reasoning has at most."""
        self.fields = fields
        self._budget = budget
        self.metrics = server.metrics
        self.tokenizer: Any = server.ingress.tokenizer
        dialect = server_dialect(server)
        # Models that do not know tools tend to call on until they are cut.
        single = dialect.generic and fields.parallel_tool_calls is None
        self._choice = chosen_tools(fields, single)
        self.most_calls = 1 if single or fields.parallel_tool_calls is False else None
        self.dialect = dialect.forced() if self._choice.forced else dialect
        self.tools = fields.tools if self._choice.tools else None
        template = server.ingress.template  # without one the chat itself is refused
        if self.tools is not None and template is not None and self.dialect.tools is None:
            raise unsupported(
                "tools",
                " with this model, unless tool_choice is 'none': its chat template has no tool calls that "
                "are known; the server's --tool-call-parser names a format",
            )
        if self.tools is not None and template is not None and not written_as_told(dialect.tools):
            check_shown(template, fields)
        self.separate = fields.separate_reasoning is not False
        self.calls_only = self._choice.forced and self.separate
        self.active = self.tools is not None or (self.separate and self.dialect.reasoning is not None)
        facts = server.ingress.facts
        self._grammars = facts is not None and facts.grammars

    def sampling(self, sampling: SamplingParams) -> SamplingParams:
        """Special tokens must stay in the text where they are the tags to be read.
        A grammar is for the answer alone."""
        sampling = msgspec.structs.replace(sampling, thinking=self._thinking())
        grammar = self._constraint(sampling.grammar)
        if grammar is not None:
            whole = self.dialect.harmony and self._choice.forced
            grammar = grammar if whole else self.after_reasoning(grammar)
            sampling = msgspec.structs.replace(sampling, grammar=grammar)
        if not self.active or not sampling.skip_special_tokens:
            return sampling
        if self.dialect.tags.isdisjoint(special_texts(self.tokenizer)):
            return sampling
        return msgspec.structs.replace(sampling, skip_special_tokens=False)

    def _constraint(self, asked: Grammar | None) -> Grammar | None:
        """The grammar for the answer: what is ``asked`` for, calls that there must be, or either."""
        tools, forced, once, fewer = self._choice
        writing = self.dialect.writing
        if not tools:
            return asked
        if writing is None:
            return self._unbound(asked)
        if forced:
            return tagged(writing.calls(tools, once), Grammar(kind="", param="tools"))
        if self.dialect.harmony:
            return self._unbound(asked)
        if asked is not None:
            schema = schema_of(asked)
            if schema is None:
                return self._unbound(asked)
            return tagged({"type": "or", "elements": [writing.calls(tools, once), arguments(schema)]}, asked)
        strict = any(tool["function"].get("strict") is True for tool in tools)
        if self._grammars and (fewer or strict or self.dialect.generic):
            calls = self._calls_within_text(tools, once)
            if calls is not None:
                return calls
        return self._unbound(None)

    def _unbound(self, grammar: Grammar | None) -> Grammar | None:
        """``grammar`` where nothing constrains the calls. Raises UnsupportedField if something has to."""
        if self._choice.fewer:
            raise unsupported(
                "tool_choice", " as allowed_tools in mode auto with this model: use mode required"
            )
        for i, tool in enumerate(self._choice.tools):
            if grammar_of(text_input(tool["function"].get("parameters"))) is not None:
                told = f" with a grammar (tools[{i}]) that this model need not call: use tool_choice required"
                raise unsupported("tools", told)
        return grammar

    def _calls_within_text(self, tools: list[dict[str, Any]], once: bool) -> Grammar | None:
        form = self.dialect.tools.tools if self.dialect.tools else None
        assert self.dialect.writing is not None
        calls = self.dialect.writing.triggered(form.opens[0], tools, once) if form and form.opens else None
        return None if calls is None else tagged(calls, Grammar(kind="", param="tools"))

    def after_reasoning(self, grammar: Grammar) -> Grammar:
        """``grammar`` for the part of the output that is no reasoning."""
        think = self.dialect.think
        if self.dialect.harmony:
            return msgspec.structs.replace(grammar, after=() if self.fields.continue_final_message else FINAL)
        if think is None:
            return grammar
        opened = self._opened_by_last()
        return msgspec.structs.replace(grammar, after=(think.close,), opener="" if opened else think.open)

    def _thinking(self) -> Thinking | None:
        asked, think = thinking_of(self.fields, self.dialect), self.dialect.think
        if asked is None and self._budget is not None and think is not None:
            asked = Thinking(tokens=self._budget, open=think.open, close=think.close, wish=True)
        if asked is None or not self._opened_by_last():
            return asked
        return msgspec.structs.replace(asked, open="")

    def _opened_by_last(self) -> bool:
        """Whether the output goes on with a message that ends inside of reasoning."""
        think = self.dialect.think
        if think is None or not self.fields.continue_final_message:
            return False
        return opened_within(self.fields.messages[-1], think)

    def reader(self) -> Reader:
        return ChatReader(self) if self.active else PlainReader()

    def opened(self, prompt: list[int]) -> bool:
        """Whether the output begins inside of reasoning."""
        think = self.dialect.think
        if think is None:
            return False
        if self._opened_by_last():
            return True
        return think.opened_by(self.tokenizer.decode(prompt[-TAIL:], skip_special_tokens=False))

    def new_id(self) -> str:
        family = self.dialect.tools
        return random_id()[:9] if family and family.short_ids else f"call_{random_id()[:24]}"


def thinking_of(fields: SamplingFields, dialect: Dialect) -> Thinking | None:
    """The limit of reasoning that a request asks for.
    Raises UnsupportedField where the model's reasoning is not known."""
    budgets = {name: getattr(fields, name) for name in BUDGETS}
    switch = getattr(fields, "thinking", None)  # of chats
    if isinstance(switch, ThinkingSwitch) and switch.type != "disabled":
        budgets["thinking.budget_tokens"] = switch.budget_tokens
    name, tokens = next(((name, n) for name, n in budgets.items() if n is not None), ("", -1))
    if tokens < 0:
        return None
    think = dialect.think
    if think is None or dialect.harmony:
        raise unsupported(
            name, " with this model: --reasoning-parser names how models with tags for it reason"
        )
    return Thinking(tokens=tokens, open=think.open, close=think.close, param=name)


def schema_of(grammar: Grammar) -> dict[str, Any] | None:
    """The JSON Schema that a grammar is, if it is one."""
    if grammar.kind == "json_object":
        return {"type": "object"}
    if grammar.kind != "json_schema":
        return None
    try:
        schema = msgspec.json.decode(grammar.text)
    except msgspec.DecodeError:  # refused when it is compiled
        return None
    return schema if isinstance(schema, dict) else None


def check_shown(template: BoundedTemplate, fields: ChatRequest) -> None:
    """Raise UnsupportedField if the template shows no tools,
    so that the model is told to write calls in another form than is read."""
    if not template.shows_tools(fields.chat_template):
        raise unsupported(
            "tools",
            " with this chat template: it shows no tools, and the calls of this model are not read in the "
            "form that models are told of instead; the server's --tool-call-parser hermes does that",
        )


def tagged(spec: dict[str, Any], like: Grammar) -> Grammar:
    text = msgspec.json.encode({"type": "structural_tag", "format": spec}).decode()
    return msgspec.structs.replace(like, kind="structural_tag", text=text)


def server_dialect(server: Server) -> Dialect:
    """Raises ConfigError for parsers that nobody knows."""
    config, template, model = server.config, server.ingress.template, server.ingress.model
    return dialect_of(
        getattr(template, "source", ""),
        config.tool_call_parser,
        config.reasoning_parser,
        model.architecture if model else "",
    )


@lru_cache(maxsize=4)
def special_texts(tokenizer: Any) -> frozenset[str]:
    return frozenset(
        tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tokenizer.special_ids
    )


def opened_within(message: dict[str, Any], think: Think) -> bool:
    """Whether the message that the output continues ends inside of reasoning."""
    content = message.get("content")
    text = content if isinstance(content, str) else ""
    return text.rfind(think.open) > text.rfind(think.close)


class ChatReader:
    """The pieces of one choice, as the request wants them. Each call has an id."""

    def __init__(self, reading: Reading) -> None:
        fields = reading.fields
        self.reasoning_tokens = 0
        self._reading = reading
        self._parser: OutputParser | None = None
        self._tokens = 0
        self._length = 0  # characters read
        self._calls = 0
        self._most_calls = reading.most_calls
        self._shown = fields.include_reasoning is not False
        self._gathered: list[str] | None = [] if fields.stream_reasoning is False else None

    def read(self, event: Event | Choice) -> list[Piece]:
        if self._parser is None:
            reading = self._reading
            opened = event.prompt_tokens is not None and reading.opened(event.prompt_tokens)
            self._parser = OutputParser(reading.dialect, reading.tools, opened, reading.separate)
        text = event.text
        pieces = self._parser.feed(text)
        self._count(self._parser, text, event.tokens)
        if event.finish is not None:
            pieces += self._parser.close(cut=event.finish == "length")
        wanted = [piece for piece in map(self._wanted, pieces) if piece is not None]
        if event.finish is not None and self._reading.tools is not None:
            self._reading.metrics.tools_read(self._calls)
        return wanted if self._gathered is None else self._in_one(wanted, event.finish is not None)

    def _wanted(self, piece: Piece) -> Piece | None:
        if piece.kind == CALL:
            self._calls += 1
            piece = Piece(CALL, piece.text, piece.id or self._reading.new_id())
        if piece.kind == REASONING and not self._shown:
            return None
        if piece.kind == CONTENT and self._reading.calls_only:
            return None  # of a call that was cut
        if (
            piece.kind in (CALL, ARGUMENTS)
            and self._most_calls is not None
            and self._calls > self._most_calls
        ):
            return None
        return piece

    def _in_one(self, pieces: list[Piece], over: bool) -> list[Piece]:
        """Reasoning gathered until something else comes."""
        assert self._gathered is not None
        self._gathered += [piece.text for piece in pieces if piece.kind == REASONING]
        others = [piece for piece in pieces if piece.kind != REASONING]
        if not self._gathered or not (others or over):
            return others
        reasoning, self._gathered = "".join(self._gathered), []
        return [Piece(REASONING, reasoning), *others]

    def _count(self, parser: OutputParser, text: str, tokens: list[int]) -> None:
        """Tokens that end after the latest reasoning are not part of it."""
        ended = parser.thought - self._length  # in characters of ``text``
        if parser.thinking:
            self.reasoning_tokens = self._tokens + len(tokens)
        elif ended > 0:
            size = len(text[:ended].encode("utf-8", "surrogatepass"))
            self.reasoning_tokens = self._tokens + covering(tokens, size, self._reading.tokenizer.token_bytes)
        self._tokens += len(tokens)
        self._length += len(text)


def covering(tokens: list[int], size: int, token_bytes: Callable[[int], bytes]) -> int:
    """How many of ``tokens`` it takes to write ``size`` bytes."""
    for count, token in enumerate(tokens, 1):
        size -= len(token_bytes(token))
        if size <= 0:
            return count
    return len(tokens)
