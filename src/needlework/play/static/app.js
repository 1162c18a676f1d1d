/** The page: keeps the state, asks the provider, and shows what comes back. */

import { answerView, isRight } from "play/answer.js";
import { headMap } from "play/attention.js";
import { codeOf } from "play/code.js";
import { controlPanel } from "play/controls.js";
import { byId, el, fill, setAttribute } from "play/dom.js";
import { controlsOf, partsOf, partsOfControls, textOf, unshown, untouched } from "play/intervention.js";
import { layerColumn } from "play/layers.js";
import { promptView } from "play/prompt.js";
import { ProviderError } from "play/provider.js";

const MOST_STEPS = 200; // of undo
const MOST_KEPT = 300; // answers

/** Open the provider that the page was made for, and start. */
export async function start() {
  theme();
  try {
    const provider = await openProvider();
    const page = new Page(provider, await provider.describe(), await provider.stories());
    await page.open();
    globalThis.playground = page; // for tests and the curious
  } catch (error) {
    if (!(error instanceof ProviderError)) console.error(error);
    showTrouble(error.message);
  }
}

async function openProvider() {
  const held = byId("play-data");
  if (!held) return (await import("play/server.js")).open();
  const data = JSON.parse(held.textContent);
  const link = byId("report");
  if (data.report && !/^[a-z]+:/i.test(data.report)) {
    link.href = data.report;
    link.hidden = false;
  }
  if (data.recorded) return (await import("play/recorded.js")).open(data);
  const text = byId("play-weights").textContent;
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer;
  return (await import("play/griffin.js")).open(data, bytes);
}

class Page {
  constructor(provider, description, stories) {
    Object.assign(this, { provider, description, stories_: stories });
    this.layers = description.layers;
    this.history = [];
    this.at = -1;
    this.answers = new Map(); // request as text -> answer
    this.draws = new Map(); // "length/depth/seed" -> prompt
    this.token = 0; // answer token whose attention is shown
    this.head = null; // "layer.head" whose attention is drawn; null: the mean
    this.asking = null; // AbortController of the latest request
    this.looking = null;
    this.untouchedAnswer = this.answer = this.attention = null;
  }

  get state() {
    return this.history[this.at];
  }

  async open() {
    const { description } = this;
    document.title = `${description.name} · needlework playground`;
    byId("lede").textContent = lede(description);
    const change = (mutate, what) => this.change(mutate, what);
    const try_ = (mutate) => this.unavailable(mutate);
    const unit = description.language === "toy" ? "words" : "tokens";
    this.columns = layerColumn(byId("layers-view"), this.layers, change, try_);
    const ranking = (name) => this.provider.ranking(name);
    const onCut = (site) => this.columns.setLayerCut(site);
    this.panel = controlPanel(byId("controls-view"), description, change, try_, ranking, onCut);
    const looks = el("div", { id: "map" });
    const fixed = description.provider === "recorded" ? "This page holds recorded answers to the prompts above." : "";
    const draw = (wanted) => this.draw(wanted);
    this.prompts = promptView(byId("prompt-view"), description.draws, unit, draw, (typed) => this.type(typed), fixed);
    this.said = answerView(byId("answer-view"), (token) => this.look(token, this.head));
    if (this.layers.some((layer) => layer.attention)) {
      byId("prompt").append(looks);
      this.map = headMap(looks, this.layers, (head) => this.look(this.token, head));
    }
    this.listen();
    for (const id of ["stories", "main", "bar"]) byId(id).hidden = false;
    await this.readAddress();
  }

