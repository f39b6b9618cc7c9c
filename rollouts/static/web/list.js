// Keyboard in tables: a selected row that survives polling, and the way to neighbouring pages.

import { follow, onKey } from "./keys.js";

let selectedId = null;

function rows() {
  return [...document.querySelectorAll("[data-rows] tbody tr")];
}

function select(row) {
  if (!row) return;
  for (const other of rows()) other.classList.toggle("selected", other === row);
  selectedId = row.id;
  row.scrollIntoView({ block: "nearest" });
  row.querySelector("[data-open]")?.focus({ preventScroll: true });
}

function move(step) {
  const all = rows();
  const at = all.findIndex((row) => row.id === selectedId);
  select(all[at < 0 ? (step > 0 ? 0 : all.length - 1) : Math.min(Math.max(at + step, 0), all.length - 1)]);
}

onKey("j", () => move(1));
onKey("k", () => move(-1));
onKey("g", () => select(rows()[0]));
onKey("G", () => select(rows().at(-1)));
onKey("Enter", () => follow("tr.selected [data-open]"));
onKey("[", () => follow(".pager [rel=prev]"));
onKey("]", () => follow(".pager [rel=next]"));
onKey("Escape", () => follow("[data-up]"));
onKey("/", () => document.querySelector("[data-filters] [name=task]")?.focus());

document.addEventListener("htmx:afterSettle", () => {
  const row = selectedId && document.getElementById(selectedId);
  if (row) row.classList.add("selected");
});

// Empty fields would only make the URL longer.
document.querySelector("[data-filters]")?.addEventListener("submit", (event) => {
  for (const field of event.target.elements) if (field.name && field.value === "") field.disabled = true;
});
window.addEventListener("pageshow", () => {
  for (const field of document.querySelectorAll("[data-filters] :disabled")) field.disabled = false;
});

// A rollout's page goes back to the list as it was, with filters and page.
if (document.querySelector("[data-filters]")) sessionStorage.setItem("list", location.href);
