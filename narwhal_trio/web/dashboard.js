"use strict";
// Everything that comes from the router is shown as text (textContent), never as markup.

const KEY = "narwhal-admin-key";
const EVERY_MS = 2000;
const SHOWN = 200;
const EVENTS = 200;
const SPANS = [ // class, name, milestones that begin and end it
  ["t0", "body and queue", null, "admitted"],
  ["t1", "prefill seat", "admitted", "prefill_sent"],
  ["t2", "prefill", "prefill_sent", "prefilled"],
  ["t3", "hand-off", "prefilled", "decode_sent"],
  ["t4", "first token", "decode_sent", "first_token"],
  ["t5", "stream", "first_token", null],
];
const TERMINALS = ["served", "failed", "refused", "rejected", "expired", "cancelled", "invalid_requests"];

const at = (id) => document.getElementById(id);
const rows = (id) => at(id).querySelector("tbody");
let timer = 0, soon = 0, socket = null, retry = 1000, detail = null;

function element(name, text, classes) {
  const made = document.createElement(name);
  if (text !== undefined && text !== null) made.textContent = String(text);
  if (classes) made.className = classes;
  return made;
}

function fill(body, lines) { // lines: arrays of cells: text, [text, classes] or an element
  body.replaceChildren(...lines.map((cells) => {
    const row = element("tr");
    for (const cell of cells) {
      if (cell instanceof Node) {
        const holder = element("td");
        holder.append(cell);
        row.append(holder);
      } else if (Array.isArray(cell)) row.append(element("td", cell[0], cell[1]));
      else row.append(element("td", cell));
    }
    return row;
  }));
}

