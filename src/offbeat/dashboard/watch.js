
// The live page. What a model wrote is only ever put in as text (`textContent`), never as markup; HTML comes from the server alone, which
// escapes it. The address behind # says what is shown, so that a view can be linked to.

const VIEWS = { overview: "Overview", step: "Steps", rollouts: "Rollouts", timeline: "Time line", records: "Records", compare: "Compare" };
const POLL_MS = 2000;
const byId = id => document.getElementById(id);
const state = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
let runs = [], stamp = "", shown = {}, offset = 0, current = null, colour = "probability", listing = 0, reading = 0;

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter(child => child !== null && child !== ""));
  return element;
}
function get(address) {
  return fetch(address).catch(() => {
    throw new Error("The server of this page has ended, as it does with the run that started it; offbeat watch serves the page again.");
  });
}
async function ask(what, parameters = {}) {
  const asked = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined));
  const response = await get("/api/" + what + "?" + asked);
  const answer = await response.json().catch(() => ({ error: response.statusText }));
  if (!response.ok) throw new Error(answer.error || response.statusText);
  return answer;
}
function tell(problem) {
  byId("problem").hidden = !problem;
  byId("problem").textContent = problem ? problem.message : "";
}
function remember(changes) {
  Object.assign(state, changes);
  for (const name of Object.keys(state)) if (state[name] === "" || state[name] === null) delete state[name];
  history.replaceState(null, "", "#" + new URLSearchParams(state));
}
const number = (value, digits = 4) => value === null || value === undefined ? "–" : String(Number(value.toPrecision(digits)));
const signed = value => value === null || value === undefined ? "" : (value > 0 ? "+" : "") + number(value, 3);
const plural = (count, noun) => count.toLocaleString("en") + " " + noun + (count === 1 ? "" : "s");
const line = text => text.replace(/\s+/g, " ").trim();
function ago(seconds) {
  if (seconds < 90) return Math.max(0, Math.round(seconds)) + " s ago";
  return seconds < 5400 ? Math.round(seconds / 60) + " min ago" : seconds < 172800 ? Math.round(seconds / 3600) + " h ago"
    : Math.round(seconds / 86400) + " days ago";
}

// ---- runs and views

const trained = () => runs.filter(run => !run.is_evaluation);
async function showRuns() {
  runs = await ask("runs");
  const select = byId("run"), names = runs.map(run => run.name);
  if (!names.includes(state.run)) remember({ run: (trained()[0] || runs[0] || { name: "" }).name });
  if ([...select.options].map(option => option.value).join("\n") !== names.join("\n"))
    select.replaceChildren(...runs.map(run => make("option", { value: run.name }, run.name + (run.is_evaluation ? " (evaluation)" : ""))));
  select.value = state.run || "";
  const run = runs.find(each => each.name === state.run), pulse = byId("pulse");
  byId("name").textContent = run ? run.name : "no run yet";
  document.title = (run ? run.name + " · " : "") + "offbeat watch";
  if (!run) { pulse.textContent = "waiting for a run to begin"; return; }
  pulse.className = "pulse" + (run.is_live ? " live" : "");
  const step = run.is_evaluation ? "evaluation" : run.last_step !== null ? "step " + run.last_step
    : run.warm_up_step !== null ? "step " + run.warm_up_step + " of the warm-up" : "before its first step";
  const did = run.is_over ? ", ended " : run.is_live ? ", wrote " : ", interrupted, wrote ";
  pulse.textContent = step + did + ago(Date.now() / 1000 - run.changed_s);
}
async function showSubtitle() {
  const run = state.run, answer = await ask("overview", { run });
  if (run === state.run) byId("subtitle").textContent = answer.subtitle;
}
function showTabs() {
  byId("tabs").replaceChildren(...Object.entries(VIEWS).filter(([view]) => view !== "compare" || trained().length > 1).map(([view, title]) =>
    make("button", { type: "button", role: "tab", "aria-selected": String(view === state.view), onclick: () => openView(view) }, title)));
}
function openView(view) {
  remember({ view });
  refresh(true).catch(tell);
}
async function refresh(changed) {
  showTabs();
  for (const view of Object.keys(VIEWS)) byId(view).hidden = view !== state.view;
  if (!state.run || (!changed && shown[state.view] === stamp)) return;
  shown[state.view] = stamp;
  tell(null);
  if (state.view === "rollouts") await list(false);
  else if (state.view === "step") await showStep();
  else if (state.view === "compare") await compare();
  else {
    const run = state.run, view = state.view, answer = await ask(view, { run });
    if (run !== state.run || view !== state.view) return;
    if (answer.subtitle !== undefined) byId("subtitle").textContent = answer.subtitle;
    const open = [...byId(view).querySelectorAll("details[open] > summary")].map(each => each.textContent.replace(/ \(\d+\)$/, ""));
    byId(view).innerHTML = answer.html;
    for (const summary of byId(view).querySelectorAll("details > summary"))
      if (open.includes(summary.textContent.replace(/ \(\d+\)$/, ""))) summary.parentElement.open = true;
    attachCharts(byId(view));
  }
}
async function poll() {
  try {
    await showRuns();
    if (state.run) {
      const now = (await ask("stamp", { run: state.run })).stamp;
      if (now !== stamp) { stamp = now; await refresh(false); }
    }
  } catch (error) {
    tell(error);
    if (error instanceof TypeError) { stamp = ""; shown = {}; }  // no server: all is asked for again once it answers
  }
  setTimeout(poll, POLL_MS);
}
async function compare() {
  const named = trained().map(run => run.name), chosen = (state.runs ? state.runs.split("\n") : named.slice(0, 4)).filter(name => named.includes(name));
  byId("chosen").replaceChildren(...trained().map(run => {
    const box = make("input", { type: "checkbox", onchange: () => {
      const now = named.filter(name => name === run.name ? box.checked : chosen.includes(name));
      remember({ runs: now.slice(0, 8).join("\n") });
      compare().catch(tell);
    } });
    box.checked = chosen.includes(run.name);
    return make("label", {}, box, " " + run.name);
  }));
  if (!chosen.length) return byId("compared").replaceChildren(make("p", { class: "empty" }, "Choose the runs to compare."));
  const asked = new URLSearchParams(chosen.map(name => ["run", name]));
  const response = await get("/api/compare?" + asked), answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  byId("compared").innerHTML = answer.html;
  attachCharts(byId("compared"));
}

