// The page of a run. It asks the coordinator every other second, and puts what it hears into the
// document: texts as texts, pictures as parsed SVG. No markup is ever made from a text.
"use strict";

const POLL_MILLISECONDS = 2000;
const $ = (id) => document.getElementById(id);
let token = "";
let run = "";
let seen = null; // newest step whose pictures are shown
let roundStep = null;
let page = { step: null }; // of the samples, as the coordinator answered

async function ask(path) {
  const answer = await fetch(`/api/${path}`, { headers: { authorization: `Bearer ${token}` } });
  const value = await answer.json();
  if (!answer.ok) throw new Error(value.error ?? `status ${answer.status}`);
  return value;
}

function make(name, className, ...children) {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.append(...children.map((child) => child instanceof Node ? child : String(child)));
  return element;
}

// A picture that the coordinator has drawn and escaped. Scripts in it could not run: the policy
// of this page forbids them, and a parsed document does not start any.
function show(id, picture) {
  const place = typeof id === "string" ? $(id) : id;
  if (!picture) return place.replaceChildren(make("p", "note", "nothing to show yet"));
  const inside = `<div xmlns="http://www.w3.org/1999/xhtml">${picture.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ')}</div>`;
  const parsed = new DOMParser().parseFromString(inside, "application/xhtml+xml");
  const drawing = parsed.querySelector("svg");
  if (!drawing || parsed.querySelector("parsererror, script, foreignObject")) {
    return place.replaceChildren(make("p", "note", "the picture cannot be shown"));
  }
  place.replaceChildren(document.importNode(drawing, true));
}

function number(value, digits = 0) {
  return value === null || value === undefined ? "–" : value.toFixed(digits);
}

function showNow(now) {
  $("run").textContent = now.run_id;
  document.title = `${now.run_id} · RollPacker`;
  $("state").hidden = false;
  $("state").textContent = `${now.mode} · ${now.state}`;
  const planned = now.planned_steps ? ` of ${now.planned_steps}` : "";
  $("subtitle").textContent = `${now.step}${planned} steps · ${now.prompts_per_step} prompts × ${now.responses_per_prompt} responses per step`;
  const alarms = [...(now.failure ? [now.failure] : []), ...now.alarms];
  $("alarms").replaceChildren(...alarms.map((text) => make("li", "", text)));
  $("queue-length").textContent = now.queue_length;
  show("queue", now.queue);
  const progress = now.progress;
  $("progress").hidden = !progress;
  if (progress) {
    $("meter").value = progress.launched ? progress.finished / progress.launched : 0;
    $("phase").textContent = progress.launched
      ? `step ${progress.step} (${progress.round_kind}, level ${progress.level}) ${progress.phase}: ${progress.finished} of ${progress.launched} groups finished, ${progress.kept} to keep`
      : `step ${progress.step} ${progress.phase}`;
  }
}

function showOverview(overview) {
  $("figures").replaceChildren(...overview.figures.map((figure) => make("div", "card figure",
    make("div", "name", figure.name), make("div", "value", figure.value), make("p", "note", figure.note))));
  $("kinds").replaceChildren(...overview.kinds.map((kind) =>
    make("li", "", make("span", `key round ${kind.css}`), kind.label)));
  for (const name of ["reward", "timeline", "histogram", "lengths"]) show(name, overview[name]);
  $("curves").replaceChildren(...overview.curves.map((curve) => {
    const place = make("div", "");
    show(place, curve.picture);
    return make("section", "card", make("h3", "", curve.title), make("p", "note", curve.note), place);
  }));
}

function showWorkers(workers) {
  $("workers").replaceChildren(...workers.map((worker) => make("tr", "",
    make("td", "words", worker.worker_id), make("td", "words", worker.kind),
    make("td", "", number(worker.running)), make("td", "", number(worker.waiting)),
    make("td", "", number(worker.slots)),
    make("td", "", worker.kv_usage === null ? "–" : `${number(100 * worker.kv_usage)} %`))));
}