  listen() {
    byId("undo").addEventListener("click", () => this.step(-1));
    byId("redo").addEventListener("click", () => this.step(1));
    byId("reset").addEventListener("click", () => this.set({ controls: untouched(), parts: [] }));
    byId("copy").addEventListener("click", () => this.showCode());
    byId("code-close").addEventListener("click", () => byId("code").close());
    byId("text-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.readText(byId("text").value);
    });
    byId("text").addEventListener("change", () => this.readText(byId("text").value));
    addEventListener("hashchange", () => this.readAddress());
    addEventListener("keydown", (event) => {
      if (!(event.ctrlKey || event.metaKey) || event.key.toLowerCase() !== "z" || event.target.matches("input, textarea")) return;
      event.preventDefault();
      this.step(event.shiftKey ? 1 : -1);
    });
  }

  /** Apply a change of the controls. Without a function, `what` is a message for the reader. */
  change(mutate, what) {
    if (!mutate) {
      this.message(what);
      return;
    }
    const controls = structuredClone(this.state.controls);
    mutate(controls);
    this.set({ controls, parts: partsOfControls(controls, this.layers) });
  }

  /** Return why a change of the controls is not available, or "". */
  unavailable(mutate) {
    const controls = structuredClone(this.state.controls);
    mutate(controls);
    return this.provider.unavailable(this.request(partsOfControls(controls, this.layers)));
  }

  request(parts = this.state.parts, prompt = this.state.prompt) {
    return { prompt, parts, max_new_tokens: this.description.max_new_tokens };
  }

  /** Make these fields of the state the current ones, as a step that can be undone. */
  set(fields) {
    const state = { ...this.state, ...fields };
    this.history = [...this.history.slice(0, this.at + 1), state].slice(-MOST_STEPS);
    this.at = this.history.length - 1;
    return this.refresh();
  }

  step(by) {
    const at = this.at + by;
    if (at < 0 || at >= this.history.length) return;
    this.at = at;
    this.refresh();
  }

  readText(text) {
    if (text.trim() === textOf(this.state.parts)) return;
    try {
      const parts = partsOf(text);
      this.set({ controls: controlsOf(parts, this.layers), parts });
    } catch (error) {
      this.message(error.message);
    }
  }

  async draw(draw) {
    try {
      this.set({ prompt: await this.drawn(draw), draw });
    } catch (error) {
      if (error.name === "AbortError") return; // another draw came after it
      this.fail(error);
      this.prompts.showPrompt(this.state.prompt, this.state.draw);
    }
  }

  async drawn(draw) {
    const name = `${draw.length}/${draw.depth}/${draw.seed}`;
    if (!this.draws.has(name)) this.draws.set(name, await this.provider.sample(draw));
    return this.draws.get(name);
  }

  type(typed) {
    const prompt = { ...this.state.prompt, ...typed, label: "" };
    if (JSON.stringify({ ...this.state.prompt, label: "" }) === JSON.stringify(prompt)) return;
    this.set({ prompt, draw: null });
  }

  /** Show the current state and ask for its answer; earlier questions that are not answered yet are dropped. */
  async refresh() {
    const { state } = this;
    this.showState();
    this.writeAddress();
    this.asking?.abort();
    this.looking?.abort();
    const asking = (this.asking = new AbortController());
    this.said.busy(true);
    try {
      const answer = await this.ask(state.parts, asking.signal);
      if (asking.signal.aborted) return;
      this.answer = answer;
      this.untouchedAnswer = this.answers.get(this.key([])) ?? null;
      this.token = Math.min(this.token, Math.max(0, answer.tokens.length - 1));
      this.showAnswer();
      if (!this.untouchedAnswer) {
        const before = await this.ask([], asking.signal);
        if (asking.signal.aborted) return;
        this.untouchedAnswer = before;
        this.showAnswer();
      }
      await this.look(this.token, this.head, true);
    } catch (error) {
      if (asking.signal.aborted || error.name === "AbortError") return;
      this.answer = null;
      this.fail(error);
    } finally {
      if (this.asking === asking) this.said.busy(false);
    }
  }

  key(parts, prompt = this.state.prompt) {
    return JSON.stringify([prompt, textOf(parts)]);
  }

  async ask(parts, signal) {
    const key = this.key(parts);
    if (!this.answers.has(key)) {
      const answer = await this.provider.generate(this.request(parts), { signal });
      this.answers.set(key, answer);
      if (this.answers.size > MOST_KEPT) this.answers.delete(this.answers.keys().next().value);
    }
    return this.answers.get(key);
  }

  /** Show the attention of one answer token, of one head or on average. */
  async look(token, head, again = false) {
    if (!this.map || !this.answer) return;
    const known = !again && this.attention?.token === token;
    Object.assign(this, { token, head });
    this.map.choose(head);
    this.said.press(token);
    if (!known) {
      this.looking?.abort();
      const looking = (this.looking = new AbortController());
      try {
        const attention = await this.provider.attention(this.request(), token, { signal: looking.signal });
        if (looking.signal.aborted) return;
        this.attention = attention;
      } catch (error) {
        if (looking.signal.aborted || error.name === "AbortError") return;
        this.attention = null;
        this.map.show(null);
        this.prompts.showAttention(null, error.message);
        if (!(error instanceof ProviderError)) throw error;
        return;
      }
      this.map.show(this.attention);
    }
    this.prompts.showAttention(this.map.weights(this.attention, head), this.map.words(head, token));
  }

  showState() {
    const { prompt, draw, controls, parts } = this.state;
    const text = textOf(parts);
    byId("text").value = text;
    this.message(unshown(controls));
    byId("trouble").hidden = true;
    byId("undo").disabled = this.at <= 0;
    byId("redo").disabled = this.at >= this.history.length - 1;
    byId("reset").disabled = text === "none";
    this.columns.update(controls);
    this.panel.update(controls, prompt);
    this.prompts.showPrompt(prompt, draw);
    this.showStories(text);
  }

  showAnswer() {
    this.said.show(this.answer, this.untouchedAnswer, this.state.prompt, this.token);
    this.prompts.showTokens(this.answer.prompt);
    const right = isRight(this.state.prompt.target, this.answer.text);
    const judged = right === null ? "" : right ? " · right" : " · wrong";
    byId("brief").textContent = `Answer: ${this.answer.text.trim()}${judged}`;
  }

  showStories(text) {
    const told = this.stories_;
    const current = told.findIndex((story) => textOf(story.parts) === text);
    const buttons = told.map((story, i) => {
      const why = story.missing || this.provider.unavailable(this.request(story.parts));
      return el(
        "li",
        {},
        el(
          "button",
          {
            type: "button",
            id: `story-${story.id}`,
            "aria-current": i === current ? "step" : null,
            "aria-disabled": why ? "true" : null,
            title: why || null,
            onclick: () => (why ? this.message(why) : this.tell(story)),
          },
          el("span", { class: "number", "aria-hidden": "true" }, String(i + 1)),
          story.title,
        ),
      );
    });
    const sentence = current < 0 ? "Your own state: click a step to go on with the tour." : told[current].sentence;
    const focused = document.activeElement?.closest("#stories") ? document.activeElement.id : "";
    fill(byId("stories"), el("ol", {}, buttons), el("p", { id: "sentence", "aria-live": "polite" }, sentence));
    if (focused) byId(focused)?.focus();
    const row = byId("stories").querySelector("ol"); // on a phone it is one row that scrolls
    const step = row.querySelector("[aria-current]");
    if (step) row.scrollLeft = step.parentElement.offsetLeft - row.offsetLeft - (row.clientWidth - step.offsetWidth) / 2;
  }

  tell(story) {
    this.set({ controls: controlsOf(story.parts, this.layers), parts: story.parts });
  }

  showCode() {
    const codes = codeOf(this.description, this.request(), this.state.draw, this.answer ?? this.untouchedAnswer);
    const show = (kind) => {
      byId("code-text").value = codes[kind];
      byId("code-copy").textContent = "Copy";
      byId("code-kinds").querySelectorAll("button").forEach((each) => setAttribute(each, "aria-pressed", each.textContent === kind));
    };
    fill(
      byId("code-kinds"),
      Object.keys(codes).map((kind) => el("button", { type: "button", onclick: () => show(kind) }, kind)),
    );
    byId("code-copy").onclick = async () => {
      const area = byId("code-text");
      area.select();
      try {
        await navigator.clipboard.writeText(area.value);
      } catch {
        document.execCommand("copy"); // where the clipboard is closed to files
      }
      byId("code-copy").textContent = "Copied";
    };
    show("Text");
    byId("code").showModal();
  }

  writeAddress() {
    const { prompt, draw, parts } = this.state;
    const fields = new URLSearchParams();
    if (draw) fields.set("draw", `${draw.length}/${draw.depth}/${draw.seed}`);
    else fields.set("prompt", JSON.stringify(prompt));
    fields.set("do", textOf(parts));
    this.address = `#${fields}`;
    history.replaceState(null, "", this.address);
  }

  async readAddress() {
    if (location.hash === this.address) return;
    const fields = new URLSearchParams(location.hash.slice(1));
    const standard = this.description.draws.first;
    const troubles = [];
    let draw = standard;
    let prompt = null;
    let parts = [];
    try {
      if (fields.has("prompt")) {
        prompt = readPrompt(fields.get("prompt"));
        draw = null;
      } else if (fields.has("draw")) {
        const [length, depth, seed] = fields.get("draw").split("/").map(Number);
        draw = { length, depth, seed };
      }
      prompt ??= await this.drawn(draw);
    } catch (error) {
      troubles.push(error.message);
      draw = standard;
      prompt = await this.drawn(draw);
    }
    try {
      parts = partsOf(fields.get("do") ?? "none");
    } catch (error) {
      troubles.push(error.message);
    }
    const asked = this.set({ prompt, draw, parts, controls: controlsOf(parts, this.layers) });
    if (troubles.length) this.message(`The address was not understood in full: ${troubles.join("; ")}`);
    await asked;
  }

  /** Show a message above the intervention; "" takes it away. */
  message(text) {
    byId("text-trouble").hidden = !text;
    byId("text-trouble").textContent = text;
  }

  fail(error) {
    if (!(error instanceof ProviderError)) console.error(error);
    this.said.showTrouble(error.message);
    byId("brief").textContent = "No answer";
  }
}

