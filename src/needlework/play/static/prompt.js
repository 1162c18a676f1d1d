/** The prompt: as the model's tokens, with the needle marked and attention drawn over it; and the fields to draw or type one. */

import { el, fill, setAttribute } from "play/dom.js";

const FIELDS = [
  ["before", "Text before the needle", 3],
  ["needle", "Needle", 1],
  ["after", "Text after the needle", 3],
  ["question", "Question", 1],
  ["twin", "Needle of the twin prompt (for swapped memory)", 1],
];
const TYPING_PAUSE = 350; // milliseconds

/**
 * Build the view.
 *
 * @param draws    `draws` of the provider's description.
 * @param unit     What lengths count.
 * @param onDraw   Called with {length, depth, seed}.
 * @param onType   Called with the changed fields of a prompt.
 * @param fixed    Why prompts cannot be typed; "" if they can.
 * @returns An object with `showPrompt(prompt, draw)`, `showTokens(answer.prompt)` and `showAttention(weights)`.
 */
export function promptView(container, draws, unit, onDraw, onType, fixed) {
  const text = el("p", { class: "tokens", tabindex: 0, role: "group", "aria-label": "The prompt, as the model's tokens" });
  const legend = el("p", { class: "hint", id: "looks" });
  const select = (name, options, say) =>
    el("select", { "aria-label": name }, options.map((value) => el("option", { value }, say(value))));
  const length = select("Length", draws.lengths, (n) => `${n} ${unit}`);
  const depth = select("Depth of the needle", draws.depths, (n) => `needle at ${n} %`);
  let seed = 0;
  const draw = (next) => {
    seed = (next + draws.draws) % draws.draws;
    onDraw({ length: Number(length.value), depth: Number(depth.value), seed });
  };
  length.addEventListener("change", () => draw(seed));
  depth.addEventListener("change", () => draw(seed));
  const another = el("button", { type: "button", onclick: () => draw(seed + 1) }, "Draw another");
  const label = el("span", { class: "hint", id: "drawn" });

  let timer = 0;
  const inputs = {};
  const type = () => {
    clearTimeout(timer);
    timer = setTimeout(() => onType(typed()), TYPING_PAUSE);
  };
  const typed = () => {
    const fields = Object.fromEntries(FIELDS.map(([name]) => [name, inputs[name].value]));
    const options = inputs.options.value.split("\n").filter((line) => line.trim());
    return { ...fields, options, target: inputs.target.value };
  };
  const field = (name, title, rows) => {
    inputs[name] = el("textarea", { id: `prompt-${name}`, rows, disabled: Boolean(fixed), spellcheck: "false", autocomplete: "off", oninput: type });
    return el("div", { class: "field" }, el("label", { for: `prompt-${name}` }, title), inputs[name]);
  };
  const form = el(
    "details",
    { id: "type" },
    el("summary", {}, "Type your own"),
    fixed ? el("p", { class: "hint" }, fixed) : null,
    FIELDS.map(([name, title, rows]) => field(name, title, rows)),
    field("options", "Values to choose from, one in each line", 3),
    field("target", "Right answer", 1),
  );
  fill(container, el("div", { class: "draw" }, length, depth, another, label), text, legend, form);
  let tokens = [];

  return {
    showPrompt(prompt, drawn) {
      for (const [name, input] of Object.entries(inputs)) {
        const value = name === "options" ? prompt.options.join("\n") : prompt[name];
        if (input !== document.activeElement) input.value = value;
      }
      if (drawn) {
        seed = drawn.seed;
        length.value = drawn.length;
        depth.value = drawn.depth;
      }
      label.textContent = drawn ? `draw ${drawn.seed + 1} of ${draws.draws}` : "typed";
    },
    showTokens(prompt) {
      if (tokens.length === prompt.tokens.length && tokens.every((span, i) => span.textContent === prompt.tokens[i])) return;
      const inNeedle = (i) => prompt.needle.some(([start, end]) => start <= i && i < end);
      tokens = prompt.tokens.map((token, i) => el("span", { class: inNeedle(i) ? "token needle" : "token" }, token));
      const children = [];
      for (let i = 0; i < tokens.length; i++) {
        if (!inNeedle(i)) children.push(tokens[i]);
        else {
          const mark = el("mark", {});
          for (; i < tokens.length && inNeedle(i); i++) mark.append(tokens[i]);
          children.push(mark);
          i--;
        }
      }
      fill(text, children);
    },
    /** Draw weights of 0..1 over the prompt's tokens; null removes them. `words` says what is drawn. */
    showAttention(weights, words) {
      const most = weights ? Math.max(...weights.slice(0, tokens.length), 1e-6) : 1;
      tokens.forEach((span, i) => {
        const weight = weights?.[i] ?? 0;
        const drawn = weights && weight > 0.002 && weight > 0.04 * most;
        span.style.setProperty("--weight", drawn ? (weight / most).toFixed(3) : "0");
        span.classList.toggle("seen", Boolean(drawn));
        setAttribute(span, "title", drawn ? `${(weight * 100).toFixed(1)} % of the attention` : null);
      });
      legend.textContent = words;
    },
  };
}
