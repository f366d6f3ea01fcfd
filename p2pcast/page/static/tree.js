// The tree: the hub, and each peer below the peer that feeds it; regions in place of peers in large fleets.
import { arriving, number, regionsOf, serves, set } from "/page/views.js";

const MOST_PEERS = 60, ROW = 44, COLUMN = 250, NARROW_COLUMN = 150, NARROW = 600, MARGIN = 24, RADIUS = 6, AROUND = 10, ROOM = 40;
const SVG = "http://www.w3.org/2000/svg";

function named(picture, rates) {
  const rows = Object.entries(picture.peers);
  if (rows.length > MOST_PEERS) {
    return [...regionsOf(picture, rates)].map(([name, region]) => ({
      name, parent: "hub", level: region.level, part: region.part, rate: region.rate,
      text: `${region.peers} peers, ${region.current} of ${region.engines} engines current${region.lost ? `, ${region.lost} lost` : ""}`,
    }));
  }
  const lost = Object.entries(picture.gone).filter(([name, row]) => row.level !== "gone" && !(name in picture.peers)).map(([name, row]) => ({
    name, parent: "hub", level: "lost", part: null, rate: null, text: row.words.split(" UTC")[0],
  }));
  return [...lost, ...rows.map(([name, row]) => ({
    name, parent: row.parent === name ? "hub" : row.parent ?? "hub", level: row.level, part: arriving(row), rate: rates.of(name),
    text: ["watch", "alarm"].includes(row.level) ? brief(row) : `serves ${serves(row)}${row.committed ? "" : `, has ${row.staged ?? "nothing"}`}${row.behind ? `, ${row.behind} behind` : ""}${row.region ? `, ${row.region}` : ""}`,
  }))];
}

// The verdict without names of engines, as far as a column has room.
function brief(row) {
  const text = row.engines.reduce((words, engine) => words.replaceAll(`${engine.name}: `, ""), row.words);
  return text.length > ROOM ? `${text.slice(0, ROOM)}…` : text;
}

// Every peer exactly once below the hub, whatever the rows say of parents.
function rooted(nodes) {
  const known = new Map(nodes.map((node) => [node.name, node]));
  const reaches = (node) => {
    const passed = new Set();
    for (let at = node; at.parent !== "hub"; at = known.get(at.parent)) {
      if (passed.has(at.name) || !known.has(at.parent)) return false;
      passed.add(at.name);
    }
    return true;
  };
  const rows = nodes.map((node) => ({ ...node, id: `peer ${node.name}`, above: reaches(node) && node.parent !== "hub" ? `peer ${node.parent}` : "hub" }));
  return d3.stratify().id((row) => row.id).parentId((row) => row.above)([{ id: "hub", above: null, name: "hub", level: "good", text: "", part: null, rate: null }, ...rows]);
}

function element(parent, tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

let last = "";

export function drawTree(svg, hint, picture, rates) {
  const nodes = named(picture, rates), column = svg.parentElement.clientWidth < NARROW ? NARROW_COLUMN : COLUMN;
  const shown = JSON.stringify([nodes, picture.version, column]);
  if (shown === last) return;
  last = shown;
  const root = d3.tree().nodeSize([ROW, column])(rooted(nodes)), all = root.descendants();
  const low = Math.min(...all.map((node) => node.x)), high = Math.max(...all.map((node) => node.x));
  const width = 2 * MARGIN + root.height * column + COLUMN, height = high - low + 2 * MARGIN;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("width", width);
  svg.setAttribute("height", height);
  svg.replaceChildren();
  const x = (node) => MARGIN + node.y, y = (node) => MARGIN + node.x - low;
  for (const { source, target } of root.links()) {
    const middle = (x(source) + x(target)) / 2, flows = target.data.part !== null;
    element(svg, "path", { class: `edge${flows ? " flows" : ""}${target.data.level === "lost" ? " lost" : ""}`, d: `M${x(source)},${y(source)}C${middle},${y(source)} ${middle},${y(target)} ${x(target)},${y(target)}` });
  }
  for (const node of all) {
    const group = element(svg, "g", { class: node.data.level });
    element(group, "circle", { cx: x(node), cy: y(node), r: RADIUS });
    if (node.data.part !== null) {
      const length = 2 * Math.PI * AROUND;
      element(group, "circle", { class: "part", cx: x(node), cy: y(node), r: AROUND, "stroke-dasharray": `${node.data.part * length} ${length}` });
    }
    const above = node.children ? 8 : 1, below = node.children ? 20 : 12; // clear of the line to the children
    element(group, "text", { x: x(node) + 12, y: y(node) - above }, node.data.name);
    const rate = node.data.rate ? `, ${number(node.data.rate, 1)} MB/s` : "";
    element(group, "text", { class: "dim", x: x(node) + 12, y: y(node) + below }, node === root ? picture.version ?? "" : `${node.data.text}${rate}`);
  }
  svg.setAttribute("aria-label", `The hub feeds ${root.children?.length ?? 0} chains; ${nodes.map((node) => `${node.name} is fed by ${node.parent}`).slice(0, MOST_PEERS).join(", ")}`);
  set(hint, Object.keys(picture.peers).length > MOST_PEERS ? "Regions, since there are many peers; the table below has each." : "Green is well, blue is on its way, amber may pass, red needs you. A ring shows how much of a version has arrived.");
}
