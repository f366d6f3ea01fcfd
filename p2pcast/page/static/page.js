// The page: fetches a picture of the run, follows its changes, and hands them to the views.
import { drawTree } from "/page/tree.js";
import { drawAges, drawAlarms, drawEvents, drawPeers, drawRegions, drawRollouts, drawVersions, drawWaterfall, drawWorkers, set } from "/page/views.js";
import { Rates } from "/page/rates.js";
import { setUpCommands, showNamesToOperate } from "/page/commands.js";

const DRAW_MS = 250, RETRY_MS = 2000, EVENTS_KEPT = 200;
const byId = (id) => document.getElementById(id);
const rates = new Rates();
let refused = null, picture = null, events = { routine: [], other: [] }, due = false, source = null;

function draw() {
  due = false;
  if (picture === null) return;
  const named = [picture.run ? `run ${picture.run}` : "", picture.source === "live" ? "" : picture.source, `seen at ${new Date(picture.time * 1000).toLocaleTimeString()}`];
  set(byId("run"), named.filter((part) => part !== "").join(", "));
  set(byId("headline"), picture.headline.text);
  byId("headline").dataset.level = picture.headline.level;
  document.title = `${["watch", "alarm"].includes(picture.headline.level) ? "! " : ""}p2pcast ${picture.version ?? ""}`;
  drawAlarms(byId("alarms"), picture.alarms);
  drawTree(byId("tree"), byId("tree-hint"), picture, rates);
  drawPeers(byId("peers"), byId("shown"), picture, rates, byId("filter").value.trim().toLowerCase());
  drawRegions(byId("regions"), picture, rates);
  drawVersions(byId("versions"), picture);
  drawWaterfall(byId("waterfall"), byId("last-facts"), picture);
  byId("rollouts-section").hidden = !picture.rollouts;
  drawRollouts(byId("rollouts"), picture.rollouts);
  drawWorkers(byId("workers"), byId("workers-hint"), picture.rollouts);
  drawAges(byId("ages"), byId("ages-title"), picture.rollouts);
  drawEvents(byId("events"), byId("routine").checked ? [...events.other, ...events.routine] : events.other);
  rates.draw(byId("rates"), byId("rates-now"));
  showNamesToOperate(byId("operate-peer"), Object.keys(picture.peers));
  showNamesToOperate(byId("operate-worker"), (picture.rollouts?.worker_rows ?? []).map((row) => String(row.name)));
  byId("operate-workers").hidden = !picture.rollouts;
  byId("operate").hidden = picture.source !== "live";
  byId("operate-commit").hidden = picture.commit.mode !== "manual";
}

function schedule() {
  if (!due) {
    due = true;
    setTimeout(() => requestAnimationFrame(draw), DRAW_MS);
  }
}

function take(change) {
  Object.assign(picture, change.set);
  for (const [name, row] of Object.entries(change.peers)) {
    if (row === null) delete picture.peers[name];
    else picture.peers[name] = row;
  }
  note(change.events ?? []);
  rates.note(picture);
  schedule();
}

function note(found) {
  events.routine = [...events.routine, ...found.filter((event) => event.routine)].slice(-EVENTS_KEPT);
  events.other = [...events.other, ...found.filter((event) => !event.routine)].slice(-EVENTS_KEPT);
}

function say(text) {
  set(byId("connection"), text);
}

async function begin() {
  if (source !== null) source.close();
  try {
    const answer = await fetch("/page/picture");
    if (answer.status === 401 || answer.status === 403) {
      say(refused ?? "not allowed: open a link from `p2pcast page --link` on the hub's machine");
      return;
    }
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    picture = await answer.json();
    Object.setPrototypeOf(picture.peers, null); // a peer may be called __proto__
  } catch {
    say("the hub does not answer; trying again");
    setTimeout(begin, RETRY_MS);
    return;
  }
  events = { routine: [], other: [] };
  note(picture.events);
  rates.note(picture);
  schedule();
  source = new EventSource(`/page/changes?after=${picture.number}`);
  source.onopen = () => say("live");
  source.onmessage = (message) => take(JSON.parse(message.data));
  source.addEventListener("again", begin);
  source.onerror = () => {
    say("the hub does not answer; trying again");
    source.close();
    setTimeout(begin, RETRY_MS);
  };
}

async function enter() {
  const link = location.hash.slice(1);
  if (link === "" || link === "main") return;
  history.replaceState(null, "", location.pathname);
  const answer = await fetch("/page/enter", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ link }),
  });
  if (!answer.ok) refused = (await answer.json()).error;
}

byId("filter").addEventListener("input", schedule);
byId("routine").addEventListener("change", schedule);
setUpCommands(() => picture);
await enter();
await begin();
