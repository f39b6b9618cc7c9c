// Single-key shortcuts. They are off while someone types, while a dialog is open, and with a modifier held.

const bindings = new Map();

export function onKey(key, action) {
  bindings.set(key, action);
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (event.target.closest("input, select, textarea, dialog")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  // Enter and space belong to a focused control.
  if (event.key === "Enter" && event.target.closest("a, button, summary")) return;
  const action = bindings.get(event.key);
  if (action && action(event) !== false) event.preventDefault();
});

// Follows a link that may or may not be on the page.
export function follow(selector) {
  const link = document.querySelector(selector);
  if (!link) return false;
  link.click();
  return true;
}