// ---- one step after the other

let stepping = 0, steps_known = [];
async function showStep(first) {
  const turn = ++stepping, run = state.run, answer = await ask("step", { run, step: state.step, first });
  if (turn !== stepping || run !== state.run) return;
  steps_known = answer.steps;
  const place = steps_known.indexOf(answer.step), slider = byId("slider");
  slider.max = Math.max(steps_known.length - 1, 0);
  slider.value = Math.max(place, 0);
  slider.disabled = steps_known.length < 2;
  byId("before").disabled = place <= 0;
  byId("after").disabled = place >= steps_known.length - 1;
  byId("at").textContent = steps_known.length ? "step " + answer.step + " of " + steps_known[steps_known.length - 1] : "no step yet";
  if (!first) byId("measured").replaceChildren(make("h3", {}, "Metrics ", make("small", {}, "and their change since the step before")), ...measured(answer.metrics));
  const cards = answer.groups.map(groupCard), box = byId("groups");
  box.querySelector(".more")?.remove();
  if (first) box.append(...cards);
  else if (cards.length) box.replaceChildren(...cards);
  else box.replaceChildren(make("p", { class: "empty" }, !steps_known.length ? "Nothing was recorded yet." : answer.step === 0
    ? "Step 0 is the evaluation before the first step." : "The rollouts of this step were not kept (telemetry.rollouts_every_steps)."));
  const shown_groups = (first || 0) + answer.groups.length;
  if (shown_groups < answer.num_groups) box.append(make("div", { class: "more" }, make("button", { type: "button",
    onclick: () => showStep(shown_groups).catch(tell) }, "show more of " + plural(answer.num_groups, "group"))));
}
function measured(metrics) {
  const folders = new Map();
  for (const each of metrics) {
    const [folder, ...rest] = each.name.split("/");
    if (!folders.has(folder)) folders.set(folder, []);
    folders.get(folder).push([rest.join("/") || folder, each]);
  }
  const first = ["reward", "eval", "train", "policy"], order = folder => (first.indexOf(folder) + first.length + 1) % (first.length + 1);
  return [...folders].sort(([one], [other]) => order(one) - order(other)).map(([folder, found]) => make("table", { class: "measured" }, make("caption", {}, folder),
    ...found.map(([name, each]) => make("tr", {}, make("th", { scope: "row", title: each.name },
        ...name.split("_").flatMap((part, at) => at ? ["_", make("wbr"), part] : [part])), make("td", {}, number(each.value)),
      make("td", { class: "change" }, each.value === null || each.before === null || each.value === each.before ? "" : signed(each.value - each.before))))));
}
const VERSION_COLOURS = ["--c1", "--c2", "--c3", "--evaluate", "--score", "--advantage"];
function versionColour(version) { // the same in all groups and steps
  return "color-mix(in srgb, var(" + VERSION_COLOURS[version % VERSION_COLOURS.length] + ") 36%, transparent)";
}
function groupCard(group) {
  const versions = [...new Set(group.samples.flatMap(each => each.versions).filter(each => each !== null))].sort((a, b) => b - a);
  return make("div", { class: "card" },
    make("div", { class: "head" }, make("h2", {}, group.prompt_id),
      make("span", { class: "fact" }, "admitted at version", make("b", {}, String(group.admitted_version))),
      group.answer ? make("span", { class: "fact" }, "answer", make("b", {}, line(group.answer).slice(0, 80))) : "",
      make("span", { class: "scale" }, "sampled by version", ...versions.flatMap(version => {
        const swatch = make("i");
        swatch.style.backgroundColor = versionColour(version);
        return [swatch, String(version)];
      }))),
    make("p", { class: "asked" }, line(group.prompt).slice(0, 400)),
    make("div", { class: "samples" }, ...group.samples.map(stepSample)));
}
function stepSample(each) {
  const text = make("p", { class: "tokens" });
  for (const [at, piece] of each.pieces.entries()) {
    const span = make("span", { class: each.versions[at] === null ? "gap" : "", title: each.versions[at] === null ? "" : "version " + each.versions[at] }, piece);
    if (each.versions[at] !== null) span.style.backgroundColor = versionColour(each.versions[at]);
    text.append(span);
  }
  return make("div", { class: "sample", onclick: () => { remember({ view: "rollouts", rollout: each.address }); refresh(true).catch(tell); } },
    make("div", { class: "facts" }, make("b", {}, number(each.reward)), make("span", {}, signed(each.advantage)),
      each.reason === "stop" ? "" : make("span", { class: "badge" }, each.reason.split(": ")[0]), each.agent), text);
}
function goTo(place) {
  if (place < 0 || place >= steps_known.length) return;
  // The newest step is not named, so that the page follows a run that goes on.
  remember({ step: place === steps_known.length - 1 ? "" : String(steps_known[place]) });
  showStep().then(() => tell(null)).catch(tell);
}
byId("slider").addEventListener("input", event => goTo(Number(event.target.value)));
byId("before").addEventListener("click", () => goTo(Number(byId("slider").value) - 1));
byId("after").addEventListener("click", () => goTo(Number(byId("slider").value) + 1));
document.addEventListener("keydown", event => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by || state.view !== "step" || ["INPUT", "SELECT"].includes(event.target.tagName)) return;
  event.preventDefault();
  goTo(Number(byId("slider").value) + by);
});

