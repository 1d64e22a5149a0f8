"use strict";
(() => {
  const themes = ["auto", "light", "dark"];
  const button = document.getElementById("theme");
  const kept = () => {
    try {
      return localStorage.getItem("zckpt-theme") || "auto";
    } catch {
      return "auto";
    }
  };
  const show = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    if (button) button.textContent = { auto: "Theme: auto", light: "Theme: light", dark: "Theme: dark" }[theme];
    document.dispatchEvent(new CustomEvent("zckpt-theme"));
  };
  let theme = themes.includes(kept()) ? kept() : "auto";
  show(theme);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(theme));
  if (button)
    button.addEventListener("click", () => {
      theme = themes[(themes.indexOf(theme) + 1) % themes.length];
      try {
        localStorage.setItem("zckpt-theme", theme);
      } catch {
        /* a page that is opened as a file may have no storage */
      }
      show(theme);
    });
})();
