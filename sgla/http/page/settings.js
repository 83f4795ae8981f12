// The panel of settings: the fields of a request.
import { $, button, labelled, make } from "./dom.js";

const NUMBERS = [
  ["temperature", 0.1], ["top_p", 0.05], ["top_k", 1], ["min_p", 0.01], ["max_tokens", 1], ["seed", 1],
  ["presence_penalty", 0.1], ["frequency_penalty", 0.1], ["repetition_penalty", 0.05],
  ["no_repeat_ngram_size", 1],
];
const PENALTIES = ["presence_penalty", "frequency_penalty", "repetition_penalty"];
const CITY = {
  type: "object", properties: { city: { type: "string" }, population: { type: "integer" } },
  required: ["city", "population"], additionalProperties: false,
};
const WEATHER = {
  type: "function",
  function: {
    name: "weather", description: "The weather in a city.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"],
      additionalProperties: false },
  },
};
const EXAMPLES = [["schema", CITY, "of a schema"], ["tools", [WEATHER], "of tools"]];

const AGAIN = 0.6; // temperature of a retry where the answer before it was greedy

let known = {}; // what holds where the page sends nothing else
let usual = {}; // fields that the page sends if nobody says otherwise

for (const [name, step] of NUMBERS)
  $("sampling").append(labelled(name,
    make("input", { id: name, type: "number", step, placeholder: "default" })));

for (const [id, example, what] of EXAMPLES) {
  const text = JSON.stringify(example, null, 2);
  $(id).placeholder = text;
  $(id).after(button("Use the example", () => { $(id).value = text; $(id).focus(); },
    { ariaLabel: `Use the example ${what}` }));
}

// What the server says about its model: /get_model_info.
export function tell({ about, max_model_len, preferred_sampling_params, chat_params, sampling_sources }) {
  usual = chat_params;
  const values = known = { ...preferred_sampling_params, ...usual };
  for (const [name] of NUMBERS) $(name).placeholder = values[name] ?? "default";
  $("about").textContent = about;
  $("context").textContent = `${max_model_len} tokens`;
  const plain = Object.entries(values).filter(([, value]) => typeof value !== "object");
  const rows = plain.flatMap(([name, value]) => {
    const source = sampling_sources[name] ?? "the page";
    return [make("dt", { textContent: name }),
      make("dd", { title: `from ${source}` }, `${value} `, make("small", { textContent: source }))];
  });
  $("defaults").replaceChildren(...rows);
}

function parsed(id, what) {
  const text = $(id).value.trim();
  if (!text) return undefined;
  try { return JSON.parse(text); } catch (error) {
    throw new Error(`${what} is not valid JSON: ${error.message}`);
  }
}

// The body of a chat request; `again`: another answer than the one there is. Throws an Error if a field
// cannot be read.
export function fields(messages, again) {
  const body = { ...usual, model: $("model").value, stream: true, stream_options: { include_usage: true } };
  const system = $("system").value.trim();
  body.messages = [...(system ? [{ role: "system", content: system }] : []), ...messages];
  for (const [name] of NUMBERS) {
    if ($(name).validity.badInput) throw new Error(`${name} is not a number`);
    if ($(name).value !== "") body[name] = Number($(name).value);
  }
  if (again && (body.temperature ?? known.temperature) === 0)
    Object.assign(body, { temperature: AGAIN, seed: Math.floor(Math.random() * 2 ** 31) });
  const plain = !$("schema").value.trim() && !$("tools").value.trim();
  if (!plain) for (const name of PENALTIES) if ($(name).value === "") delete body[name]; // they spoil JSON
  const stop = $("stops").value.split("\n").filter(Boolean);
  if (stop.length) body.stop = stop;
  const schema = parsed("schema", "The JSON schema");
  if (schema !== undefined)
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  const tools = parsed("tools", "The list of tools");
  if (tools !== undefined) Object.assign(body, { tools, tool_choice: $("choice").value });
  return body;
}
