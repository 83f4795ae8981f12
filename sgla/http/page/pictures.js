// Pictures and videos that go with the next message: dropped, pasted or chosen. They are data URLs, since the
// page shows nothing from elsewhere.
import { $, button, make } from "./dom.js";

let waiting = []; // {name, url}
let able = []; // which kinds the model takes: "image", "video"

const read = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve({ name: file.name || "picture", url: reader.result });
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});

export function allow(kinds) {
  able = kinds;
  $("attach").hidden = !able.length;
  $("picture-files").accept = able.map((kind) => `${kind}/*`).join(",");
  waiting = waiting.filter(({ url }) => able.includes(kindOf(url)));
  draw();
}

export const kindOf = (url) => url.startsWith("data:video/") ? "video" : "image";

// The URLs of those that wait, which wait no longer.
export function takePictures() {
  const urls = waiting.map(({ url }) => url);
  waiting = [];
  draw();
  return urls;
}

export function arePictures() { return waiting.length > 0; }

export function shown(urls) {
  return make("div", { className: "pictures" }, ...urls.map((src, index) => kindOf(src) === "video"
    ? make("video", { src, controls: true, ariaLabel: `Video ${index + 1}` })
    : make("img", { src, alt: `Picture ${index + 1}` })));
}

function draw(note = "") {
  const remove = (picture) => { waiting = waiting.filter((each) => each !== picture); draw(); };
  const rows = waiting.map((picture) => {
    const control = button("", () => remove(picture), { ariaLabel: `Remove ${picture.name}`, title: "Remove" });
    control.append(kindOf(picture.url) === "video"
      ? make("video", { src: picture.url, muted: true, ariaLabel: picture.name })
      : make("img", { src: picture.url, alt: picture.name }));
    return control;
  });
  $("pictures").replaceChildren(...rows, note);
  $("pictures").hidden = !rows.length && !note;
}

async function add(files) {
  const pictures = [...files].filter(({ type }) => able.includes(type.split("/")[0]));
  if (!pictures.length) {
    const films = able.length && [...files].some(({ type }) => type.startsWith("video/"));
    draw(films ? "This model takes no videos." : able.length ? "This is no picture." : "This model takes no pictures.");
    return;
  }
  try {
    waiting.push(...await Promise.all(pictures.map(read)));
    draw();
  } catch (error) { draw(`The file cannot be read: ${error.message}`); }
}

$("attach").onclick = () => $("picture-files").click();
$("picture-files").onchange = () => {
  const files = [...$("picture-files").files];
  $("picture-files").value = ""; // so that the same file may be chosen again
  add(files);
};
$("prompt").onpaste = (event) => {
  if (!event.clipboardData.files.length) return;
  event.preventDefault();
  add(event.clipboardData.files);
};
const carries = (event) => event.dataTransfer?.types.includes("Files");
document.ondragover = (event) => { if (carries(event)) event.preventDefault(); };
document.ondrop = (event) => {
  if (!carries(event)) return;
  event.preventDefault(); // or the browser would leave the page for the file
  add(event.dataTransfer.files);
};
