/** The controls beside the model: how many heads stay and which, when it happens, what attention sees, and the memory. */

import { el, fill, setAttribute } from "play/dom.js";

const PHASES = { prefill: "reading", decode: "answering", both: "both" };
const SEES = {
  keep: "everything",
  omit: "all but the needle",
  only: "only the needle",
  null: "nothing",
  balanced: "the needle, evenly",
};
const WAYS = {
  entropy: "sharpest attention (entropy)",
  l2: "largest 2-norm of attention",
  norm: "largest output",
  random: "at random",
};

/**
 * Build the controls.
 *
 * @param container   Element to fill.
 * @param description Of the provider.
 * @param change      As in layers.js.
 * @param try_        As in layers.js.
 * @param ranking     Returns a promise of the ranking of a name.
 * @param onLayerCut  Called with what the switch of a recurrent layer cuts.
 * @returns An object with `update(controls, prompt)`.
 */
export function controlPanel(container, description, change, try_, ranking, onLayerCut) {
  const updates = []; // functions of (controls, prompt)
  const guards = []; // {element, flip, why}: disabled where the change is not available
  const attention = description.layers.filter((layer) => layer.attention);
  const recurrent = description.layers.filter((layer) => layer.recurrent);
  let number = 0;

  function labelled(text, input, note = null) {
    input.id = `control-${number++}`;
    return el("div", { class: "field" }, el("label", { for: input.id }, text), input, note);
  }

  function guard(element, flip) {
    guards.push({ element, flip });
    return element;
  }

  function phases(title, get, set) {
    const name = `phase-${number++}`;
    const inputs = Object.entries(PHASES).map(([phase, text]) => {
      const input = el("input", { type: "radio", name, value: phase, onchange: () => change((c) => set(c, phase), `${title} ${text}`) });
      updates.push((controls) => (input.checked = get(controls) === phase));
      return el("label", {}, guard(input, (c) => set(c, phase)), el("span", {}, text));
    });
    return el("fieldset", { class: "phases" }, el("legend", {}, title), inputs);
  }

  function choice(text, options, get, set) {
    const select = el("select", { onchange: () => change((c) => set(c, select.value), text) });
    for (const [value, shown] of Object.entries(options)) {
      const option = el("option", { value }, shown);
      select.append(option);
      guard(option, (c) => set(c, value));
    }
    updates.push((controls) => (select.value = get(controls)));
    return labelled(text, select);
  }

  function group(title, kind, ...children) {
    return el("fieldset", { class: `group ${kind}` }, el("legend", {}, title), children);
  }

  function heads() {
    const most = Math.min(...attention.map((layer) => layer.attention.heads));
    const slider = el("input", { type: "range", min: 0, max: most, step: 1 });
    const output = el("output", {});
    const setCount = (controls, k) => {
      controls.heads.keep = k >= most ? null : { by: "entropy", seed: 0, ...(controls.heads.keep ?? chosen), k };
    };
    let chosen = { by: "entropy", seed: 0 }; // the way of choosing while all heads are kept
    slider.addEventListener("input", () => change((c) => setCount(c, Number(slider.value)), "heads kept"));
    const way = el("select", {});
    const named = {};
    for (const score of description.scores) way.append(el("option", { value: score }, WAYS[score] ?? score));
    for (const name of description.rankings) {
      way.append(el("option", { value: `ranking:${name}` }, `a fixed ranking (${name.replaceAll("_", " ")})`));
    }
    const other = el("option", { value: "other", hidden: true }, "the ranking of the text");
    way.append(other);
    way.addEventListener("change", async () => {
      const value = way.value;
      let by = value;
      if (value.startsWith("ranking:")) {
        way.disabled = true;
        try {
          by = named[value] ??= { ranking: await ranking(value.slice(8)) };
        } catch (error) {
          change(null, error.message);
          return;
        } finally {
          way.disabled = false;
          way.focus();
        }
      }
      chosen = { by, seed: 0 };
      change((c) => c.heads.keep && Object.assign(c.heads.keep, chosen), "the way heads are chosen");
    });
    const again = el("button", { type: "button", onclick: () => change((c) => c.heads.keep.seed++, "other random heads") }, "Draw again");
    updates.push((controls) => {
      const keep = controls.heads.keep;
      slider.value = keep ? keep.k : most;
      output.textContent = keep && keep.k < most ? `${keep.k} of ${most}` : `all ${most}`;
      setAttribute(slider, "aria-valuetext", output.textContent);
      const by = (keep ?? chosen).by;
      const name = Object.keys(named).find((key) => JSON.stringify(named[key]) === JSON.stringify(by));
      other.hidden = typeof by === "string" || Boolean(name);
      way.value = typeof by === "string" ? by : (name ?? "other");
      again.hidden = !(keep && by === "random");
    });
    guards.push({ element: again, flip: (c) => c.heads.keep && c.heads.keep.seed++ });
    return group(
      "Attention heads",
      "attention",
      labelled(["Heads kept in each layer: ", output], slider),
      el("div", { class: "pair" }, labelled("Chosen by", way), again),
      phases("Off while", (c) => c.heads.phase, (c, phase) => (c.heads.phase = phase)),
    );
  }

  function sight() {
    const on = el("input", { type: "number", min: 1, max: 1e6, step: 1, placeholder: "all", inputmode: "numeric" });
    const first = el("input", { type: "number", min: 0, max: 1e6, step: 1, placeholder: "0", inputmode: "numeric" });
    on.addEventListener("change", () => change((c) => (c.limit.tokens = on.value >= 1 ? Math.floor(on.value) : null), "context limit"));
    first.addEventListener("change", () => change((c) => (c.limit.sinks = first.value > 0 ? Math.floor(first.value) : 0), "first tokens"));
    guard(on, (c) => (c.limit.tokens = c.limit.tokens === null ? 16 : null));
    updates.push((controls) => {
      on.value = controls.limit.tokens ?? "";
      first.value = controls.limit.sinks || "";
      first.disabled = controls.limit.tokens === null;
    });
    return group(
      "What attention sees",
      "attention",
      el(
        "div",
        { class: "pair" },
        choice("While reading", SEES, (c) => c.hide.prefill, (c, mode) => (c.hide.prefill = mode)),
        choice("While answering", SEES, (c) => c.hide.decode, (c, mode) => (c.hide.decode = mode)),
      ),
      el("div", { class: "pair" }, labelled("Only the last … tokens", on), labelled("and the first …", first)),
      phases("Limited while", (c) => c.limit.phase, (c, phase) => (c.limit.phase = phase)),
    );
  }

  function recurrence() {
    const cut = el(
      "select",
      {
        onchange() {
          onLayerCut(cut.value);
          change((c) => Object.keys(c.recurrent.cut).forEach((layer) => (c.recurrent.cut[layer] = cut.value)), "what is cut");
        },
      },
      el("option", { value: "memory" }, "its memory of earlier tokens"),
      el("option", { value: "block" }, "its whole output"),
    );
    updates.push((controls) => {
      const cuts = new Set(Object.values(controls.recurrent.cut));
      if (cuts.has("block")) cut.value = "block";
      else if (cuts.size) cut.value = "memory";
      onLayerCut(cut.value);
    });
    guard(cut.lastChild, (c) => {
      for (const layer of recurrent) c.recurrent.cut[layer.index] = "block";
    });
    return group(
      "Recurrent layers",
      "recurrent",
      labelled("Switching a layer off cuts", cut),
      phases("Off while", (c) => c.recurrent.phase, (c, phase) => (c.recurrent.phase = phase)),
    );
  }

  function swapping() {
    const halves = [
      ["kv", "keys and values of attention", attention.length],
      ["recurrent", "recurrent states", recurrent.length],
    ];
    const boxes = halves
      .filter(([, , there]) => there)
      .map(([half, text]) => {
        const flip = (c) => (c.swap[half] = !c.swap[half]);
        const box = el("input", { type: "checkbox", onchange: () => change(flip, text) });
        updates.push((controls, prompt) => {
          box.checked = controls.swap[half];
          box.disabled = !prompt?.twin && !controls.swap[half];
        });
        return el("label", { class: "check" }, guard(box, flip), el("span", {}, text));
      });
    const twin = el("p", { class: "hint twin" });
    updates.push((_, prompt) => {
      twin.textContent = prompt?.twin ? `Twin: … ${prompt.twin.trim()} …` : "The prompt has no twin: edit it to give one.";
    });
    return group("Before it answers, take from the twin prompt", "memory", boxes, twin);
  }

  const parts = [];
  if (attention.length) parts.push(heads(), sight());
  else parts.push(el("p", { class: "hint" }, "This model has no attention: nothing here to keep, hide or limit."));
  if (recurrent.length) parts.push(recurrence());
  else if (description.no_mixers) parts.push(el("p", { class: "hint" }, description.no_mixers));
  if (attention.length || recurrent.length) parts.push(swapping());
  fill(container, parts);

  return {
    update(controls, prompt) {
      for (const update of updates) update(controls, prompt);
      for (const { element, flip } of guards) {
        const why = try_(flip);
        if (why) element.disabled = true;
        else if (element.dataset.guarded) element.disabled = false;
        setAttribute(element, "data-guarded", why ? "1" : null);
        setAttribute(element, "title", why || null);
      }
    },
  };
}
