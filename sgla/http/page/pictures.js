// Pictures that go with the next message: dropped, pasted or chosen. They are data URLs, since the page shows
// nothing from elsewhere.
import { $, button, make } from "./dom.js";

let waiting = []; // {name, url}
let able = false; // whether the model takes any

const read = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve({ name: file.name || "picture", url: reader.result });
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});

export function allow(model) {
  able = model;
  $("attach").hidden = !able;
  if (!able) waiting = [];
  draw();
}

// The URLs of those that wait, which wait no longer.
export function takePictures() {
  const urls = waiting.map(({ url }) => url);
  waiting = [];
  draw();
  return urls;
}

export function arePictures() { return waiting.length > 0; }

export function shown(urls) {
  return make("div", { className: "pictures" }, ...urls.map((src, index) =>
    make("img", { src, alt: `Picture ${index + 1}` })));
}

function draw(note = "") {
  const remove = (picture) => { waiting = waiting.filter((each) => each !== picture); draw(); };
  const rows = waiting.map((picture) => {
    const control = button("", () => remove(picture), { ariaLabel: `Remove ${picture.name}`, title: "Remove" });
    control.append(make("img", { src: picture.url, alt: picture.name }));
    return control;
  });
  $("pictures").replaceChildren(...rows, note);
  $("pictures").hidden = !rows.length && !note;
}

async function add(files) {
  const pictures = [...files].filter(({ type }) => type.startsWith("image/"));
  if (!able || !pictures.length) {
    draw(able ? "This is no picture." : "This model takes no pictures.");
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
