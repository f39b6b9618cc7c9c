// A picture opens whole over the page. Without this script, or with a modifier held, its link opens it by itself.

const dialog = document.getElementById("picture");
const whole = new Image();
const original = dialog.querySelector("a");

document.addEventListener("click", (event) => {
  const link = event.target.closest("[data-picture]");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
  event.preventDefault();
  original.href = whole.src = link.href;
  whole.alt = link.querySelector("img").alt;
  document.getElementById("picture-title").textContent = whole.alt;
  dialog.append(whole);
  dialog.showModal();
});
dialog.addEventListener("click", (event) => {
  if (event.target === dialog || event.target === whole) dialog.close();
});
