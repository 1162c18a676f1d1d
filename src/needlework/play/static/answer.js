/** The answer token by token with probabilities, beside the untouched model's, and bars of the forced choice. */

import { el, fill, percent } from "play/dom.js";

/** Return whether the right answer occurs in a text as whole words; null if it is not known. */
export function isRight(target, text) {
  const words = (value) => ` ${value.toLowerCase().match(/[\p{L}\p{N}]+/gu)?.join(" ") ?? ""} `;
  return target.trim() ? words(text).includes(words(target)) : null;
}

/**
 * Build the view.
 *
 * @param onToken Called with the index of the answer token that the reader points at.
 * @returns An object with `show(answer, untouched, prompt, token)`, `showTrouble(message)` and `busy(isBusy)`.
 */
export function answerView(container, onToken) {
  const now = el("div", { class: "said" });
  const before = el("div", { class: "said before" });
  const nowBadge = el("span", {});
  const beforeBadge = el("span", {});
  const choices = el("div", { class: "choices" });
  const trouble = el("p", { class: "trouble", role: "alert", hidden: true });
  const done = el("p", { class: "hint", id: "done" });
  fill(
    container,
    trouble,
    el(
      "div",
      { class: "two" },
      el("div", { class: "one" }, el("h3", {}, "Now ", nowBadge), now),
      el("div", { class: "one" }, el("h3", {}, "Untouched ", beforeBadge), before),
    ),
    choices,
    done,
  );

  function said(element, badge, answer, target, token, interactive) {
    if (!answer) {
      fill(element, el("span", { class: "hint" }, "…"));
      return;
    }
    const right = isRight(target, answer.text);
    badge.className = right === null ? "" : right ? "badge yes" : "badge no";
    badge.textContent = right === null ? "" : right ? "right" : "wrong";
    const chips = answer.tokens.map((each, i) => {
      const text = each.text.trim() || JSON.stringify(each.text);
      const inside = [el("span", { class: "word" }, text), el("span", { class: "share" }, percent(each.probability))];
      if (!interactive) return el("span", { class: "chip" }, inside);
      const look = () => onToken(i);
      const name = `answer token ${i + 1}: ${text}, probability ${percent(each.probability)}; show attention`;
      const attributes = { type: "button", class: "chip", "aria-pressed": i === token, "aria-label": name };
      return el("button", { ...attributes, onmouseenter: look, onfocus: look, onclick: look }, inside);
    });
    fill(element, el("span", { class: "chips" }, chips));
  }

  function bars(answer, untouched, target) {
    if (!answer.options.length) {
      fill(choices);
      return;
    }
    const rows = answer.options.map((option, i) => {
      const was = untouched?.options[i];
      const right = target.trim() !== "" && option.text.trim() === target.trim();
      const bar = el("span", { class: "bar" });
      bar.style.setProperty("--share", option.probability.toFixed(4));
      const mark = was ? el("span", { class: "was", title: `untouched: ${percent(was.probability)}` }) : null;
      mark?.style.setProperty("--share", was.probability.toFixed(4));
      return el(
        "tr",
        { class: right ? "right" : "" },
        el("th", { scope: "row" }, option.text.trim(), right ? el("span", { class: "hidden" }, " (right)") : null),
        el("td", { class: "track" }, el("span", { class: "rail" }, bar, mark)),
        el("td", { class: "number" }, percent(option.probability)),
        el("td", { class: "number soft" }, was ? percent(was.probability) : ""),
      );
    });
    const head = ["Forced choice", "", "now", "untouched"].map((text) => el("th", { scope: "col" }, text));
    fill(choices, el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows)));
  }

  return {
    show(answer, untouched, prompt, token) {
      trouble.hidden = true;
      said(now, nowBadge, answer, prompt.target, token, true);
      said(before, beforeBadge, untouched, prompt.target, token, false);
      bars(answer, untouched, prompt.target);
      const notes = answer.notes.length ? ` ${answer.notes.map((note) => `Note: ${note}.`).join(" ")}` : "";
      done.textContent = `${done_(answer.receipt)}${notes} Answered in ${Math.round(answer.milliseconds)} ms.`;
    },
    press(token) {
      now.querySelectorAll("button").forEach((chip, i) => chip.setAttribute("aria-pressed", i === token));
    },
    showTrouble(message) {
      trouble.hidden = false;
      trouble.textContent = message;
    },
    busy(isBusy) {
      container.classList.toggle("busy", isBusy);
      container.setAttribute("aria-busy", isBusy);
    },
  };
}

const WORDS = {
  heads_zeroed: "head outputs zeroed",
  keys_hidden: "keys hidden by the limit",
  columns_touched: "weights on the needle or off it changed",
  states_cut: "tokens read without memory",
  convolutions_cut: "convolutions cut",
  carries_cut: "states emptied",
  groups_zeroed: "groups zeroed",
  blocks_dropped: "blocks dropped",
  kv_swapped: "keys and values swapped",
  recurrent_swapped: "recurrent states swapped",
};
const WHEN = { prefill: "while reading", between: "before answering", decode: "while answering" };

function done_(receipt) {
  const parts = Object.keys(WHEN).flatMap((phase) => {
    const done = Object.entries(receipt[phase] ?? {})
      .filter(([name]) => WORDS[name])
      .map(([name, count]) => (phase === "between" ? WORDS[name] : `${count.toLocaleString("en")} ${WORDS[name]}`));
    return done.length ? [`${WHEN[phase]}: ${done.join(", ")}`] : [];
  });
  return parts.length ? `Done ${parts.join("; ")}.` : "Nothing was changed.";
}
