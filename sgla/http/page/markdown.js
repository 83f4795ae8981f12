// What a model writes, as elements: Markdown, code, tables and math. Markup of the model's own is shown as
// text.
/* global marked, DOMPurify, hljs, katex */
import { make } from "./dom.js";

const BELOW = 2; // headings of the page are above those of an answer
const MOST_CODE = 50_000, MOST_MATH = 5_000; // characters; longer ones stay plain
const ALLOWED = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "div", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol",
      "p", "pre", "span",
    "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["align", "class", "href", "start", "title"],
  ADD_URI_SAFE_ATTR: ["align", "start"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  RETURN_DOM_FRAGMENT: true,
};

const escaped = (text) => text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
const math = (kind, text) => `<${kind} class="math">${escaped(text)}</${kind}>`;

// $$...$$ and \[...\] on lines of their own; within a line also \(...\) and $...$, which sums of money are
// not.
const MATH = [
  {
    name: "mathBlock",
    level: "block",
    start: (source) => source.match(/\$\$|\\\[/)?.index,
    tokenizer(source) {
      const found = /^ {0,3}(?:\$\$([^]{1,5000}?)\$\$|\\\[([^]{1,5000}?)\\\])[ \t]*(?:\n|$)/.exec(source);
      return found ? { type: "mathBlock", raw: found[0], text: (found[1] ?? found[2]).trim() } : undefined;
    },
    renderer: ({ text }) => math("div", text),
  },
  {
    name: "mathInline",
    level: "inline",
    start: (source) => source.match(/\$|\\[([]/)?.index,
    tokenizer(source) {
      const found = /^(?:\$\$([^]{1,5000}?)\$\$|\\\[([^]{1,5000}?)\\\]|\\\(([^]{1,5000}?)\\\)|\$(?!\s)((?:[^$\n\\]|\\.){1,2000}?)(?<!\s)\$(?!\d))/.exec(source);
      return found ? { type: "mathInline", raw: found[0],
        text: found.slice(1).find((part) => part !== undefined) } : undefined;
    },
    renderer: ({ text }) => math("span", text),
  },
];

const markdown = new marked.Marked({
  gfm: true,
  extensions: MATH,
  renderer: {
    html: ({ text, block }) =>
      (/^<br\s*\/?>$/i.test(text) ? "<br>" : block ? `<p>${escaped(text)}</p>` : escaped(text)),
    code: ({ text, lang }) =>
      `<pre><code class="language-${escaped((lang ?? "").trim().split(/\s/)[0])}">${escaped(text)}</code></pre>`,
    // Nothing is loaded from elsewhere.
    image({ href, text }) { return `<a href="${escaped(href)}">${escaped(text || href)}</a>`; },
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

function fragment(html) { return DOMPurify.sanitize(html, ALLOWED); }

function block(token, links) {
  const tokens = Object.assign([token], { links });
  const element = make("div", { className: "block" }, fragment(markdown.parser(tokens)));
  for (const link of element.querySelectorAll("a")) Object.assign(link,
    { target: "_blank", rel: "noopener noreferrer" });
  for (const heading of element.querySelectorAll("h1, h2, h3, h4, h5, h6")) heading.ariaLevel =
    Number(heading.tagName[1]) + BELOW;
  for (const code of element.querySelectorAll("pre > code")) dress(code);
  for (const table of element.querySelectorAll("table")) {
    const frame = make("div", { className: "scroll", tabIndex: 0, role: "group", ariaLabel: "Table" });
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const formula of element.querySelectorAll(".math")) typeset(formula);
  return element;
}

function dress(code) {
  const language = code.className.replace("language-", ""), text = code.textContent;
  if (hljs.getLanguage(language) && text.length < MOST_CODE)
    code.replaceChildren(fragment(hljs.highlight(text, { language, ignoreIllegals: true }).value));
  Object.assign(code.parentElement,
    { tabIndex: 0, role: "group", ariaLabel: language ? `Code, ${language}` : "Code" });
  code.parentElement.before(make("div", { className: "bar" }, make("span", { textContent: language }),
    make("button", { type: "button", className: "small copy", textContent: "Copy",
      ariaLabel: "Copy the code" })));
}

function typeset(formula) {
  const text = formula.textContent;
  if (text.length > MOST_MATH) return;
  try {
    katex.render(text, formula,
      { displayMode: formula.tagName === "DIV", maxSize: 20, maxExpand: 200, strict: "ignore" });
  } catch { formula.textContent = text; }
}

// Make `old` look like `now` and change only what differs, so that a selection in it, or how far it is
// scrolled, stays.
function patch(old, now) {
  if (old.isEqualNode(now)) return;
  if (old.nodeType === Node.TEXT_NODE && now.nodeType === Node.TEXT_NODE) {
    if (now.data.startsWith(old.data)) old.appendData(now.data.slice(old.data.length));
    else old.data = now.data;
  } else if (old.cloneNode(false).isEqualNode(now.cloneNode(false)) && !old.matches(".math")) {
    patchChildren(old, now);
  } else old.replaceWith(now);
}

function patchChildren(old, now) {
  const had = [...old.childNodes], have = [...now.childNodes];
  have.forEach((node, index) => (index < had.length ? patch(had[index], node) : old.append(node)));
  for (const node of had.slice(have.length)) node.remove();
}

// Markdown that grows: blocks that have not changed are not touched.
export class MarkdownView {
  constructor(target) {
    this.target = target;
    this.sources = [];
  }

  show(text) {
    let tokens;
    try {
      tokens = markdown.lexer(text);
    } catch { // nested too deep
      this.sources = [];
      this.target.replaceChildren(make("div", { className: "block plain", textContent: text }));
      return;
    }
    const blocks = tokens.filter(({ type }) => type !== "space" && type !== "def");
    blocks.forEach((token, index) => {
      if (this.sources[index] === token.raw) return;
      this.sources[index] = token.raw;
      const made = block(token, tokens.links), had = this.target.children[index];
      if (had) patchChildren(had, made);
      else this.target.append(made);
    });
    this.sources.length = blocks.length;
    while (this.target.children.length > blocks.length) this.target.lastElementChild.remove();
  }

  // The text of a block, as a screen reader should say it.
  said(index) {
    const copy = this.target.children[index].cloneNode(true);
    for (const part of copy.querySelectorAll(".katex-html, .bar, annotation")) part.remove();
    return copy.textContent;
  }
}
