(() => {
  "use strict";
  const root = document.documentElement;
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");
  let choice = "auto";
  try { choice = localStorage.getItem("needlework-theme") || "auto"; } catch { /* storage may be closed to files */ }
  const paint = () => {
    root.dataset.theme = choice === "auto" ? (system.matches ? "dark" : "light") : choice;
    button.textContent = "Colours: " + choice;
    button.setAttribute("aria-label", "Colours: " + (choice === "auto" ? "as the system" : choice));
  };
  button.addEventListener("click", () => {
    choice = { auto: "dark", dark: "light", light: "auto" }[choice] || "auto";
    try { localStorage.setItem("needlework-theme", choice); } catch { /* then only for this visit */ }
    paint();
  });
  system.addEventListener("change", paint);
  paint();

  // A link opens the folded part that it leads to; paper shows every part.
  const unfold = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    const inside = target.querySelector(":scope > details.part");
    for (let each = inside || target; each; each = each.parentElement) if (each.tagName === "DETAILS") each.open = true;
    target.scrollIntoView();
  };
  addEventListener("hashchange", unfold);
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => { each.open = true; }));
  unfold();

  const data = JSON.parse(document.getElementById("data").textContent);
  const dialog = document.getElementById("trials");
  const list = document.getElementById("trials-list");
  let open = null;

  // Everything a model said goes in as text, never as markup.
  const make = (name, text, kind) => {
    const element = document.createElement(name);
    if (text !== undefined) element.textContent = text;
    if (kind) element.className = kind;
    return element;
  };

  const card = (number) => {
    const [prompt, sample, intervention, target, output, scores] = data.trials[number];
    const item = make("li");
    const head = make("div", undefined, "meta");
    const judged = "correct" in scores;
    const right = scores.correct >= 1;
    if (judged) head.append(make("span", right ? "right" : "wrong", "chip " + (right ? "supported" : "not-supported")));
    head.append(make("span", sample), make("code", intervention));
    const facts = make("dl");
    const row = (name, value) => { if (value) facts.append(make("dt", name), make("dd", value)); };
    row("wanted", target);
    row("answer", output);
    row("scores", Object.entries(scores).map(([name, value]) => name + " " + value).join(" · "));
    const text = make("pre");
    text.tabIndex = 0;
    text.setAttribute("aria-label", "Prompt");
    data.prompts[prompt].forEach((piece, i) => text.append(i % 2 ? make("mark", piece) : piece));
    item.append(head, facts, text);
    return { item, text, right, judged };
  };

  const fill = (filter) => {
    list.replaceChildren();
    for (const number of open.trials) {
      const { item, text, right, judged } = card(number);
      if (filter !== "all" && (!judged || right !== (filter === "right"))) continue;
      list.append(item);
      const first = text.querySelector("mark");
      if (first) text.scrollTop = Math.max(0, first.offsetTop - text.offsetTop - 60);
    }
    for (const each of document.querySelectorAll("#trials-filter button"))
      each.setAttribute("aria-pressed", String(each.dataset.f === filter));
    list.scrollTop = 0;
  };

  const show = (key) => {
    open = data.cells[key];
    if (!open) return;
    document.getElementById("trials-title").textContent = open.title;
    const some = open.trials.length < open.n ? "Shown: " + open.trials.length + " of " + open.n + " trials, a seeded choice, failures first"
      : "All " + open.n + " trials, failures first";
    document.getElementById("trials-count").textContent = some + " (" + open.wrong + " of " + open.n + " wrong).";
    if (!dialog.open) dialog.showModal();
    fill("all");
  };

  let last = null;
  const act = (target) => {
    const hot = target.closest("[data-k]");
    if (!hot) return false;
    last = hot;
    show(hot.dataset.k);
    return true;
  };
  document.addEventListener("click", (event) => act(event.target));
  document.getElementById("close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  dialog.addEventListener("close", () => { if (last) last.focus(); });
  document.getElementById("trials-filter").addEventListener("click", (event) => {
    if (event.target.dataset.f) fill(event.target.dataset.f);
  });

  const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  document.addEventListener("keydown", (event) => {
    const hot = event.target.closest ? event.target.closest("svg [data-k]") : null;
    if (!hot) return;
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); act(hot); return; }
    const step = steps[event.key];
    if (!step) return;
    event.preventDefault();
    const r = Number(hot.dataset.r) + step[0], c = Number(hot.dataset.c) + step[1];
    const next = hot.ownerSVGElement.querySelector('[data-r="' + r + '"][data-c="' + c + '"]');
    if (!next) return;
    hot.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  });
})();
