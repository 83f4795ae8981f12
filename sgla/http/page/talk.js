// The conversation that is shown: its messages, the answer that streams in, and what can be done with each.
import { ServerError, call, events } from "./client.js";
import { $, button, copyBy, make } from "./dom.js";
import { Follower } from "./follow.js";
import { MarkdownView } from "./markdown.js";
import { shown as pictured } from "./pictures.js";
import { fields } from "./settings.js";
import { Conversation, save } from "./store.js";

const ENDS = { stopped: "ended by you", length: "ended by max_tokens",
  repetition: "ended because it repeated itself" };
const KEEP = 1000; // milliseconds between two times that what has come of an answer is kept
const SHARE = 8; // an answer is drawn again after this many times what drawing it took

export let conversation = new Conversation();
export let running = null; // the Answer that streams, maybe of a conversation that is not shown
const follower = new Follower($("talk"), $("messages"), $("jump"));
const on = { changed() {}, lost() {} }; // set by main.js

export function listen(handlers) { Object.assign(on, handlers); }

export function open(chosen) {
  conversation = chosen;
  $("system").value = chosen.system;
  draw();
  follower.follow();
  $("prompt").focus();
}

async function keep(changed = conversation) {
  await save(changed).catch((error) => { $("messages").append(complaint(error)); });
  on.changed();
}

// --- cards

function draw() {
  const path = conversation.path();
  $("messages").replaceChildren(...path.map((at) => card(conversation, at)));
  const last = conversation.nodes[path.at(-1)];
  if (last?.message.tool_calls && running?.conversation !== conversation)
    askResults($("messages").lastElementChild, path.at(-1));
  if (running?.conversation === conversation && running.parent === (path.at(-1) ?? 0))
    $("messages").append(running.view);
  $("empty").hidden = $("messages").hasChildNodes();
}

function frame(kind, title) {
  const text = make("div", { className: "text" });
  const view = make("article", { className: kind, ariaLabel: title }, make("h2", { textContent: title }),
    text);
  view.text = text;
  return view;
}

function card(owner, at) {
  const { message, pictures, reasoning, model, note } = owner.nodes[at], mine = message.role !== "assistant";
  const view = frame(message.role, mine ? { user: "You", tool: "Result" }[message.role] : model ?? "Answer");
  if (mine) view.text.textContent = message.content;
  else new MarkdownView(view.text).show(message.content);
  if (pictures?.length) view.text.before(pictured(pictures));
  if (reasoning) view.text.before(thought(reasoning, false));
  view.boxes = (message.tool_calls ?? []).map(({ function: made }) => make("div", { className: "call" },
    make("b", { textContent: made.name }), make("pre", { textContent: made.arguments })));
  view.append(...view.boxes, foot(owner, at, note));
  return view;
}

function thought(text, open) {
  return make("details", { className: "thought", open }, make("summary", { textContent: "Reasoning" }),
    make("div", { textContent: text }));
}

function foot(owner, at, note) {
  const { message } = owner.nodes[at],
    row = make("div", { className: "foot" }, make("span", { textContent: note ?? "" }));
  const others = owner.siblings(at), place = others.indexOf(at);
  if (others.length > 1) {
    const step = (by, text, ariaLabel) =>
      button(text, () => choose(others[place + by]), { ariaLabel, disabled: !others[place + by] });
    row.append(step(-1, "‹", "Earlier version"),
      make("span", { className: "version", textContent: `${place + 1} of ${others.length}` }),
      step(1, "›", "Later version"));
  }
  if (message.content) row.append(button("Copy", (event) => copyBy(event.target, message.content),
    { ariaLabel: "Copy the message" }));
  if (message.role !== "tool")
    row.append(button("Edit", (event) => edit(event.target.closest("article"), at),
      { className: "small act" }));
  if (message.role === "assistant")
    row.append(button("Retry", () => answer(owner.nodes[at].parent, true), { className: "small act again" }));
  row.append(button("Branch", () => branch(at),
    { className: "small act", title: "Go on from here in a new chat" }));
  for (const control of row.querySelectorAll(".act")) control.disabled = running !== null;
  return row;
}

function complaint(error) {
  const box = make("div", { className: "error", textContent: error.message });
  box.setAttribute("role", "alert");
  if (error.note) box.append(make("small", { textContent: error.note }));
  return box;
}

