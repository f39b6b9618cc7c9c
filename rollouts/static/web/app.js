// What every page needs: theme, help sheet, copy buttons, menus, and polling that rests while the tab is hidden.

import { copyText } from "./clipboard.js";
import { onKey } from "./keys.js";

const THEMES = ["system", "light", "dark"];

function currentTheme() {
  return document.documentElement.dataset.theme ?? "system";
}

function setTheme(theme, button) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  const secure = location.protocol === "https:" ? "; Secure" : "";
  document.cookie = `theme=${theme}; Path=/; Max-Age=31536000; SameSite=Lax${secure}`;
  labelTheme(button);
}

function labelTheme(button) {
  const theme = currentTheme();
  const label = theme === "system" ? "Colours: follow the system" : `Colours: ${theme}`;
  button.setAttribute("aria-label", label);
  button.title = label;
}

const themeButton = document.querySelector("[data-theme-toggle]");
themeButton.hidden = false;
labelTheme(themeButton);
themeButton.addEventListener("click", () => {
  setTheme(THEMES[(THEMES.indexOf(currentTheme()) + 1) % THEMES.length], themeButton);
});

const help = document.getElementById("help");
const helpButton = document.querySelector("[data-help]");
helpButton.hidden = false;
helpButton.addEventListener("click", () => help.showModal());
onKey("?", () => help.showModal());

function revealCopyButtons(root) {
  for (const button of root.querySelectorAll("[data-copy]")) button.hidden = false;
}
revealCopyButtons(document);
document.addEventListener("htmx:afterSettle", () => revealCopyButtons(document));
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-copy]");
  if (button) copyText(button.closest("[data-copy-scope]").querySelector("pre").textContent, button);
  for (const menu of document.querySelectorAll("[data-menu][open]")) {
    if (!menu.contains(event.target)) menu.open = false;
  }
});

// What the reader has opened stays open when its part of the page comes anew. (htmx gives the focus back by itself, by id.)
for (const [before, after] of [["htmx:beforeSwap", "htmx:afterSwap"], ["htmx:oobBeforeSwap", "htmx:oobAfterSwap"]]) {
  let opened = [];
  document.addEventListener(before, (event) => {
    opened = [...event.detail.target.querySelectorAll("details[id][open]")].map((details) => details.id);
  });
  document.addEventListener(after, () => {
    for (const id of opened) document.getElementById(id)?.setAttribute("open", "");
  });
}

document.addEventListener("htmx:beforeRequest", (event) => {
  if (document.hidden && event.target.matches("[data-poll]")) event.preventDefault();
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) return;
  for (const element of document.querySelectorAll("[data-poll]")) element.dispatchEvent(new Event("poll-now"));
});