// ---- the list of rollouts

const filters = byId("filters");
const filled = () => Object.fromEntries([...new FormData(filters)].filter(([name, value]) => value !== "" && (name !== "order" || value !== "newest")));

async function list(more) {
  const turn = ++listing, run = state.run;
  offset = more ? offset : 0;
  const answer = await ask("rollouts", { run, offset, same_prompt: state.same_prompt, ...filled() });
  if (turn !== listing || run !== state.run) return;
  const items = answer.rollouts.map(item), box = byId("list");
  box.querySelector(".more")?.remove();
  if (more) box.append(...items); else { const top = box.scrollTop; box.replaceChildren(...items); box.scrollTop = top; }
  offset += answer.rollouts.length;
  if (offset < answer.total) box.append(make("div", { class: "more" }, make("button", { type: "button", onclick: () => list(true).catch(tell) },
    "show more")));
  if (!answer.total) box.append(make("div", { class: "more" }, answer.progress.num_rollouts ? "No rollout passes these filters."
    : "No rollouts were kept yet."));
  const { num_files, num_indexed, num_rollouts, damage } = answer.progress;
  byId("count").textContent = answer.total.toLocaleString("en") + " of " + num_rollouts.toLocaleString("en") + " rollouts"
    + (num_indexed < num_files ? ", reading step files: " + num_indexed + " of " + num_files : "")
    + (state.same_prompt ? ", of one prompt" : "") + (damage.length ? " · " + damage[0] : "");
  if (answer.reasons) showReasons(answer.reasons);
  if (num_indexed < num_files) setTimeout(() => { if (turn === listing && state.view === "rollouts" && !more) list(false).catch(tell); }, 1000);
  if (!state.rollout && answer.rollouts.length) await read(answer.rollouts[0].address, false);
  else if (state.rollout && (!current || current.address !== state.rollout || current.run !== run)) await read(state.rollout, false);
  mark();
}
function showReasons(reasons) {
  const select = filters.elements.reason, value = select.value || state.reason || "", names = [...new Set(reasons.map(([reason]) => reason))];
  const count = name => reasons.filter(([reason]) => reason === name).reduce((sum, each) => sum + each[2], 0);
  select.replaceChildren(make("option", { value: "" }, "in any way"), ...names.filter(Boolean).map(name =>
    make("option", { value: name }, name + " (" + count(name).toLocaleString("en") + ")")));
  select.value = names.includes(value) ? value : "";
}
function badge(status, reason) {
  if (status === "trained") return reason === "stop" ? "" : make("span", { class: "badge" }, reason);
  return make("span", { class: "badge " + (status === "rejected" ? "rejected" : "out") },
    status === "left out" && (reason === "stop" || reason === "length") ? "no advantage" : reason);
}
function item(each) {
  return make("div", { class: "item" + (each.status === "trained" ? "" : " off"), role: "option", "data-id": each.address,
    title: each.why || "", onclick: () => read(each.address, true).catch(tell) },
    make("div", { class: "facts" }, make("b", {}, number(each.reward)), "step " + each.step, badge(each.status, each.reason),
      make("span", { class: "right" }, plural(each.length, "token"))),
    make("div", { class: "asked" }, line(each.prompt)), make("div", { class: "wrote" }, line(each.preview) || "—"));
}
function mark() {
  for (const each of byId("list").querySelectorAll(".item")) {
    const is = each.dataset.id === state.rollout;
    each.setAttribute("aria-selected", String(is));
  }
}
let typing = 0;
filters.addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => {
    remember({ ...Object.fromEntries([...filters.elements].filter(each => each.name).map(each => [each.name, ""])), ...filled(), rollout: "" });
    list(false).catch(tell).then(() => tell(null));
  }, 180);
});
filters.addEventListener("submit", event => event.preventDefault());
filters.addEventListener("reset", () => setTimeout(() => {
  remember({ ...Object.fromEntries([...filters.elements].filter(each => each.name).map(each => [each.name, ""])), same_prompt: "" });
  list(false).catch(tell);
}));
byId("list").addEventListener("keydown", event => {
  if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
  event.preventDefault();
  const items = [...byId("list").querySelectorAll(".item")], at = items.findIndex(each => each.dataset.id === state.rollout);
  const next = items[Math.min(Math.max(at + (event.key === "ArrowDown" ? 1 : -1), 0), items.length - 1)];
  if (next) { next.scrollIntoView({ block: "nearest" }); read(next.dataset.id, true).catch(tell); }
});

