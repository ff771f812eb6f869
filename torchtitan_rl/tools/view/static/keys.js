// The keyboard: g and a letter for a page, / for the search, [ and ] for previous and next, j and k for rows.
const PAGES = { h: "/", c: "/curves", e: "/evaluations", r: "/rollouts", s: "/groups", d: "/configs" };
let going = false;

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey || (typing && event.key !== "Escape")) return;
  if (typing) return event.target.blur();
  if (going) {
    going = false;
    const tab = [...document.querySelectorAll(".top nav a")].find((a) => a.pathname === PAGES[event.key]);
    if (tab) tab.click();
    return;
  }
  if (event.key === "g") going = true;
  else if (event.key === "/") {
    const field = document.querySelector("input[type=search]");
    if (field) { event.preventDefault(); field.focus(); field.select(); }
  } else if (event.key === "[") document.querySelector("main a[rel=prev]")?.click();
  else if (event.key === "]") document.querySelector("main a[rel=next]")?.click();
  else if (event.key === "j" || event.key === "k") step(event.key === "j" ? 1 : -1);
});

function step(by) {
  const rows = [...document.querySelectorAll("[data-row]")];
  if (!rows.length) return;
  const at = rows.findIndex((row) => row.classList.contains("current"));
  const next = rows[Math.max(0, Math.min(rows.length - 1, at < 0 ? 0 : at + by))];
  rows[at]?.classList.remove("current");
  next.classList.add("current");
  next.querySelector("a")?.focus();
  next.scrollIntoView({ block: "nearest" });
}
