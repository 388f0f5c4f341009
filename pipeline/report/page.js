// Sorted and filtered tables, buttons, charts, and the answer at another budget.
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
  const words = input.value.toLowerCase().split(/\s+/), table = input.closest(".table");
  const lines = [...table.querySelector("tbody").rows];
  lines.forEach(line => {
    const text = line.textContent.toLowerCase();
    line.hidden = !words.every(word => text.includes(word));
  });
  table.toggleAttribute("data-nothing", lines.every(line => line.hidden));
}));

// A table says that it has more columns until its end is reached.
const setMore = area => area.toggleAttribute("data-more", area.scrollLeft + area.clientWidth < area.scrollWidth - 2);
const areas = [...document.querySelectorAll(".scroll")];
areas.forEach(area => area.addEventListener("scroll", () => setMore(area)));
addEventListener("resize", () => areas.forEach(setMore));
areas.forEach(setMore);

document.querySelectorAll("button.copy").forEach(button => button.addEventListener("click", async () => {
  const text = button.dataset.copied;
  const field = Object.assign(document.createElement("textarea"), { value: text });
  const byHand = () => { button.append(field); field.select(); document.execCommand("copy"); };  // in a sandboxed frame
  await (navigator.clipboard?.writeText(text) ?? Promise.reject()).catch(byHand);
  button.textContent = "copied";
}));

const buttons = [...document.querySelectorAll(".choices button")];
const pressed = () => buttons.filter(button => button.getAttribute("aria-pressed") === "true");
const choose = chosen => {
  [...chosen.parentElement.children].forEach(one => one.setAttribute("aria-pressed", String(one === chosen)));
  const choice = pressed().map(button => button.textContent).join("\n");
  document.querySelectorAll("section[data-choice]").forEach(section => {
    section.hidden = section.dataset.choice !== choice;
  });
  window.dispatchEvent(new Event("resize"));  // a chart has no width before it is shown
};
buttons.forEach(button => button.addEventListener("click", () => choose(button)));

