// Elements of the page.

export const $ = (id) => document.getElementById(id);

// An element with properties and children; strings become text nodes, never markup.
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export function labelled(text, control) { return make("label", {}, text, control); }

export function button(text, action, properties = {}) {
  return make("button",
    { type: "button", className: "small", textContent: text, onclick: action, ...properties });
}

// Put text on the clipboard. Browsers have navigator.clipboard on https and localhost only; elsewhere a
// selected field does it.
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = make("textarea", { value: text, readOnly: true, className: "hidden" }),
    had = document.activeElement;
  const selection = getSelection(), range = selection.rangeCount ? selection.getRangeAt(0) : null;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  had?.focus();
  if (range) { selection.removeAllRanges(); selection.addRange(range); }
  if (!done) throw new Error("the browser did not copy");
}

// Copy, and tell on the button whether it worked.
export async function copyBy(control, text) {
  const name = control.textContent;
  control.textContent = await copyText(text).then(() => "Copied", () => "Not copied");
  setTimeout(() => { control.textContent = name; }, 1500);
}

export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url));
}
