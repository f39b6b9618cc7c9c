// Keyboard and folding on a rollout's page, and following a rollout that still runs.

import { copyText } from "./clipboard.js";
import { follow, onKey } from "./keys.js";

const EXPANDED = "expand-all";
const turns = document.getElementById("turns");
let current = null;

function allTurns() {
  return turns ? [...turns.querySelectorAll(".turn")] : [];
}

function setCurrent(turn) {
  if (!turn) return false;
  current?.classList.remove("current");
  current = turn;
  turn.classList.add("current");
  turn.focus({ preventScroll: true });
  turn.scrollIntoView({ block: "start" });
  history.replaceState(null, "", `#${turn.id}`);
  return true;
}

function move(step) {
  const all = allTurns();
  const at = all.indexOf(current);
  return setCurrent(all[at < 0 ? 0 : Math.min(Math.max(at + step, 0), all.length - 1)]);
}

function toggle(root, open) {
  for (const details of root.querySelectorAll("details")) details.open = open;
}

const expandButton = document.querySelector("[data-expand-all]");

function expandAll(open) {
  if (!turns) return false;
  toggle(turns, open);
  localStorage.setItem(EXPANDED, open ? "1" : "");
  expandButton.textContent = open ? "Close everything" : "Open everything";
  return true;
}

function isExpanded() {
  return localStorage.getItem(EXPANDED) === "1";
}

if (turns) {
  expandButton.hidden = false;
  expandButton.addEventListener("click", () => expandAll(!isExpanded()));
  if (isExpanded()) expandAll(true);
  current = location.hash ? document.getElementById(location.hash.slice(1))?.closest(".turn") : null;
  current?.classList.add("current");
}

onKey("j", () => move(1));
onKey("k", () => move(-1));
onKey("g", () => setCurrent(allTurns()[0]));
onKey("G", () => setCurrent(allTurns().at(-1)));
onKey(".", () => {
  const all = allTurns();
  return setCurrent(all.slice(all.indexOf(current) + 1).find((turn) => turn.matches(".has-failure")));
});
onKey("e", () => expandAll(!isExpanded()));
onKey("Enter", () => {
  if (!current) return false;
  toggle(current, [...current.querySelectorAll("details")].some((details) => !details.open));
  return true;
});
onKey("y", () => copyText(location.href));
onKey("c", () => copyText(document.getElementById("rollout-id").textContent));
onKey("[", () => follow("[data-previous]"));
onKey("]", () => follow("[data-next]"));
onKey("Escape", () => follow("[data-up]"));
document.querySelectorAll("[data-tab]").forEach((tab, index) => onKey(String(index + 1), () => tab.click()));

const list = sessionStorage.getItem("list");
const up = document.querySelector("[data-list]");
if (list && up && new URL(list).origin === location.origin) up.href = list;

// New turns of a running rollout are added at the end; who reads further up gets a pill instead of a jump.
const pill = document.querySelector("[data-jump]");
let seen = allTurns().length;

pill?.addEventListener("click", () => {
  pill.hidden = true;
  setCurrent(allTurns().at(-1));
});
turns?.addEventListener("htmx:afterSettle", () => {
  if (isExpanded()) toggle(turns, true);
  const added = allTurns().length - seen;
  seen += added;
  if (!added) return;
  const bottom = document.getElementById("follow").getBoundingClientRect().top;
  if (bottom > window.innerHeight) {
    pill.textContent = `${added} new turn${added === 1 ? "" : "s"} ↓`;
    pill.hidden = false;
  }
});
