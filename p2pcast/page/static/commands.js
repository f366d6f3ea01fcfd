// Commands of an operator. The bearer is sent with a command and with nothing else.
import { set } from "/page/views.js";

const byId = (id) => document.getElementById(id);

const asked = {
  evict: (picture, peer) => [`Evict ${peer}? It can never join this run again, and its pieces are not used any more.`, { peer }],
  commit: (picture) => [`Let all engines switch to ${picture.version}?`, { version: picture.version }],
  "token/create": () => ["Make a join token? Who has it can join this run.", {}],
};

function confirmed(text) {
  const dialog = byId("confirm");
  set(byId("confirm-text"), text);
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

async function order(command, picture) {
  if (command === "evict" && byId("operate-peer").value === "") {
    set(byId("answer"), "Choose a peer first.");
    return;
  }
  const [question, body] = asked[command](picture, byId("operate-peer").value);
  if (!(await confirmed(question))) return;
  try {
    const answer = await fetch(`/${command}`, {
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

export function showPeersToOperate(list, picture) {
  const names = ["", ...Object.keys(picture.peers).sort()];
  if (names.join("\n") === [...list.options].map((option) => option.value).join("\n")) return;
  const chosen = list.value;
  list.replaceChildren(...names.map((name) => new Option(name || "choose", name, false, name === chosen)));
}
