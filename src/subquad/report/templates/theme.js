"use strict";
// The button that chooses between the system's colours, light and dark.
(() => {
  const button = document.querySelector("button[data-theme-switch]");
  if (!button) return;
  const root = document.documentElement, kinds = ["auto", "light", "dark"];
  let kind = "auto";
  try { kind = localStorage.getItem("subquad-theme") ?? "auto"; } catch { /* a page from disk may have no storage */ }
  const apply = () => { kind === "auto" ? root.removeAttribute("data-theme") : root.setAttribute("data-theme", kind); button.textContent = `theme: ${kind}`; };
  button.onclick = () => {
    kind = kinds[(kinds.indexOf(kind) + 1) % 3];
    try { localStorage.setItem("subquad-theme", kind); } catch { /* as above */ }
    apply();
  };
  if (!root.hasAttribute("data-theme")) apply();
})();