// ---- the reader

async function read(address, chosen) {
  const turn = ++reading, run = state.run, answer = await ask("rollout", { run, id: address });
  if (turn !== reading || run !== state.run) return;
  current = { ...answer, run };
  remember({ rollout: chosen ? address : state.rollout || address });
  mark();
  show_reader();
  const same = await ask("rollouts", { run, same_prompt: address, order: "oldest" });
  if (turn === reading) steps(same);
}
function show_reader() {
  const { group, rollout, samples, address } = current, facts = [];
  const fact = (name, value) => { if (value !== "" && value !== "–" && value !== null) facts.push(make("span", { class: "fact" }, name, make("b", {}, value))); };
  fact("step", String(group.step));
  if (rollout) {
    fact("reward", number(rollout.reward));
    for (const [name, value] of Object.entries(rollout.named_rewards)) fact(name, number(value));
    fact("advantage", signed(rollout.advantage));
    fact("tokens", String(rollout.length));
    const versions = [...new Set(rollout.versions.filter(version => version !== null))];
    fact(versions.length > 1 ? "versions" : "version", versions.join(", "));
    fact("agent", rollout.agent);
    fact("ended", rollout.reason);
    if (rollout.retries) fact("retries", String(rollout.retries));
  }
  fact("row", group.prompt_id);
  fact("answer", line(group.answer).slice(0, 120));
  const card = make("div", { class: "card" }, make("div", { class: "head" }, make("h2", {}, address), ...facts));
  if (group.rejected !== null) card.append(make("p", { class: "warn" },
    "The group was rejected (" + group.why + ")" + (group.drawn_again ? ", and its prompt came again" : "") + ": " + group.rejected));
  else if (rollout && !rollout.trained) card.append(make("p", { class: "warn" }, /: /.test(rollout.reason) ? "Left out: " + rollout.reason
    : "Not trained on: its advantage is 0, as where all rewards of a group are equal, or its tokens are masked."));
  if (rollout) { card.append(tools(rollout), conversation(rollout)); }
  else card.append(make("p", {}, group.prompt));
  const others = make("div", { class: "card" }, make("h3", {}, "The group ", make("small", {}, plural(samples.length, "sample") + " of this prompt in step " + group.step)), make("div", { class: "samples" }, ...samples.map(sample)));
  byId("reader").replaceChildren(card, ...(samples.length ? [others] : []), make("div", { class: "card", id: "steps" }, make("h3", {}, "The same prompt in other steps")));
  paint();
}
function sample(each) {
  return make("div", { class: "sample", "aria-current": String(each.address === current.address), onclick: () => read(each.address, true).catch(tell) },
    make("div", { class: "facts" }, make("b", {}, number(each.reward)), make("span", {}, signed(each.advantage)),
      make("span", {}, plural(each.length, "token")),
      each.reason === "stop" ? "" : make("span", { class: "badge" }, each.reason.split(": ")[0]), each.agent),
    make("p", {}, each.preview || "—"));
}
function steps(answer) {
  const groups = new Map();
  for (const each of answer.rollouts) {
    const key = each.address.split(".").slice(0, 2).join(".");
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(each);
  }
  const here = current.address.split(".").slice(0, 2).join(".");
  const mean = found => found.reduce((sum, each) => sum + (each.reward ?? 0), 0) / found.length;
  byId("steps").append(make("div", { class: "steps" }, ...[...groups].map(([key, found]) =>
    make("button", { type: "button", "aria-current": String(key === here), title: "mean reward of " + found.length + " samples",
      onclick: () => read(found[0].address, true).catch(tell) }, "step " + found[0].step + " ", make("small", {}, number(mean(found), 3)))),
    make("button", { type: "button", onclick: () => { remember({ same_prompt: current.address }); list(false).catch(tell); } }, "list them")));
}
const COLOURS = {
  probability: { of: rollout => rollout.logprobs, title: "probability", steps: [0, -0.7, -2.3, -4.6, -7], labels: ["1", "", "0.1", "", "0.001"] },
  advantage: { of: rollout => rollout.advantages, title: "advantage" },
  ratio: { of: rollout => rollout.ratios, title: "ratio" },
  version: { of: rollout => rollout.versions, title: "version" },
};
function shade(value, kind, all) {
  if (value === null || value === undefined) return "";
  const mix = (name, share) => "color-mix(in srgb, var(" + name + ") " + Math.round(Math.min(Math.max(share, 0), 1) * 78) + "%, transparent)";
  if (kind === "probability") return value > -0.02 ? "" : mix("--bound", Math.pow(Math.min(-value / 6, 1), .7));
  if (kind === "advantage") { const most = Math.max(...all.map(each => Math.abs(each ?? 0)), 1e-9); return mix(value > 0 ? "--c3" : "--bound", Math.abs(value) / most * .75); }
  if (kind === "ratio") return mix(value > 1 ? "--c3" : "--c2", Math.abs(Math.log(Math.max(value, 1e-6))) / .5);
  const versions = [...new Set(all.filter(each => each !== null))].sort((a, b) => b - a);
  return mix(["--c1", "--c2", "--c3", "--evaluate", "--score", "--advantage"][versions.indexOf(value) % 6], .42);
}
function tools(rollout) {
  const known = kind => COLOURS[kind].of(rollout).some(value => value !== null);
  if (!known(colour)) colour = "probability";
  return make("div", { class: "tools" }, "colour by", make("div", { class: "segmented", role: "group" }, ...Object.entries(COLOURS).map(([kind, { title }]) =>
    make("button", { type: "button", "data-kind": kind, "aria-pressed": String(kind === colour), disabled: !known(kind),
      title: known(kind) ? "" : "not known of this rollout", onclick: () => { colour = kind; paint(); } }, title))), make("span", { class: "scale", id: "scale" }));
}
function paint() {
  const rollout = current.rollout;
  if (!rollout) return;
  for (const button of byId("reader").querySelectorAll("[data-kind]")) button.setAttribute("aria-pressed", String(button.dataset.kind === colour));
  const values = COLOURS[colour].of(rollout), all = values.filter(value => value !== null);
  for (const span of byId("reader").querySelectorAll("[data-at]")) span.style.backgroundColor = shade(values[span.dataset.at], colour, all);
  const marks = colour === "probability" ? [[0, "1"], [-0.7, "½"], [-2.3, "0.1"], [-4.6, "0.01"], [-7, "less"]]
    : colour === "version" ? [...new Set(all)].sort((a, b) => b - a).slice(0, 6).map(value => [value, String(value)])
    : [...new Set([Math.max(...all), Math.min(...all)])].filter(Number.isFinite).map(value => [value, number(value, 3)]);
  byId("scale").replaceChildren(...marks.flatMap(([value, label]) => {
    const swatch = make("i");
    swatch.style.backgroundColor = shade(value, colour, all) || "var(--row)";
    return [swatch, label];
  }));
}
function conversation(rollout) {
  const box = make("div", { class: "conversation" });
  for (const [index, message] of rollout.messages.entries()) {
    const text = rollout.pieces.slice(message.start, message.end).join("");
    // The mark that begins the policy's turn says nothing that the turn's own head does not, and neither does an empty line.
    const begins = rollout.messages[index + 1]?.role === "policy" && /^\s*(<[^>]*>\s*)?(assistant|model)\W*(<[^>]*>)?\s*$/.test(text);
    if (message.role !== "policy" && (begins || !text.trim())) continue;
    const tokens = make("div", { class: "tokens" });
    let pictured = null;
    for (let at = message.start; at < message.end; at++) {
      const piece = rollout.pieces[at];
      if (piece === "" || (message.role !== "policy" && !tokens.firstChild && !piece.trim())) continue;
      const picture = rollout.images[rollout.ids[at]];
      if (picture && pictured === rollout.ids[at]) continue; // a further tile of it
      if (picture) {
        pictured = rollout.ids[at];
        tokens.append(make("img", { class: "picture", src: picture, alt: piece, title: piece }));
        continue;
      }
      const span = make("span", message.role === "policy" ? { "data-at": at } : {}, piece);
      tokens.append(span);
    }
    const long = message.role !== "policy" && message.end - message.start > 600;
    const reward = message.role === "policy" ? rollout.turn_rewards[message.turn - 1] : 0;
    const element = make("div", { class: "message " + (["policy", "tool", "given"].includes(message.role) ? message.role : "given") + (long ? " folded" : "") },
      make("div", { class: "role" }, message.role === "policy" ? "policy, turn " + message.turn : message.role === "given" ? "given" : message.role,
        make("span", {}, plural(message.end - message.start, "token")), reward ? make("span", {}, "reward " + signed(reward)) : ""), tokens);
    if (long) tokens.addEventListener("click", () => element.classList.remove("folded"));
    box.append(element);
  }
  box.addEventListener("pointermove", event => {
    const at = event.target.dataset?.at;
    if (at === undefined) return hide();
    const rows = [["token", JSON.stringify(rollout.pieces[at]) + " · " + rollout.ids[at]]];
    const logprob = rollout.logprobs[at];
    if (logprob !== null && logprob !== undefined) rows.push(["log-probability", number(logprob)], ["probability", number(Math.exp(logprob), 3)]);
    if (rollout.advantages[at] !== undefined) rows.push(["advantage", signed(rollout.advantages[at])]);
    if (rollout.ratios[at] !== undefined) rows.push(["ratio", number(rollout.ratios[at])]);
    rows.push(["version", number(rollout.versions[at])]);
    show(event, rows);
  });
  box.addEventListener("pointerleave", hide);
  return box;
}

// ---- begin

byId("run").addEventListener("change", event => {
  current = null;
  remember({ run: event.target.value, rollout: "", same_prompt: "", step: "" });
  shown = {};
  stamp = "";
  byId("reader").replaceChildren();
  Promise.resolve().then(showRuns).then(() => Promise.all([refresh(true), showSubtitle()])).catch(tell);
});
for (const [name, value] of Object.entries(state)) if (filters.elements[name]) filters.elements[name].value = value;
if (!(state.view in VIEWS)) remember({ view: "overview" });
showRuns().then(showSubtitle).catch(() => {});
poll();
