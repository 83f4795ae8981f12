// The page: its bars, its list of conversations, its keys.
import { call, useKey } from "./client.js";
import { $, button, copyBy, download, make } from "./dom.js";
import { watch } from "./live.js";
import { allow, arePictures, takePictures } from "./pictures.js";
import { tell } from "./settings.js";
import { Conversation, imported, load, remove, save } from "./store.js";
import { ask, conversation, listen, open, running } from "./talk.js";

const GONE =
  "The server does not answer. Your conversations stay in this browser; the page tries again every second.";
const PHASES = {
  dead: "The server's engine has died. It has to be started again; its log says why.",
  draining: "The server is shutting down and takes no new requests.",
};
let link = "down"; // down | up | locked (a key is needed)

// --- the server

function state(kind, text, banner = "") {
  $("state").className = kind;
  $("state").textContent = text;
  if ($("banner").textContent !== banner) $("banner").textContent = banner;
  $("banner").hidden = !banner;
}

async function connect() {
  const { data } = await (await call("v1/models")).json();
  const chosen = $("model").value;
  $("model").replaceChildren(...data.map(({ id }) => make("option", { textContent: id })));
  if (data.some(({ id }) => id === chosen)) $("model").value = chosen;
  await describe();
  link = "up";
  state("up", "ready");
}

// What the chosen model is.
async function describe() {
  const name = encodeURIComponent($("model").value);
  const info = await (await call(`get_model_info?model=${name}`)).json();
  tell(info);
  allow(["image", "video"].filter((kind) => info[`has_${kind}_understanding`] === true));
}

async function seen(phase) {
  if (phase !== "ready") {
    link = link === "locked" ? link : "down";
    state("down", phase ?? "no answer",
      phase ? PHASES[phase] ?? `The model is not loaded yet (${phase}).` : GONE);
  } else if (link === "down") await connect().catch(lost);
  else if (link === "up") state("up", "ready");
}

function lost(error) {
  link = error.status === 401 ? "locked" : "down";
  state("down", error.message, link === "down" ? error.message : "");
  if (link === "locked") unlock(error.message);
}

function unlock(message) {
  $("wanted").textContent = message;
  if (!$("locked").open) $("locked").showModal();
}

// --- conversations

// Of a conversation that is shown or answered, the one that is.
function inUse(each) {
  if (each.id === conversation.id) return conversation;
  return running?.conversation.id === each.id ? running.conversation : each;
}

async function list() {
  const rows = (await load()).map((each) => {
    const shown = each.id === conversation.id;
    const row = make("li", {},
      button(each.title, () => { close(); open(inUse(each)); list(); },
        { className: "title", title: each.title }));
    if (shown) row.firstChild.setAttribute("aria-current", "true");
    row.append(button("Rename", () => rename(each, row), { ariaLabel: `Rename ${each.title}` }),
      button("Delete", () => forget(each), { ariaLabel: `Delete ${each.title}` }));
    return row;
  });
  $("kept-chats").replaceChildren(...rows);
  $("no-chats").hidden = rows.length > 0;
}

function rename(each, row) {
  const field = make("input", { value: each.title, ariaLabel: "Name of the chat", maxLength: 200 });
  const done = async (take) => {
    field.onblur = null;
    const title = field.value.trim();
    if (take && title) {
      const live = inUse(each);
      live.title = title;
      await save(live);
    }
    await list();
  };
  field.onblur = () => done(true);
  field.onkeydown = (event) => {
    if (event.key === "Enter") done(true);
    if (event.key === "Escape") { event.stopPropagation(); done(false); }
  };
  row.replaceChildren(field);
  field.select();
}

async function forget(each) {
  if (!confirm(`Delete “${each.title}”? It is kept in this browser only.`)) return;
  if (running?.conversation.id === each.id) running.abandon();
  await remove(each.id);
  if (each.id === conversation.id) open(new Conversation());
  list();
}

function fresh() {
  close();
  open(new Conversation());
  list();
}

const file = () => conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 50) || "chat";
$("as-json").onclick = () =>
  download(`${file()}.json`, "application/json", JSON.stringify(conversation, null, 2));
$("as-markdown").onclick = () => download(`${file()}.md`, "text/markdown", conversation.markdown());

async function take() {
  const refused = [];
  let latest = null;
  for (const chosen of $("files").files) {
    try {
      await save(latest = imported(await chosen.text()));
    } catch (error) { refused.push(`${chosen.name} was not imported: ${error.message}.`); }
  }
  $("files").value = ""; // so that the same file may be chosen again
  $("refused").textContent = refused.join(" ");
  $("refused").hidden = !refused.length;
  if (latest) { open(latest); list(); }
}

$("import").onclick = () => $("files").click();
$("files").onchange = take;
$("model").onchange = () => describe().catch(lost);

// --- controls

function grow() {
  $("prompt").style.height = "auto";
  $("prompt").style.height = `${$("prompt").scrollHeight + 2}px`;
}

function close() {
  for (const control of document.querySelectorAll(".drawer")) toggle(control, false);
}

function toggle(control, shown) {
  $(control.getAttribute("aria-controls")).classList.toggle("open", shown);
  control.setAttribute("aria-expanded", shown);
  if (shown) $(control.getAttribute("aria-controls")).focus();
}

function closeByKey(control) {
  close();
  control.focus();
}

for (const control of document.querySelectorAll(".drawer")) {
  control.onclick = () => {
    const shown = control.getAttribute("aria-expanded") !== "true";
    close();
    toggle(control, shown);
  };
}

$("ask").onsubmit = (event) => {
  event.preventDefault();
  const text = $("prompt").value.trim();
  if (!(text || arePictures()) || running) return;
  $("prompt").value = "";
  grow();
  ask(text, takePictures());
};
$("prompt").oninput = grow;
$("prompt").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
};
$("talk").addEventListener("click", ({ target }) => {
  if (target.matches(".copy")) copyBy(target, target.parentElement.nextElementSibling.textContent);
});
document.querySelector("main").onpointerdown = close;
$("stop").onclick = () => running?.abort.abort();
$("fresh").onclick = fresh;
$("key").onclick = () => unlock("It is kept in this page's memory only.");
$("later").onclick = () => $("locked").close();
$("locked").onsubmit = () => { useKey($("secret").value); link = "down"; };
document.onkeydown = (event) => {
  const drawer = document.querySelector(".drawer[aria-expanded=true]");
  if (event.key === "Escape" && !$("locked").open) {
    if (drawer) closeByKey(drawer); else running?.abort.abort();
  }
  if (event.altKey && event.code === "KeyN") { event.preventDefault(); fresh(); }
};

function paint(theme) { document.documentElement.dataset.theme = theme; }
$("theme").onchange = () => { paint($("theme").value); localStorage.setItem("theme", $("theme").value); };
$("theme").value = localStorage.getItem("theme") ?? "system";
paint($("theme").value);

listen({ changed: list, lost });
list();
watch(seen);
