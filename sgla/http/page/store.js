// Conversations, kept in this browser's IndexedDB; where there is none, in the page's memory.
import { kindOf } from "./pictures.js";

const NAME = "sgla", KIND = "conversations";
const memory = new Map();
let opened = null;

const settled = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

function database() {
  return opened ??= (async () => {
    try {
      const request = indexedDB.open(NAME, 1);
      request.onupgradeneeded = () => request.result.createObjectStore(KIND, { keyPath: "id" });
      return await settled(request);
    } catch { return null; }
  })();
}

async function work(mode, action, without) {
  const base = await database();
  return base ? settled(action(base.transaction(KIND, mode).objectStore(KIND))) : without();
}

// The newest first.
export async function load() {
  const found = await work("readonly", (kept) => kept.getAll(), () => [...memory.values()]);
  return found.map((plain) => new Conversation(plain)).sort((a, b) => b.changed - a.changed);
}

export async function save(conversation) {
  const plain = { ...conversation };
  await work("readwrite", (kept) => kept.put(plain), () => memory.set(plain.id, plain));
}

export async function remove(id) {
  await work("readwrite", (kept) => kept.delete(id), () => memory.delete(id));
}

// A tree of messages: an edit or a second answer is one more child of the same parent. Node 0 is the root,
// without a message;
// `chosen` is the child that is shown. A node: {parent, chosen, message, pictures, reasoning, model, note};
// `pictures` are data URLs, of videos, too.
export class Conversation {
  constructor({ id, title = "New chat", changed = Date.now(), system = "", nodes = [{ parent: -1 }] } = {}) {
    this.id = id ?? `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;
    Object.assign(this, { title, changed, system, nodes });
  }

  add(parent, node) {
    const index = this.nodes.push({ ...node, parent }) - 1;
    this.nodes[parent].chosen = index;
    this.changed = Date.now();
    return index;
  }

  // A copy with one more node; the messages are shared.
  with(parent, node) {
    const made = new Conversation({ ...this, nodes: this.nodes.map((each) => ({ ...each })) });
    made.add(parent, node);
    return made;
  }

  siblings(index) {
    const { parent } = this.nodes[index];
    return [...this.nodes.keys()].filter((other) => this.nodes[other].parent === parent);
  }

  // Nodes from the first message to the last that is shown, or to `end`.
  path(end) {
    const found = [];
    if (end !== undefined) for (let at = end; at > 0; at = this.nodes[at].parent) found.unshift(at);
    else for (let at = this.nodes[0].chosen; at; at = this.nodes[at].chosen) found.push(at);
    return found;
  }

  messages(end) { return this.path(end).map((at) => sent(this.nodes[at])); }

  // A conversation of its own that begins as this one does, up to `end`.
  fork(end) {
    const made = new Conversation({ title: this.title, system: this.system });
    this.path(end).reduce((parent, at) =>
      made.add(parent, structuredClone({ ...this.nodes[at], chosen: undefined })), 0);
    return made;
  }

  markdown() {
    const parts = this.path().map((at) => {
      const { message, pictures = [], model } = this.nodes[at];
      const calls = (message.tool_calls ?? []).map(({ function: made }) =>
        `\`${made.name}(${made.arguments})\``);
      const who = { user: "You", assistant: model ?? "Answer", tool: "Result" }[message.role];
      return [`## ${who}`, ...pictures.map((url) => kindOf(url) === "video" ? "*(a video)*" : "*(a picture)*"), message.content, ...calls].filter(Boolean).join("\n\n");
    });
    const system = this.system && `## System\n\n${this.system}`;
    return `${[`# ${this.title}`, system, ...parts].filter(Boolean).join("\n\n")}\n`;
  }
}

// A message as the server wants it: its pictures and videos come before its text.
function sent({ message, pictures = [] }) {
  if (!pictures.length) return message;
  const parts = pictures.map((url) => kindOf(url) === "video" ? { type: "video_url", video_url: { url } }
    : { type: "image_url", image_url: { url } });
  if (message.content) parts.push({ type: "text", text: message.content });
  return { ...message, content: parts };
}

// --- import

const ROLES = ["user", "assistant", "tool"];
const isText = (value) => value === undefined || typeof value === "string";
const isCall = (call) => isText(call?.id) && typeof call?.function?.name === "string" &&
  typeof call.function.arguments === "string";
const areCalls = (calls) => calls === undefined ||
  (Array.isArray(calls) && calls.length > 0 && calls.every(isCall));

function isMessage({ role, content, tool_calls, tool_call_id } = {}) {
  return ROLES.includes(role) && typeof content === "string" && areCalls(tool_calls) && isText(tool_call_id);
}

const arePictures = (urls) => urls === undefined ||
  (Array.isArray(urls) && urls.every((url) => isText(url) && /^data:(image|video)\//.test(url)));

function isNode(node, at, nodes) {
  const { parent, chosen, message, pictures, reasoning, model, note } = node ?? {};
  const placed = at === 0 ? parent === -1 : Number.isInteger(parent) && parent >= 0 && parent < at &&
    isMessage(message ?? {});
  return placed && arePictures(pictures) && [reasoning, model, note].every(isText) &&
    (chosen === undefined || (Number.isInteger(chosen) && nodes[chosen]?.parent === at));
}

// A conversation of its own from what the export as JSON wrote. Throws an Error that says what is wrong.
export function imported(source) {
  let plain;
  try { plain = JSON.parse(source); } catch (error) {
    throw new Error(`it is not valid JSON: ${error.message}`);
  }
  const { title, system, nodes } = plain ?? {};
  if (!isText(title) || !isText(system) || !Array.isArray(nodes) || !nodes.length)
    throw new Error("it is not a chat that this page exported");
  const wrong = nodes.findIndex((node, at) => !isNode(node, at, nodes));
  if (wrong >= 0) throw new Error(`message ${wrong} of it is damaged`);
  return new Conversation({ title, system, nodes });
}