// --- what is done with a message

function choose(at) {
  conversation.nodes[conversation.nodes[at].parent].chosen = at;
  draw();
  keep();
}

function branch(at) {
  open(conversation.fork(at));
  keep();
}

// An edited question is asked again; an edited answer stands beside the first one.
function edit(view, at) {
  const { message, pictures, parent, model } = conversation.nodes[at];
  const field = make("textarea",
    { value: message.content, rows: Math.min(12, message.content.split("\n").length + 1),
      ariaLabel: "Edited message" });
  const form = make("form", { className: "edit" }, field, make("div", {}, button("Cancel", draw),
    make("button", { className: "small main", textContent: message.role === "user" ? "Send" : "Save" })));
  form.onsubmit = (event) => {
    event.preventDefault();
    const content = field.value.trim();
    if (!content || running) return;
    const made = conversation.add(parent,
      { message: { ...message, content }, pictures, model, note: model && "edited by you" });
    draw();
    if (message.role === "user") answer(made);
    keep();
  };
  form.onkeydown = (event) => {
    if (event.key === "Escape") { event.stopPropagation(); draw(); }
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  };
  view.text.replaceWith(form);
  view.querySelector(".foot").remove();
  field.focus();
}

function askResults(view, at) {
  const calls = conversation.nodes[at].message.tool_calls;
  const inputs = calls.map(({ function: made }, index) => {
    const input = make("textarea",
      { rows: 1, placeholder: "What the function returns", ariaLabel: `Result of ${made.name}` });
    view.boxes[index].append(input);
    return input;
  });
  view.boxes.at(-1).after(button("Send results", () => {
    if (running) return;
    const last = inputs.reduce((parent, { value }, index) =>
      conversation.add(parent, { message: { role: "tool", tool_call_id: calls[index].id, content: value } }),
        at);
    draw();
    answer(last);
  }));
}

export function ask(text, pictures = []) {
  if (!conversation.nodes[0].chosen) conversation.title = text.split("\n")[0].slice(0, 60) || "Picture";
  conversation.system = $("system").value.trim();
  const at = conversation.add(conversation.path().at(-1) ?? 0,
    { message: { role: "user", content: text }, ...(pictures.length ? { pictures } : {}) });
  draw();
  keep();
  answer(at);
}

// --- the answer

class Answer {
  constructor(parent) {
    Object.assign(this, { conversation, parent, content: "", reasoning: "", calls: [], usage: null,
      finish: null, first: null });
    this.before = conversation.nodes[parent].chosen; // what was answered before
    this.began = performance.now();
    this.abort = new AbortController();
    this.model = $("model").value;
    this.view = frame("assistant", this.model);
    this.view.ariaBusy = "true";
    this.view.text.classList.add("waiting");
    this.markdown = new MarkdownView(this.view.text);
    this.boxes = [];
    this.told = 0; // blocks that a screen reader was given
  }

  take(chunk) {
    if (chunk.error) throw new ServerError(0, chunk.error);
    this.usage = chunk.usage ?? this.usage;
    for (const { delta, finish_reason } of chunk.choices ?? []) {
      this.finish = finish_reason ?? this.finish;
      const thinking = delta.reasoning_content ?? delta.reasoning ?? "";
      if ((delta.content || thinking || delta.tool_calls) && this.first === null)
        this.first = performance.now();
      this.content += delta.content ?? "";
      this.reasoning += thinking;
      for (const part of delta.tool_calls ?? []) this.takeCall(part);
    }
    this.keeping ??= setTimeout(() => this.keepPart(), KEEP);
    this.due ??= setTimeout(() =>
      requestAnimationFrame(() => { this.due = undefined; if (running === this) this.show(); }),
    this.rest ?? 0);
  }

