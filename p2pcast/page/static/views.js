// Tables and lists. Every text of the run goes through textContent: a hostile name stays a text.

const MOST_ROWS = 200, COLUMNS = [
  ["Peer"], ["Verdict", "text"], ["Region"], ["Serves"], ["Behind", "number"], ["Staged"], ["Arrives"], ["MB/s", "number"], ["Fed by"],
  ["RTT ms", "number"], ["Score", "number"], ["Standing"], ["Pause ms", "number"], ["Engines"], ["Certificate until"],
];

export function set(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function child(parent, number, tag) {
  while (parent.children.length <= number) parent.append(document.createElement(tag));
  return parent.children[number];
}

function trim(parent, count) {
  while (parent.children.length > count) parent.lastChild.remove();
}

// Rows: arrays of [text, class]. Cells are kept and rewritten where they differ.
function table(element, columns, rows) {
  const head = child(child(element, 0, "thead"), 0, "tr"), body = child(element, 1, "tbody");
  columns.forEach(([title, kind = ""], n) => {
    const cell = child(head, n, "th");
    cell.scope = "col";
    if (cell.className !== kind) cell.className = kind;
    set(cell, title);
  });
  rows.forEach((row, y) => {
    const line = child(body, y, "tr");
    row.forEach(([text, kind = ""], x) => {
      const cell = child(line, x, "td");
      if (cell.className !== kind) cell.className = kind;
      set(cell, text);
    });
  });
  trim(body, rows.length);
}

export const number = (value, digits = 0) => (value === null || value === undefined ? "–" : value.toFixed(digits));
export const size = (bytes) => {
  if (bytes === null || bytes === undefined) return "–";
  const unit = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (bytes >= 1000 && power < 4) { bytes /= 1000; power += 1; }
  return `${bytes.toFixed(power && bytes < 100 ? 1 : 0)} ${unit[power]}`;
};
const seconds = (value) => (value === null || value === undefined ? "–" : value < 1 ? `${(value * 1000).toFixed(0)} ms` : `${value.toFixed(2)} s`);
const spread = (summary, of) => (summary ? `${summary.count}${of >= summary.count ? ` of ${of}` : ""} in ${seconds(summary.most)}` : "–");
const day = (time) => (time === null || time === undefined ? "–" : new Date(time * 1000).toLocaleString(undefined, { dateStyle: "short", timeStyle: "short" }));
const short = (name) => (name.length > 40 ? `${name.slice(0, 16)}…${name.slice(-22)}` : name);
// Versions of a peer's engines; "nothing" for one without verified weights.
export const serves = (row) => [...new Set(row.engines.map((engine) => engine.committed ?? "nothing"))].join(", ") || row.committed || "nothing";
export const clock = (time) => new Date(time * 1000).toLocaleTimeString();

const RANK = { good: 0, gone: 0, moving: 1, watch: 2, alarm: 3 };
const worse = (one, other) => (RANK[other] > RANK[one] ? other : one);

export function arriving(row) {
  return row.progress === null ? null : row.progress[1];
}

export function drawAlarms(list, alarms) {
  alarms.forEach((alarm, n) => {
    const item = child(list, n, "li");
    item.dataset.level = alarm.level;
    set(child(item, 0, "strong"), alarm.text);
    const advice = child(item, 1, "span");
    advice.className = "do";
    set(advice, alarm.do);
  });
  trim(list, alarms.length);
}

export function drawPeers(element, shown, picture, rates, filter) {
  const found = Object.entries(picture.peers).filter(([name, row]) =>
    filter === "" || [name, row.region, row.committed ?? "", row.standing ?? ""].some((text) => text.toLowerCase().includes(filter)));
  found.sort(([a, x], [b, y]) => RANK[y.level] - RANK[x.level] || (y.behind ?? 0) - (x.behind ?? 0) || a.localeCompare(b));
  const rows = found.slice(0, MOST_ROWS).map(([name, row]) => {
    const part = arriving(row), ready = row.engines.filter((engine) => engine.ready).length;
    const pause = row.engines.map((engine) => engine.pause_s).filter((value) => value !== null);
    return [
      [name], [row.words, `text ${row.level}`], [row.region || "–"], [serves(row), row.level],
      [number(row.behind), "number"], [row.staged ?? "–"], [part === null ? row.state ?? "–" : `${row.progress[0]}: ${(100 * part).toFixed(0)} %`],
      [number(rates.of(name), 2), "number"], [row.parent ?? "–"], [number(row.rtt_ms, 1), "number"], [number(row.score, 0), "number"],
      [row.standing ?? "–"], [pause.length ? (1000 * Math.max(...pause)).toFixed(1) : "–", "number"],
      [`${ready} of ${row.engines.length} ready`, row.engines.map((engine) => engine.level).reduce(worse, "good")], [day(row.certificate_until)],
    ];
  });
  const empty = Array(COLUMNS.length - 2).fill(["–"]);
  for (const [name, row] of Object.entries(picture.gone)) {
    if (name in picture.peers || ![name, row.region].some((text) => text.toLowerCase().includes(filter))) continue;
    const line = [[name, row.level], [row.words, `text ${row.level}`], ...empty];
    if (row.level === "gone") rows.push(line);
    else rows.unshift(line);
  }
  table(element, COLUMNS, rows);
  const total = Object.keys(picture.peers).length;
  const count = Math.min(found.length, MOST_ROWS);
  set(shown, count < total ? `${count} of ${total} peers, worst first` : `${total} peers, worst first`);
}

export function regionsOf(picture, rates) {
  const regions = new Map();
  const of = (row) => {
    const key = row.region || "no region";
    if (!regions.has(key)) regions.set(key, { peers: 0, engines: 0, ready: 0, current: 0, joining: 0, leaving: 0, behind: 0, rate: 0, level: "good", part: null, lost: 0 });
    return regions.get(key);
  };
  for (const [name, row] of Object.entries(picture.peers)) {
    const region = of(row);
    region.peers += 1;
    region.engines += row.engines.length;
    region.ready += row.engines.filter((engine) => engine.ready).length;
    region.current += row.engines.filter((engine) => engine.level === "good" && engine.committed === picture.version).length;
    if (row.state === "joining") region.joining += 1;
    if (row.state === "draining") region.leaving += 1;
    region.behind = Math.max(region.behind, row.behind ?? 0);
    region.rate += rates.of(name) ?? 0;
    region.level = worse(region.level, row.level);
    const part = arriving(row);
    if (part !== null) region.part = Math.min(region.part ?? 1, part);
  }
  for (const [name, row] of Object.entries(picture.gone)) {
    if (name in picture.peers || row.level === "gone") continue;
    const region = of(row);
    region.lost += 1;
    region.level = worse(region.level, row.level);
  }
  return regions;
}

export function drawRegions(element, picture, rates) {
  const columns = [
    ["Region"], ["Peers", "number"], ["Joining", "number"], ["Leaving", "number"], ["Lost", "number"], ["Engines ready", "number"], ["Serve the newest", "number"],
    ["Most behind", "number"], ["MB/s", "number"], ["Workers", "number"], ["Leases", "number"], ["Tokens/s", "number"],
  ];
  const made = picture.rollouts ?? {}, of = (table, name) => made[table]?.[name === "no region" ? "" : name];
  const found = regionsOf(picture, rates);
  const rows = [...found].sort(([a], [b]) => a.localeCompare(b)).map(([name, region]) => [
    [name], [number(region.peers), "number"], [number(region.joining), "number"], [number(region.leaving), "number"], [number(region.lost), "number"],
    [`${region.ready} of ${region.engines}`, `number ${region.ready === region.engines ? "good" : "watch"}`],
    [number(region.current), "number"], [number(region.behind), "number"], [number(region.rate, 2), "number"],
    [number(of("region_workers", name)), "number"], [number(of("region_leases", name)), "number"], [number(of("region_tokens_per_s", name), 1), "number"],
  ]);
  table(element, columns, rows);
}

export function drawVersions(element, picture) {
  const engines = picture.headline.engines, peers = picture.headline.peers;
  const columns = [["Version"], ["Kind"], ["Codec"], ["Changed", "number"], ["Size", "number"], ["Staged", "number"], ["Live", "number"], ["Longest pause", "number"]];
  const newest = Object.keys(picture.versions).at(-1);
  // The fleet's present size says nothing of earlier versions.
  const rows = Object.entries(picture.versions).reverse().map(([version, spreadOf]) => [
    [version], [spreadOf.kind ?? (spreadOf.bytes === null ? "on its way" : "–")], [spreadOf.codec ?? "–"],
    [typeof spreadOf.density === "number" ? `${(100 * spreadOf.density).toFixed(2)} %` : "–", "number"], [size(spreadOf.bytes), "number"], [spread(spreadOf.staged, version === newest ? peers : 0), "number"],
    [spread(spreadOf.live, version === newest ? engines : 0), "number"], [spreadOf.pause ? seconds(spreadOf.pause.most) : "–", "number"],
  ]);
  table(element, columns, rows);
}

function bars(list, rows) {
  const most = Math.max(1e-9, ...rows.map(([, value]) => value));
  rows.forEach(([name, value, text], n) => {
    const item = child(list, n, "li"), bar = child(child(item, 1, "span"), 0, "span");
    set(child(item, 0, "span"), name);
    item.children[1].className = "track";
    bar.className = "bar";
    bar.style.width = `${(100 * value) / most}%`;
    set(child(item, 2, "span"), text);
  });
  trim(list, rows.length);
}

export function drawWaterfall(list, facts, picture) {
  // Until a first engine serves the newest version, the one before is the last broadcast.
  const versions = Object.entries(picture.versions), last = versions.findLast(([, found]) => found.slowest.length) ?? versions.at(-1);
  const found = last ? last[1].slowest : [];
  bars(list, found.slice(0, 24).map(([name, after, pause]) => [short(name), after, `${seconds(after)}, ${seconds(pause)}`]));
  const made = picture.last && last && picture.last.version === last[0] ? picture.last : null;
  set(facts, last ? `Version ${last[0]}: ${made ? `${size(made.bytes)} in place of ${size(made.dense_bytes)}, codec ${made.codec ?? made.kind}. ` : ""}Seconds until each engine served it, and its pause; slowest first.` : "No version was sent since the hub's start.");
}

export function drawRollouts(list, rollouts) {
  const rows = [];
  for (const [name, value] of Object.entries(rollouts ?? {})) {
    if (name.startsWith("ages_") || name.startsWith("region_") || Array.isArray(value)) continue;
    if (value !== null && typeof value === "object") {
      for (const [inner, count] of Object.entries(value)) rows.push([`${name} ${inner}`, count]);
    } else rows.push([name, value]);
  }
  rows.forEach(([name, value], n) => {
    const box = child(list, n, "div");
    set(child(box, 0, "dt"), name.replaceAll("_", " "));
    set(child(box, 1, "dd"), typeof value === "number" ? String(Math.round(value * 1000) / 1000) : String(value ?? "–"));
  });
  trim(list, rows.length);
}

const JOB_COLUMNS = [
  ["Worker"], ["Region"], ["Engine serves"], ["Leases", "number"], ["Tokens/s", "number"], ["Tokens accepted", "number"], ["Remarks", "text"],
];

function remarksOf(row) {
  const remarks = [];
  if (row.disagreements > 0) remarks.push([`${row.disagreements} audits disagree`, "alarm"]);
  if (row.blamed > 0) remarks.push([`blamed ${row.blamed} times`, "watch"]);
  if (row.silent_s > 60) remarks.push([`silent for ${seconds(row.silent_s)}`, "watch"]);
  if (row.drained_s > 0) remarks.push([`paused for ${seconds(row.drained_s)} more`, "watch"]);
  return [remarks.map(([text]) => text).join("; ") || "–", `text ${remarks[0]?.[1] ?? "good"}`];
}

export function drawWorkers(element, hint, rollouts) {
  const found = Array.isArray(rollouts?.worker_rows) ? rollouts.worker_rows : [];
  table(element, JOB_COLUMNS, found.map((row) => [
    [String(row.name)], [row.region || "–"], [row.served ?? "nothing"], [`${row.leases} of ${row.slots}`, "number"],
    [number(row.tokens_per_s, 1), "number"], [number(row.accepted_tokens), "number"], remarksOf(row),
  ]));
  set(hint, found.length < (rollouts?.workers ?? 0) ? `${found.length} of ${rollouts.workers} workers, those that need a look first` : "");
}

export function drawAges(list, title, rollouts) {
  const ages = rollouts?.ages_trained ?? rollouts?.ages_accepted ?? {};
  const rows = Object.entries(ages).sort(([a], [b]) => Number(a) - Number(b)).map(([age, count]) => [age, count, String(count)]);
  title.hidden = rows.length === 0;
  bars(list, rows);
}

// Sentences for the kinds that say most; other kinds show their facts.
const SENTENCES = {
  joined: (f) => `${f.peer} joined${f.region ? ` in ${f.region}` : ""}`,
  left: (f) => (f.lost ? `${f.peer} was lost: ${f.why ?? "no reason known"}` : `${f.peer} left`),
  plan: (f) => f.moved.map(([peer, parent]) => `${peer} is fed by ${parent}`).join(", ") || "nobody moved",
  staged: (f) => `${f.peer} has ${f.version}${after(f)}`,
  committed: (f) => `${f.peer} serves ${f.version} at ${f.engine}${after(f)}, pause ${seconds(f.pause_s ?? 0)}`,
  sealed: (f) => `${f.version} is whole: ${size(f.bytes)}`,
  opened: (f) => `${f.version} begins`,
  published: (f) => `${f.version} is published in codec ${f.codec ?? "whole state"}, ${f.changed} of ${f.params} values changed`,
  trouble: (f) => {
    const said = [f.why, ...(f.unready ?? []).map((one) => one.words)].filter((text) => text);
    return `${f.engine ? `${f.engine} at ` : ""}${f.peer}: ${said.join("; ") || "the trouble is over"}`;
  },
  unready: (f) => `${f.engine} at ${f.peer} is not ready: ${f.why ?? "no reason known"}`,
};
const after = (facts) => (facts.after_s === null || facts.after_s === undefined ? "" : ` after ${seconds(facts.after_s)}`);

function sentence(event) {
  try {
    if (event.kind in SENTENCES) return SENTENCES[event.kind](event.facts);
  } catch {
    // An event of another form shows its facts.
  }
  return Object.entries(event.facts).filter(([, value]) => value !== null)
    .map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ");
}

export function drawEvents(list, events) {
  const newest = [...events].sort((a, b) => b.id - a.id).slice(0, 100);
  newest.forEach((event, n) => {
    const item = child(list, n, "li");
    set(child(item, 0, "time"), clock(event.time));
    set(child(item, 1, "strong"), event.kind.replaceAll("_", " "));
    set(child(item, 2, "span"), ` ${sentence(event)}`);
  });
  trim(list, newest.length);
}