function seconds(value) {
  if (value === null || value === undefined) return "";
  if (Math.abs(value) < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return value < 100 ? `${value.toFixed(2)} s` : `${Math.round(value)} s`;
}

const whole = (value) => (value === null || value === undefined ? "" : Number(value).toLocaleString("en"));

function link(rid) {
  const made = element("button", rid.slice(0, 8), "id");
  made.type = "button";
  made.title = rid;
  made.addEventListener("click", () => { detail = rid; showDetail(); });
  return made;
}

async function ask(path) {
  const key = sessionStorage.getItem(KEY);
  const answer = await fetch(path, { headers: key ? { authorization: `Bearer ${key}` } : {}, cache: "no-store" });
  if (answer.status === 403 || answer.status === 401) throw new Error("denied");
  if (answer.status === 404 && path.startsWith("/narwhal/requests/")) return null;
  if (!answer.ok) throw new Error(`${path} answered ${answer.status}`);
  return answer.json();
}

// -- what is shown

function showState(state) {
  const admission = state.admission, limit = state.slo;
  const tiles = [
    ["open", state.open], ["queued", admission.queued], ["in service", `${whole(admission.inflight)} of ${whole(admission.limit)}`],
    ["offered", state.offered], ["served", state.served],
    ["of served within targets", state.served ? `${(100 * state.slo_met / state.served).toFixed(1)} %` : "–"],
    ["hand-offs open", state.kv_handoffs.open], ["TTFT, TPOT target", `${seconds(limit.ttft_s)}, ${seconds(limit.tpot_s)}`],
  ];
  at("tiles").replaceChildren(...tiles.map(([name, value]) => {
    const tile = element("div", name, "tile");
    tile.prepend(element("b", typeof value === "number" ? whole(value) : value));
    return tile;
  }));
  const residency = state.residency || {};
  fill(rows("engines"), Object.entries(state.engines).map(([iid, engine]) => {
    const holds = engine.holds.length ? [engine.holds.join(", "), "bad"] : engine.penalty_s ? ["on probation", "warn"] : ["live", "good"];
    const cache = residency[iid];
    const seats = (role) => [engine.seats[role] ? `${engine.residents[role]} of ${engine.seats[role]}` : engine.residents[role], "n"];
    return [
      iid, engine.role + (engine.pinned ? ", pinned" : ""), holds, seats("prefill"), seats("decode"),
      [whole(engine.prefill_tokens + engine.decode_tokens), "n"], [engine.profiled ? seconds(engine.prefill_s) : "–", "n"],
      [engine.correction.toFixed(2), "n"], cache ? (cache.known ? `${whole(cache.resident_blocks)} blocks` : cache.reason) : "–",
    ];
  }));
  fill(rows("outcomes"), TERMINALS.map((name) => [name.replace("_", " "), [whole(state[name]), "n"]]));
}

function timeline(request) {
  const marks = request.milestones || {}, total = request.duration_s || 0, line = element("div", null, "line");
  for (const [classes, name, from, to] of SPANS) {
    const start = from ? marks[from] : 0, end = to ? marks[to] : total;
    if (start === undefined || !total) continue;
    const stop = end === undefined ? (SPANS.some(([, , , later]) => later && marks[later] > start) ? start : total) : end;
    if (stop <= start && end === undefined) continue;
    const part = element("i", null, classes);
    part.style.left = `${100 * start / total}%`;
    part.style.width = `${Math.max(0, 100 * (Math.min(stop, total) - start) / total)}%`;
    part.title = `${name}: ${seconds(stop - start)}`;
    line.append(part);
  }
  return line;
}

function showRequests(requests) {
  at("running-count").textContent = `${whole(requests.running_total)}`;
  fill(rows("running"), requests.running.slice(0, SHOWN).map((r) => [
    link(r.id), r.endpoint + (r.stream ? ", stream" : ""), r.phase, [seconds(r.age_s), "n"], [seconds(r.deadline_left_s), "n"],
    r.prefill_iid || "", r.decode_iid || "", [whole(r.tokens), "n"], [r.attempts, "n"],
  ]));
  fill(rows("recent"), requests.recent.slice(0, SHOWN).map((r) => [
    link(r.id), [r.terminal === "completed" ? "completed" : `${r.terminal}: ${r.condition}`, r.terminal === "completed" ? "good" : "warn"],
    [r.status, "n"], [whole(r.input_len), "n"], [whole(r.output_len), "n"],
    [r.prefill_iid, r.decode_iid].filter(Boolean).join(" → ") + (r.attempts > 1 ? `, attempt ${r.attempts}` : ""),
    [seconds(r.duration_s), "n"], timeline(r),
  ]));
}

async function showDetail() {
  at("detail").hidden = detail === null;
  if (detail === null) return;
  at("detail-id").textContent = detail;
  const request = await ask(`/narwhal/requests/${encodeURIComponent(detail)}`).catch(() => null);
  const lines = [];
  for (const placement of request ? request.placements : []) for (const candidate of placement.candidates) {
    const price = candidate.price ? Object.entries(candidate.price).map(([name, value]) => `${name} ${value === null ? "∞" : +value.toFixed(4)}`) : [];
    lines.push([
      [placement.attempt, "n"], placement.role, candidate.engine, [candidate.verdict, candidate.verdict === "chosen" ? "good" : ""],
      price.join(", ") + (candidate.cached_tokens ? `, ${candidate.cached_tokens} tokens cached` : ""), candidate.why,
    ]);
  }
  fill(rows("placements"), lines.length ? lines : [[request ? "not placed yet" : "no longer known"]]);
  at("detail").scrollIntoView({ block: "nearest" });
}

async function showReadiness() {
  const ready = await (await fetch("/ready", { cache: "no-store" })).json();
  at("status").textContent = ready.status === "ready" ? "ready" : "not ready";
  at("status").className = `badge ${ready.status === "ready" ? "good" : "bad"}`;
  at("reason").textContent = ready.reason || "";
}

function note(event) {
  if (event.event === "request_milestone") return;
  const { event: name, at: instant, ...rest } = event;
  const text = Object.entries(rest).map(([key, value]) => `${key}=${typeof value === "object" ? JSON.stringify(value) : value}`).join(" ");
  at("events").prepend(element("li", `${Number(instant ?? 0).toFixed(2)}  ${name}  ${text}`));
  while (at("events").childElementCount > EVENTS) at("events").lastElementChild.remove();
}

// -- keeping it fresh

async function refresh() {
  clearTimeout(timer);
  try {
    const [state, requests] = await Promise.all([ask("/narwhal/state"), ask("/narwhal/requests"), showReadiness()]);
    at("login").hidden = true;
    at("page").hidden = false;
    at("model").textContent = state.model;
    showState(state);
    showRequests(requests);
    if (!socket) listen();
  } catch (problem) {
    if (problem.message === "denied") return logIn();
    at("status").textContent = "no answer";
    at("status").className = "badge bad";
    at("reason").textContent = problem.message;
  }
  timer = setTimeout(() => (document.hidden ? undefined : refresh()), EVERY_MS);
}

function refreshSoon() {
  if (!soon && !document.hidden) soon = setTimeout(() => { soon = 0; refresh(); }, 300);
}

function listen() {
  const key = sessionStorage.getItem(KEY), protocols = ["narwhal.events"];
  // A browser's WebSocket can send no header but this one.
  if (key) protocols.push("narwhal.key." + btoa(key).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, ""));
  socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/narwhal/events`, protocols);
  socket.onopen = () => { retry = 1000; feed("live", "good"); };
  socket.onmessage = (message) => {
    const event = JSON.parse(message.data);
    note(event);
    if (event.event !== "request_milestone") refreshSoon();
  };
  socket.onclose = () => {
    feed("no events", "warn");
    setTimeout(() => { socket = null; }, retry); // the next refresh listens again
    retry = Math.min(30000, retry * 2);
  };
}

function feed(text, classes) {
  at("feed").textContent = text;
  at("feed").className = `badge ${classes}`;
}

function logIn() {
  at("denied").textContent = sessionStorage.getItem(KEY) ? "this key is not accepted" : "";
  sessionStorage.removeItem(KEY);
  at("page").hidden = true;
  at("login").hidden = false;
  at("key").focus();
}

at("login").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = at("key").value.trim();
  at("key").value = "";
  if (!/^[\x21-\x7e]+$/.test(key)) { // nothing else can be a key, or go into a header
    at("denied").textContent = "this key is not accepted";
    return;
  }
  sessionStorage.setItem(KEY, key);
  refresh();
});
at("detail-close").addEventListener("click", () => { detail = null; showDetail(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
at("legend").replaceChildren(...SPANS.flatMap(([classes, name]) => [element("i", null, classes), document.createTextNode(name)]));
refresh();