const together = text => text.replace(/(?<=\d) (?=(?:[MG]iB|m?s|%|x|tokens\/s)(?!\w))|(?<=±) /g, "\u00a0");  // as in page.py
const number = (value, digits = 0) => value.toLocaleString("en", { maximumFractionDigits: digits });
const about = line => together(`${line.about.split("\n")[0]}: ${number(line.mib, 1)} MiB, ${line.speed_text}`);
const isBetter = (one, other) => one.speed > other.speed || (one.speed === other.speed && one.mib < other.mib);
const fastest = lines => lines.reduce((best, line) => best === null || isBetter(line, best) ? line : best, null);
const whatIf = (view, output) => {
  const lines = view.data("configurations"), [answer] = view.signal("marked"), own = view.signal("budget");
  const isPlan = lines.every(line => !("kind" in line));  // which measures nothing
  const menus = Object.keys(view.getState().signals).filter(name => /^of_\d+_chosen$/.test(name));
  const isShown = line => menus.every(name => line[name.replace("_chosen", "")] === view.signal(name));
  menus.forEach(name => view.addSignalListener(name, () => {
    output.parentElement.toggleAttribute("data-nothing", !lines.some(isShown));
  }));
  view.addSignalListener("budget", (_, budget) => {
    const fitting = lines.filter(line => line.mib <= budget);
    const measured = !isPlan && budget === own && answer >= 0
      ? lines[answer] : fastest(fitting.filter(line => line.kind === "measured"));
    const predicted = fastest(fitting.filter(line => line.kind !== "measured" && !line.failed));
    const faster = predicted && (!measured || predicted.speed > measured.speed) ? predicted : null;
    const start = predicted ? `start with ${about(predicted)}.` : "nothing that was predicted fits.";
    const found = measured ? `measured, ${about(measured)}.` : "nothing that was measured fits.";
    const better = faster ? ` Predicted to ${measured ? "be faster" : "fit"}, not measured: ${about(faster)}.` : "";
    output.textContent = together(`At ${number(budget, 1)} MiB: `) + (isPlan ? start : found + better);
    view.signal("marked", [measured, faster].filter(Boolean).map(line => line.id)).runAsync();
  });
};
const moments = (view, output) => {
  view.addSignalListener("moment", (_, moment) => { output.textContent = together(view.data("moments")[moment].details); });
  view.addEventListener("pointermove", (_, item) => {
    if (item?.datum?.details) view.signal("moment", item.datum.moment).runAsync();
  });
};
const options = { renderer: "svg", actions: false, tooltip: { theme: "custom" } };
const views = new Map();
const drawn = [...document.querySelectorAll("[data-chart]")].map(async place => {
  const spec = JSON.parse(place.querySelector("script").textContent);
  const width = place.clientWidth || document.body.clientWidth;
  const columns = Math.max(1, Math.floor((width - 60) / 200));  // beside the axis, which takes about so many pixels
  const legend = width < 900 ? { columns } : { orient: "right", columns: 1 };
  Object.assign(spec.config.legend, legend);
  const { view } = await vegaEmbed(place.querySelector(".chart"), spec, options);
  views.set(place, view);
  place.querySelectorAll("input[type=range]").forEach(input => {  // beside which Vega writes all digits
    const shown = input.nextElementSibling;
    const isMoment = place.querySelector("output.details") !== null;
    const write = value => {
      shown.textContent = isMoment
        ? `${number(value + 1)} of ${number(+input.max + 1)}` : number(value, value < 1000 ? 2 : 0);
    };
    write(+shown.textContent);  // which may be beyond the end of the range
    input.addEventListener("input", () => write(+input.value));
  });
  const output = place.querySelector("output");
  if (output && !("follows" in place.dataset)) (output.className === "details" ? moments : whatIf)(view, output);
});
// Shows in a panel what the pointer is on in the one before it, or the cell to which the arrow keys go.
const follow = place => {
  const map = place.previousElementSibling, svg = map.querySelector("svg");
  const show = datum => {
    if (!datum?.parts) return;
    place.querySelector("output").textContent = together(datum.about);
    const view = views.get(place), names = view.data("parts").map(part => part.name);
    view.data("parts", names.map((name, index) => ({ name, mib: datum.parts[index] }))).runAsync();
  };
  ["mouseover", "click"].forEach(kind => views.get(map).addEventListener(kind, (_, item) => show(item?.datum)));
  svg.setAttribute("tabindex", 0);
  svg.addEventListener("keydown", event => {
    const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const cells = [...svg.querySelectorAll(".cells_marks path")];
    const cell = cells.at((cells.indexOf(document.activeElement) + step) % cells.length);
    cell.setAttribute("tabindex", -1);
    cell.focus();
    show(cell.__data__.datum);
  });
};
const stored = (() => { try { return sessionStorage; } catch { return null; } })();  // none in MLflow's artifact viewer
const page = document.documentElement, viewKey = `view of ${location.pathname}`;
const controls = () => [...document.querySelectorAll("input, select")];
Promise.all(drawn).then(() => {
  document.querySelectorAll("[data-follows]").forEach(follow);
  // A page that has loaded itself again looks as its reader left it.
  const left = JSON.parse(stored?.getItem(viewKey) ?? "{}");
  stored?.removeItem(viewKey);
  document.querySelectorAll(".choices button:first-child").forEach(choose);
  buttons.filter((_, number) => left.chosen?.includes(number)).forEach(choose);
  if (left.values?.length === controls().length) controls().forEach((control, number) => {
    if (control.value === left.values[number]) return;
    control.value = left.values[number];
    ["input", "change"].forEach(kind => control.dispatchEvent(new Event(kind)));
  });
  if (left.top !== undefined) scrollTo(0, left.top);
  page.dataset.drawn = "yes";
});
if (page.dataset.reloadSeconds) {
  let touched = 0;
  const touch = () => { touched = Date.now(); };
  ["pointermove", "pointerdown", "keydown", "wheel"].forEach(kind => addEventListener(kind, touch));
  setInterval(() => {
    if (document.hidden || Date.now() - touched < 5000) return;  // not while its reader works with it
    const chosen = pressed().map(button => buttons.indexOf(button));
    const view = { top: scrollY, chosen, values: controls().map(control => control.value) };
    stored?.setItem(viewKey, JSON.stringify(view));
    location.reload();
  }, 1000 * page.dataset.reloadSeconds);
}
let folded = [], hidden = [];  // of what is printed whole, to be as it was afterwards
const setShown = isShown => {
  folded.forEach(part => { part.open = isShown; });
  hidden.forEach(part => { part.hidden = !isShown; });
  window.dispatchEvent(new Event("resize"));
};
window.addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("details:not([open])")];
  hidden = [...document.querySelectorAll("section[data-choice][hidden]")];
  setShown(true);
});
window.addEventListener("afterprint", () => setShown(false));
