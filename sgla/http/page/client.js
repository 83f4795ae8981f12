// Requests to the server.

let key = "";

export function useKey(given) { key = given; }

export class ServerError extends Error {
  constructor(status, detail) {
    super(detail.message);
    this.note = [status && `HTTP ${status}`, detail.code,
      detail.param && `field ${detail.param}`].filter(Boolean).join(" · ");
    this.status = status;
  }
}

// A promise whose failure, but for one that the reader asked for, has a message that says what it means.
const named = (message, promise) =>
  promise.catch((error) => { throw error.name === "AbortError" ? error : new Error(message); });

export async function call(path, body, signal) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  const response = await named("The server does not answer.",
    fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal }));
  if (response.ok) return response;
  const text = await response.text();
  let detail = { message: text || response.statusText };
  try { detail = JSON.parse(text).error ?? detail; } catch { /* not JSON: shown as it came */ }
  throw new ServerError(response.status, detail);
}

// The JSON of each "data:" line of an event stream.
export async function* events(response) {
  let rest = "";
  for await (const piece of chunks(response.body.pipeThrough(new TextDecoderStream()))) {
    const lines = (rest + piece).split("\n");
    rest = lines.pop();
    for (const line of lines)
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}

async function* chunks(stream) { // not every browser can iterate over a stream
  const reader = stream.getReader();
  for (;;) {
    const { done, value } = await named("The connection broke before the answer was complete.",
      reader.read());
    if (done) return;
    yield value;
  }
}
