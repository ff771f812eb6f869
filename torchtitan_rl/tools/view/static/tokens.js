// Says what is known of the token under the pointer, or of the one that the arrow keys have reached.
const said = document.getElementById("token");
let here = null;

function show(token) {
  here?.classList.remove("here");
  here = token;
  token.classList.add("here");
  const list = document.createElement("dl");
  for (const part of ["text " + JSON.stringify(token.textContent), ...token.title.split(" · ")]) {
    const gap = part.indexOf(" ");
    const name = document.createElement("dt"), value = document.createElement("dd");
    name.textContent = gap < 0 ? part : part.slice(0, gap);
    value.textContent = gap < 0 ? "" : part.slice(gap + 1);
    list.append(name, value);
  }
  said.replaceChildren(list);
}

for (const block of document.querySelectorAll(".tokens")) {
  const tokens = [...block.querySelectorAll(":scope > .t")];
  block.addEventListener("mouseover", (event) => {
    const token = event.target.closest(".t");
    if (token) show(token);
  });
  block.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 20, ArrowUp: -20, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined || !tokens.length) return;
    event.preventDefault();
    const at = tokens.indexOf(here);
    show(tokens[Math.max(0, Math.min(tokens.length - 1, at < 0 ? 0 : at + by))]);
    here.scrollIntoView({ block: "nearest" });
  });
}
