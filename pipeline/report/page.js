// Sorted and filtered tables, cards as buttons, charts, and the answer at another budget.
const key = cell => {
  const text = cell.textContent.trim();
  const number = Number(text.replaceAll(",", "").replace(/^\+/, ""));
  return text === "" ? null : Number.isNaN(number) ? text : number;
};
const compare = (one, other) => typeof one === "number" && typeof other === "number"
  ? one - other : String(one).localeCompare(String(other), undefined, { numeric: true });
document.querySelectorAll("table.sortable th button").forEach(button => button.addEventListener("click", () => {
  const head = button.parentElement, row = head.parentElement, body = row.closest("table").tBodies[0];
  const column = [...row.children].indexOf(head), descending = head.getAttribute("aria-sort") === "ascending";
  const lines = [...body.rows].map(line => [key(line.cells[column]), line]);
  // What is not known stays at the end, whichever way the column is sorted.
  lines.sort(([one], [other]) => one === null || other === null
    ? (one === null) - (other === null) : compare(one, other) * (descending ? -1 : 1));
  [...row.children].forEach(cell => cell.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", descending ? "descending" : "ascending");
  body.append(...lines.map(([, line]) => line));
}));

document.querySelectorAll("input.filter").forEach(input => input.addEventListener("input", () => {
  const words = input.value.toLowerCase().split(/\s+/);
  [...input.closest(".table").querySelector("tbody").rows].forEach(line => {
    const text = line.textContent.toLowerCase();
    line.hidden = !words.every(word => text.includes(word));
  });
}));

const buttons = [...document.querySelectorAll(".choices button")];
const choose = chosen => {
  buttons.forEach(button => button.setAttribute("aria-pressed", String(button === chosen)));
  document.querySelectorAll("section[data-choice]").forEach(section => {
    section.hidden = section.dataset.choice !== chosen.textContent;
  });
  window.dispatchEvent(new Event("resize"));  // a chart has no width before it is shown
};
buttons.forEach(button => button.addEventListener("click", () => choose(button)));

const number = (value, digits = 0) => value.toLocaleString("en", { maximumFractionDigits: digits });
const about = line => `${line.name}: ${number(line.mib, 1)} MiB, ${number(line.speed)} tokens/s`;
const fastest = lines => lines.reduce((best, line) => best === null || line.speed > best.speed ? line : best, null);
const whatIf = (view, output) => {
  const lines = view.data("configurations"), [answer] = view.signal("marked"), own = view.signal("budget");
  view.addSignalListener("budget", (_, budget) => {
    const fitting = lines.filter(line => line.mib <= budget);
    const measured = budget === own && answer >= 0
      ? lines[answer] : fastest(fitting.filter(line => line.kind === "measured"));
    const predicted = fastest(fitting.filter(line => line.kind !== "measured" && !line.failed));
    const faster = predicted && (!measured || predicted.speed > measured.speed) ? predicted : null;
    output.replaceChildren(`At ${number(budget, 1)} MiB: `, measured ? `measured, ${about(measured)}.`
      : "nothing that was measured fits.", faster ? ` Predicted to be faster, not measured: ${about(faster)}.` : "");
    view.signal("marked", [measured, faster].filter(Boolean).map(line => line.id)).runAsync();
  });
};
const moments = (view, output) => {
  view.addSignalListener("moment", (_, moment) => { output.textContent = view.data("moments")[moment].told; });
  view.addEventListener("pointermove", (_, item) => {
    if (item?.datum?.told) view.signal("moment", item.datum.moment).runAsync();
  });
};
const options = { renderer: "svg", actions: false, tooltip: { theme: "custom" } };
const drawn = [...document.querySelectorAll("[data-chart]")].map(async place => {
  const spec = JSON.parse(place.querySelector("script").textContent);
  spec.config.legend.columns = Math.max(1, Math.floor((place.clientWidth || document.body.clientWidth) / 200));
  const { view } = await vegaEmbed(place.querySelector(".chart"), spec, options);
  const output = place.querySelector("output");
  if (output) (output.className === "told" ? moments : whatIf)(view, output);
});
Promise.all(drawn).then(() => {
  if (buttons.length) choose(buttons[0]);
  document.documentElement.dataset.drawn = "yes";
});
window.addEventListener("beforeprint", () => {
  document.querySelectorAll("details").forEach(part => { part.open = true; });
  document.querySelectorAll("section[data-choice]").forEach(part => { part.hidden = false; });
  window.dispatchEvent(new Event("resize"));
});
