/** The map of all heads by their attention on the needle. Clicking a head draws its attention over the prompt. */

import { el, fill, percent, rove } from "play/dom.js";

/**
 * Build the map.
 *
 * @param layers  `layers` of the provider's description.
 * @param onHead  Called with "layer.head", or null for the mean of all heads.
 * @returns An object with `show(attention)`, `choose(head)`, `words(head, token)` and `weights(attention, head)`.
 */
export function headMap(container, layers, onHead) {
  const own = layers.filter((layer) => layer.attention);
  const cells = new Map();
  const mean = el("button", { type: "button", class: "mean", "aria-pressed": "true", onclick: () => onHead(null) }, "mean of all heads");
  const rows = own.map((layer) => {
    const row = Array.from({ length: layer.attention.heads }, (_, i) => {
      const name = `${layer.index}.${i}`;
      const cell = el("button", { type: "button", class: "heat", "aria-pressed": "false", tabindex: -1, onclick: () => onHead(name) });
      cells.set(name, cell);
      return cell;
    });
    return { layer, row };
  });
  const lines = rows.map(({ layer, row }) =>
    el("div", { class: "heats", role: "group", "aria-label": `layer ${layer.index}` }, el("span", { class: "index" }, String(layer.index)), row),
  );
  fill(
    container,
    el("h3", {}, "Attention on the needle, by head"),
    el("div", { class: "map" }, lines),
    el("p", { class: "hint" }, "Each row of squares is a layer. Choose a head to see where it looks; point at a token of the answer to see it from there. ", mean),
  );
  rove(container, () => rows.map(({ row }) => row));
  if (rows.length) rows[0].row[0].tabIndex = 0;

  return {
    show(attention) {
      for (const { layer, mass } of attention?.needle ?? []) {
        mass.forEach((share, i) => {
          const cell = cells.get(`${layer}.${i}`);
          cell.style.setProperty("--mass", share.toFixed(3));
          cell.setAttribute("aria-label", `layer ${layer}, head ${i}: ${percent(share)} of its attention on the needle`);
          cell.title = `layer ${layer}, head ${i}: ${percent(share)} on the needle`;
        });
      }
      container.classList.toggle("stale", !attention);
    },
    choose(head) {
      for (const [name, cell] of cells) cell.setAttribute("aria-pressed", name === head);
      mean.setAttribute("aria-pressed", head === null);
    },
    words(head, token) {
      const who = head === null ? "All heads on average" : `Layer ${head.split(".")[0]}, head ${head.split(".")[1]}`;
      return `${who}: attention from answer token ${token + 1}.`;
    },
    weights(attention, head) {
      if (head !== null) {
        const [layer, index] = head.split(".").map(Number);
        return attention.layers.find((each) => each.layer === layer)?.weights[index] ?? null;
      }
      const all = attention.layers.flatMap((each) => each.weights);
      return all.length ? all[0].map((_, key) => all.reduce((sum, weights) => sum + weights[key], 0) / all.length) : null;
    },
  };
}