function readPrompt(text) {
  const prompt = { before: "", needle: "", after: "", question: "", twin: "", options: [], target: "", special: true, label: "" };
  const given = JSON.parse(text);
  for (const [key, standard] of Object.entries(prompt)) {
    if (typeof given?.[key] === typeof standard) prompt[key] = key === "options" ? [...given[key]].map(String) : given[key];
  }
  return prompt;
}

function lede(description) {
  const kinds = description.layers.map((layer) => layer.kind);
  const heads = description.layers.reduce((sum, layer) => sum + (layer.attention?.heads ?? 0), 0);
  const count = (kind, name) => {
    const n = kinds.filter((each) => each === kind).length;
    return n ? [`${n} ${name} layer${n > 1 ? "s" : ""}`] : [];
  };
  const parts = [...count("attention", "attention"), ...count("recurrent", "recurrent"), ...count("hybrid", "hybrid")];
  const where = { server: "", recorded: " This page holds recorded answers.", browser: " It runs in this page, in your browser." };
  const size = description.parameters.toLocaleString("en");
  return `${description.architecture}: ${parts.join(", ")}, ${heads} attention heads, ${size} parameters.${where[description.provider]}`;
}

function showTrouble(message) {
  byId("trouble").hidden = false;
  byId("trouble").textContent = message;
  byId("lede").textContent = "";
}

/** Follow the system's colours, or the reader's choice, which the report shares. */
function theme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const choices = ["auto", "dark", "light"];
  let choice = "auto";
  try {
    choice = localStorage.getItem("needlework-theme") || "auto";
  } catch {
    // storage may be closed to files
  }
  const show = () => {
    document.documentElement.dataset.theme = choice === "auto" ? (system.matches ? "dark" : "light") : choice;
    byId("theme").textContent = `Theme: ${choice}`;
  };
  byId("theme").addEventListener("click", () => {
    choice = choices[(choices.indexOf(choice) + 1) % choices.length];
    try {
      localStorage.setItem("needlework-theme", choice);
    } catch {
      // then only for this visit
    }
    show();
  });
  system.addEventListener("change", show);
  show();
}