  takeCall({ index, id, function: made = {} }) {
    const known = this.calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } };
    known.function.name += made.name ?? "";
    known.function.arguments += made.arguments ?? "";
  }

  show() {
    const began = performance.now();
    if (this.reasoning) {
      if (!this.thought) this.view.text.before(this.thought = thought("", true));
      const text = this.thought.lastChild.firstChild ?? this.thought.lastChild.appendChild(new Text());
      text.appendData(this.reasoning.slice(text.length));
    }
    this.markdown.show(this.content);
    this.calls.forEach(({ function: made }, index) => {
      const box = this.boxes[index] ??=
        this.view.appendChild(make("div", { className: "call" }, make("b"), make("pre")));
      box.children[0].textContent = made.name;
      box.children[1].textContent = made.arguments;
    });
    this.tell(this.markdown.sources.length - 1);
    this.rest = SHARE * (performance.now() - began);
  }

  // Hand blocks that will not change any more to screen readers.
  tell(finished) {
    for (; this.told < finished; this.told++)
      $("said").append(make("p", { textContent: this.markdown.said(this.told) }));
  }

  note(reason) {
    const seconds = (performance.now() - (this.first ?? this.began)) / 1000, parts = [];
    const made = this.usage?.completion_tokens;
    if (made) parts.push(`${made} tokens`);
    if (made > 1 && seconds > 0.05) parts.push(`${((made - 1) / seconds).toFixed(1)} tokens/s`);
    if (this.first !== null) parts.push(`first after ${((this.first - this.began) / 1000).toFixed(2)} s`);
    if (this.usage) {
      const cached = this.usage.prompt_tokens_details?.cached_tokens ?? 0;
      parts.push(`${cached} of ${this.usage.prompt_tokens} prompt tokens cached`);
    }
    if (reason && reason !== "stop" && reason !== "tool_calls")
      parts.push(ENDS[reason] ?? `ended by ${reason}`);
    return parts.join(" · ");
  }

  node(note, calls) {
    const message = { role: "assistant", content: this.content,
      ...(calls.length ? { tool_calls: calls } : {}) };
    return { message, reasoning: this.reasoning, model: this.model, note };
  }

  // Keep the text that has come so far, for a page that is closed before the end.
  keepPart() {
    clearTimeout(this.keeping);
    this.keeping = undefined;
    if (running === this && !this.unwanted && this.content)
      save(this.conversation.with(this.parent,
        this.node("not complete: the page was closed", []))).catch(() => {});
  }

  // Nobody wants it any more: what has come is thrown away.
  abandon() {
    this.unwanted = true;
    this.abort.abort();
  }

  // The stream is over, for whatever reason; what has come so far belongs to the conversation.
  end(error) {
    const stopped = error?.name === "AbortError", shown = this.conversation === conversation;
    this.show();
    this.tell(this.markdown.sources.length);
    this.view.text.classList.remove("waiting");
    this.view.ariaBusy = "false";
    const note = this.note(stopped ? "stopped" : this.finish);
    let at = 0;
    if (this.content || this.calls.length) {
      at = this.conversation.add(this.parent, this.node(note, this.calls));
      this.view.boxes = this.boxes;
      if (this.calls.length && !error && shown) askResults(this.view, at);
    }
    else this.conversation.nodes[this.parent].chosen = this.before;
    if (error && !stopped) this.view.append(complaint(error));
    this.view.append(at ? foot(this.conversation, at, note) : make("div", { className: "foot" },
      make("span", { textContent: note }),
      button("Retry", () => answer(this.parent, !error), { className: "small act again" })));
    if (shown && !this.view.isConnected) draw(); // another version was looked at meanwhile
    keep(this.conversation);
  }
}

function busy(now) {
  running = now;
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  for (const control of document.querySelectorAll(".act")) control.disabled = running !== null;
}

addEventListener("pagehide", () => running?.keepPart());

// Answer what `parent` says, beside the answers that it has; `again`: in another way.
async function answer(parent, again = false) {
  if (running) return;
  busy(new Answer(parent));
  conversation.nodes[parent].chosen = undefined;
  $("said").replaceChildren();
  draw();
  follower.follow();
  const mine = running, { signal } = mine.abort;
  let failure = null;
  try {
    const body = fields(conversation.messages(parent), again);
    for await (const chunk of events(await call("v1/chat/completions", body, signal))) mine.take(chunk);
    if (!mine.finish) throw new Error("The connection broke before the answer was complete.");
  } catch (error) {
    failure = error;
    if (error.status === 401) on.lost(error);
  }
  busy(null);
  if (!mine.unwanted) mine.end(failure);
}
