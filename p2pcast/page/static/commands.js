// Commands of an operator. The bearer is sent with a command and with nothing else.
import { set } from "/page/views.js";

const byId = (id) => document.getElementById(id);

const PAUSE_S = 3600;

// By command: the list in which it needs a choice, its route, and what it asks and sends.
const COMMANDS = {
  evict: { list: "operate-peer", route: "evict", ask: (picture, peer) => [`Evict ${peer}? It can never join this run again, and its pieces are not used any more.`, { peer }] },
  commit: { route: "commit", ask: (picture) => [`Let all engines switch to ${picture.version}?`, { version: picture.version }] },
  "token/create": { route: "token/create", ask: () => ["Make a join token? Who has it can join this run.", {}] },
  pause: { list: "operate-worker", route: "workers/drain", ask: (picture, name) => [`Give ${name} no new jobs for an hour? It finishes those that it has.`, { name, for_s: PAUSE_S }] },
  resume: { list: "operate-worker", route: "workers/drain", ask: (picture, name) => [`Give ${name} jobs again?`, { name, for_s: 0 }] },
};

function confirmed(text) {
  const dialog = byId("confirm");
  set(byId("confirm-text"), text);
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

async function order(command, picture) {
  const { list, route, ask } = COMMANDS[command], chosen = list ? byId(list).value : "";
  if (list && chosen === "") {
    set(byId("answer"), `Choose a ${list.replace("operate-", "")} first.`);
    return;
  }
  const [question, body] = ask(picture, chosen);
  if (!(await confirmed(question))) return;
  try {
    const answer = await fetch(`/${route}`, {
      method: "POST", body: JSON.stringify(body),
      headers: { "Content-Type": "application/json", Authorization: `Bearer ${byId("bearer").value.trim()}` },
    });
    const found = await answer.json();
    set(byId("answer"), answer.ok ? `Done: ${JSON.stringify(found)}` : found.error);
  } catch {
    set(byId("answer"), "The hub does not answer.");
  }
}

export function setUpCommands(look) {
  byId("commands").addEventListener("submit", (event) => event.preventDefault());
  for (const button of document.querySelectorAll("button[data-command]")) {
    button.addEventListener("click", () => {
      const picture = look();
      if (picture !== null) order(button.dataset.command, picture);
    });
  }
}

export function showNamesToOperate(list, found) {
  const names = ["", ...[...found].sort()];
  if (names.join("\n") === [...list.options].map((option) => option.value).join("\n")) return;
  const chosen = list.value;
  list.replaceChildren(...names.map((name) => new Option(name || "choose", name, false, name === chosen)));
}
