// Whether the server is there, and how busy it is, from its health and metrics: polled, and not logged by the
// server.
import { $ } from "./dom.js";

const EVERY = 1000, LATE = 5000; // milliseconds
const rates = [];
let before = null;

function rate(now, name) {
  return before ? Math.max(0, now[name] - before[name]) * 1000 / (now.at - before.at) : 0;
}

async function measure() {
  const text = await (await fetch("metrics", { signal: AbortSignal.timeout(LATE) })).text(), found = {};
  for (const [, name, value] of text.matchAll(/^sgla:(\w+)\{[^}]*\} (\S+)$/gm)) found[name] = Number(value);
  return { ...found, at: performance.now() };
}

function draw(now) {
  rates.push(rate(now, "generation_tokens_total"));
  if (rates.length > 61) rates.shift();
  const top = Math.max(...rates, 1);
  const points = rates.map((value, index) =>
    `${61 - rates.length + index} ${(19 - 18 * value / top).toFixed(2)}`);
  document.querySelector("#spark path").setAttribute("d", `M${points.join("L")}`);
  const pages = (tokens) => Math.round(tokens / now.page_size);
  const share = (tokens) => `${100 * tokens / now.max_total_num_tokens}%`;
  $("out").textContent = rates.at(-1).toFixed(1);
  $("in").textContent = rate(now, "prompt_tokens_total").toFixed(1);
  $("running").textContent = now.num_running_reqs;
  $("waiting").textContent = now.num_queue_reqs;
  $("hits").textContent = `${(100 * now.cache_hit_rate).toFixed(0)} %`;
  $("kv").textContent = [now.kv_used_tokens, now.kv_evictable_tokens,
    now.max_total_num_tokens].map(pages).join(" · ");
  const guesses = "spec_verify_calls_total" in now, steps = rate(now, "spec_verify_calls_total");
  for (const each of document.querySelectorAll(".guesses")) each.hidden = !guesses;
  if (steps) $("accepted").textContent = (1 + rate(now, "spec_accepted_tokens_total") / steps).toFixed(2);
  $("held").style.width = share(now.kv_used_tokens);
  $("kept").style.width = share(now.kv_evictable_tokens);
}

// Tell `seen` the server's phase each second, null if it does not answer.
export async function watch(seen) {
  try {
    const { phase } = await (await fetch("health/live", { signal: AbortSignal.timeout(LATE) })).json();
    await seen(phase);
    if (!document.hidden) {
      const now = await measure();
      if (now.page_size) draw(now);
      before = now;
    }
  } catch {
    await seen(null);
    before = null;
  }
  setTimeout(() => watch(seen), EVERY);
}
