// Copies text and says so, on the button and to screen readers.

export async function copyText(text, button) {
  const announce = document.getElementById("announce");
  try {
    await navigator.clipboard.writeText(text);
    announce.textContent = "Copied";
  } catch {
    announce.textContent = "The browser did not allow copying";
  }
  if (!button) return;
  const before = button.title;
  button.title = announce.textContent;
  button.classList.add("good");
  setTimeout(() => {
    button.title = before;
    button.classList.remove("good");
  }, 1500);
}
