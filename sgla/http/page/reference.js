// The API's reference: the viewer over openapi.json, which a server with keys gives to whoever has one.
const $ = (id) => document.getElementById(id);

async function show(key) {
  const response = await fetch("openapi.json", { headers: key ? { Authorization: `Bearer ${key}` } : {} });
  const answer = await response.json();
  $("locked").hidden = response.ok;
  $("reference").hidden = !response.ok;
  if (!response.ok) {
    $("wanted").textContent = answer.error.message;
    $("secret").focus();
    return;
  }
  await customElements.whenDefined("openapi-explorer");
  await $("reference").loadSpec({ ...answer,
    servers: [{ url: new URL(".", location).href.replace(/\/$/, "") }] });
  const [scheme] = Object.keys(answer.components.securitySchemes);
  if (key) $("reference").setAuthenticationConfiguration(scheme, { token: key });
}

$("locked").onsubmit = (event) => {
  event.preventDefault();
  show($("secret").value);
};

function paint() {
  $("reference").setAttribute("bg-color", dark.matches ? "#14161b" : "#fff");
  $("reference").setAttribute("text-color", dark.matches ? "#e4e7ec" : "#1b1f27");
  $("reference").setAttribute("primary-color", dark.matches ? "#86a1ff" : "#3558d4");
}

const dark = matchMedia("(prefers-color-scheme: dark)");
dark.onchange = paint;
paint();
show("");