function turn(role, text) {
  return make("div", role === "assistant" ? "turn assistant" : "turn", make("div", "role", role), make("pre", "", text));
}

function sample(one) {
  const reward = one.reward === null ? "no reward" : `reward ${number(one.reward, 2)}`;
  const facts = [reward, `advantage ${number(one.advantage, 2)}`, `${one.token_count} tokens`,
    `ended by ${one.finish_reason}`, `draw ${one.draw}, response ${one.index}`, `level ${one.level}, first launched in step ${one.first_step}`];
  const verdict = make("span", `verdict ${one.reward > 0 ? "right" : ""}`, one.verdict ?? "not scored");
  return make("article", "sample", make("p", "facts", verdict, facts.join(" · ")),
    ...one.turns.map(({ role, text }) => turn(role, text)));
}

async function showRound(step) {
  const round = await ask(`runs/${encodeURIComponent(run)}/rounds/${step}`);
  roundStep = step;
  $("round-step").textContent = step;
  $("older").disabled = step <= 0;
  $("newer").disabled = seen === null || step >= seen;
  show("round", round.picture);
}

async function showSamples(step, start) {
  const found = await ask(`runs/${encodeURIComponent(run)}/samples/${step}?start=${start}`);
  page = found;
  $("sample-step").value = step;
  $("back").disabled = found.previous === null;
  $("forth").disabled = found.next === null;
  $("samples").replaceChildren(...found.samples.filter((one) => one.index !== null).map(sample));
}

async function refresh() {
  const runs = await ask("runs");
  if (runs.length === 0) { $("subtitle").textContent = "no run yet"; return; }
  if (!runs.some((one) => one.run_id === run)) choose(runs[0].run_id);
  $("runs").replaceChildren(...runs.map((one) => {
    const option = make("option", "", one.run_id);
    option.value = one.run_id;
    option.selected = one.run_id === run;
    return option;
  }));
  showNow(await ask(`runs/${encodeURIComponent(run)}`));
  showWorkers(await ask("workers"));
  const overview = await ask(`runs/${encodeURIComponent(run)}/overview`);
  if (overview.last_step === seen) return;
  const first = page.step === null;
  seen = overview.last_step;
  showOverview(overview);
  if (seen === null) return;
  if ($("follow").checked || roundStep === null || roundStep > seen) await showRound(seen);
  if (first || page.step > seen) await showSamples(seen, 0);
}

function choose(name) {
  run = name;
  seen = roundStep = null;
  page = { step: null };
}

async function guarded(work) {
  try {
    await work();
    $("error").hidden = true;
  } catch (error) {
    $("error").hidden = false;
    $("error").textContent = error.message;
  }
}

async function poll() {
  await guarded(refresh);
  setTimeout(poll, POLL_MILLISECONDS);
}

// The token comes behind the # of the address, which no server and no log ever sees.
function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem("token", given);
    history.replaceState(null, "", location.pathname);
  }
  token = sessionStorage.getItem("token") ?? "";
}

function start() {
  takeToken();
  $("runs").addEventListener("change", (event) => { choose(event.target.value); guarded(refresh); });
  const look = (step) => { $("follow").checked = false; return guarded(() => showRound(step)); };
  $("older").addEventListener("click", () => look(roundStep - 1));
  $("newer").addEventListener("click", () => look(roundStep + 1));
  $("follow").addEventListener("change", () => seen !== null && guarded(() => showRound(seen)));
  $("browse").addEventListener("submit", (event) => event.preventDefault());
  $("sample-step").addEventListener("change", (event) => guarded(() => showSamples(Number(event.target.value), 0)));
  $("back").addEventListener("click", () => guarded(() => showSamples(page.step, page.previous)));
  $("forth").addEventListener("click", () => guarded(() => showSamples(page.step, page.next)));
  window.addEventListener("hashchange", () => { takeToken(); guarded(refresh); });
  poll();
}

start();
