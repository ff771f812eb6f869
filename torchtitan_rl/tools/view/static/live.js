// Keeps the parts of a page that say [data-live] as the server would draw them now.
const EVERY_MS = 1500;
const said = document.getElementById("live");

async function look() {
  if (document.hidden) return;
  try {
    const answer = await fetch(location.href, { headers: { accept: "text/html" } });
    if (!answer.ok) throw new Error(answer.status);
    const now = new DOMParser().parseFromString(await answer.text(), "text/html").querySelectorAll("[data-live]");
    document.querySelectorAll("[data-live]").forEach((here, i) => {
      if (now[i] && now[i].innerHTML !== here.dataset.was) {
        here.dataset.was = now[i].innerHTML;
        replace(here, now[i]);
      }
    });
    tell("live", false);
  } catch {
    tell("the viewer does not answer", true);
  }
}

// Replaces what is shown; focus and what was scrolled stay where they are.
function replace(here, now) {
  const focusable = () => [...here.querySelectorAll("a, button, summary, [tabindex]")];
  const at = focusable().indexOf(document.activeElement);
  const scrolled = [...here.querySelectorAll(".scroll")].map((region) => region.scrollTop);
  here.replaceChildren(...now.childNodes);
  here.querySelectorAll(".scroll").forEach((region, i) => { region.scrollTop = scrolled[i] ?? 0; });
  if (at >= 0) focusable()[at]?.focus({ preventScroll: true });
}

function tell(text, off) {
  if (said && said.textContent !== text) said.textContent = text;
  said?.classList.toggle("off", off);
}

if (document.querySelector("[data-live]")) setInterval(look, EVERY_MS);
