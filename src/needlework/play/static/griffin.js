/**
 * Provider that runs RecurrentGemma in the browser: no server, no recorded answers.
 *
 * A prompt is read once without an intervention; its memory and the inputs of its layers are kept. Another prefill of the same
 * prompt enters at the lowest layer that an intervention acts on. The answer and all options then decode together, each from a
 * fork of the memory. Long reads pause between chunks, so that the page stays alive and an aborted request stops.
 */

import { lower, sampleKey } from "play/griffin_acts.js";
import { Griffin, Memory } from "play/griffin_model.js";
import { textOf } from "play/intervention.js";
import { promptText, ProviderError, twinPrompt } from "play/provider.js";

const MOST_TOKENS = 2048; // of a prompt
const MOST_NEW_TOKENS = 64;
const CHUNK = 64; // tokens that are read without a pause
const KEPT = { readings: 4, prefills: 12, answers: 8 };
const BETWEEN = "between"; // phase of swaps in a receipt

/** @param data  Content of the page (see provider.js); `bytes`: the weights. */
export async function open(data, bytes) {
  const runner = new Runner(data, bytes);
  return {
    describe: async () => ({ ...data.description, provider: "browser", max_tokens: MOST_TOKENS }),
    stories: async () => data.stories,
    async sample({ length, depth, seed }) {
      const prompt = data.samples[`${length}/${depth}/${seed}`];
      if (!prompt) throw new ProviderError("this page does not hold that prompt; choose one that it lists");
      return prompt;
    },
    async ranking(name) {
      if (!Object.hasOwn(data.rankings, name)) throw new ProviderError(`heads are not ranked by ${name} in this page`);
      return data.rankings[name];
    },
    generate: async (request, { signal } = {}) => (await runner.ask(request, signal)).answer,
    attention: async (request, token, { signal } = {}) => runner.attention(await runner.ask(request, signal), token),
    unavailable: () => "",
    logits: (request, tokens) => runner.logits(request, tokens), // for tests
  };
}

/** Answers requests, and keeps what later ones can use. */
class Runner {
  constructor({ description, browser }, bytes) {
    this.layers = description.layers;
    this.name = description.name;
    this.model = new Griffin(browser, bytes);
    this.words = browser.vocabulary;
    this.ids = new Map(this.words.map((word, id) => [word, id]));
    Object.assign(this, { start: browser.start, stop: new Set(browser.stop), special: new Set(browser.special) });
    this.readings = new Map(); // tokens -> reading of the untouched prompt
    this.prefills = new Map(); // what was read, and how -> reading
    this.answers = new Map(); // request -> {answer, looks}
  }

  /** Return {answer, looks, prompt} of a request: its Answer, and the attention of each of its tokens. */
  async ask(request, signal) {
    signal?.throwIfAborted();
    const key = JSON.stringify([request.prompt, textOf(request.parts), request.max_new_tokens]);
    const known = this.answers.get(key);
    return known ?? keep(this.answers, key, await this.generate(request, signal), KEPT.answers);
  }

  /** Return what a request means: its tokens, its options and twin in tokens, and its acts. */
  prepare({ prompt, parts, max_new_tokens: count }) {
    if (!Number.isInteger(count) || count < 1 || count > MOST_NEW_TOKENS) {
      throw new ProviderError(`an answer has 1 to ${MOST_NEW_TOKENS} tokens, not ${count}`);
    }
    const read = this.encode(prompt);
    const acts = lower(parts, this.layers, read, sampleKey(read.ids));
    const twin = acts.swaps.length ? this.twinOf(prompt, read.ids) : null;
    const options = prompt.options.map((option) => this.tokens(option));
    if (options.some((option) => !option.length)) throw new ProviderError("an option is empty; leave it out");
    return { ...read, acts, twin, options, readingKey: readingKey(parts, acts, read) };
  }

  /** Tokenize a prompt: {ids, needle}, where needle holds token ranges. */
  encode(prompt) {
    const text = promptText(prompt);
    if (!text.trim()) throw new ProviderError("the prompt is empty; type one, or draw one");
    if (prompt.needle && !prompt.needle.trim()) throw new ProviderError("the needle is empty; give it some words");
    this.checkWords([text, prompt.twin, ...prompt.options]);
    const first = prompt.special ? this.start : [];
    const ids = [...first, ...this.tokens(text)];
    if (ids.length > MOST_TOKENS) {
      throw new ProviderError(`the prompt has ${ids.length} tokens; in the browser, ${this.name} reads at most ${MOST_TOKENS}`);
    }
    const from = first.length + this.tokens(prompt.before).length;
    const needle = prompt.needle ? [[from, from + this.tokens(prompt.needle).length]] : [];
    return { ids, needle };
  }

  checkWords(texts) {
    const unknown = new Set(texts.flatMap(wordsOf).filter((word) => !this.ids.has(word)));
    if (!unknown.size) return;
    const shown = [...unknown].sort().slice(0, 5).map((word) => `'${word.slice(0, 40)}'`).join(", ");
    const more = unknown.size > 5 ? ` and ${unknown.size - 5} more` : "";
    const hint = "draw a prompt to see its words";
    throw new ProviderError(`${this.name} speaks a toy language without the words ${shown}${more}; ${hint}`);
  }

  tokens(text) {
    return wordsOf(text).map((word) => this.ids.get(word));
  }

  twinOf(prompt, ids) {
    if (!prompt.twin) throw new ProviderError("swap_memory: the prompt has no twin; type the needle of a twin prompt");
    const twin = this.encode(twinPrompt(prompt)).ids;
    if (twin.length !== ids.length) {
      const lengths = `the twin has ${twin.length} tokens and the prompt ${ids.length}`;
      throw new ProviderError(`swap_memory: ${lengths}; they must be of one length`);
    }
    if (twin.slice(0, -1).every((token, i) => token === ids[i])) {
      const read = `the ${ids.length - 1} tokens that prefill reads`;
      throw new ProviderError(`swap_memory: in ${read}, the twin is the prompt: give another`);
    }
    return twin;
  }

  async generate(request, signal) {
    const begun = performance.now();
    const asked = this.prepare(request);
    const { memory, counts } = await this.memoryOf(asked, signal);
    const receipt = new Map(counts);
    const looks = new Map(this.layers.filter((layer) => layer.attention).map((layer) => [layer.index, []]));
    const said = { ...continuation(request.max_new_tokens), count: counter(receipt, "decode"), looks };
    const options = asked.options.map((forced) => continuation(forced.length, forced));
    await this.decode(asked, memory, [said, ...options], signal);
    return {
      answer: this.answerOf(request, asked, said, options, receipt, performance.now() - begun),
      looks,
      needle: asked.needle,
      length: asked.ids.length,
    };
  }

  /** Return the logits [tokens][vocabulary] of each step at which these tokens are decoded. */
  async logits(request, tokens) {
    const asked = this.prepare(request);
    const { memory } = await this.memoryOf(asked);
    const forced = { ...continuation(tokens.length, tokens), logits: [] };
    await this.decode(asked, memory, [forced]);
    return forced.logits;
  }

  /** Return {memory, counts} after prefill, with the halves that a twin gives. The memory is shared: fork it. */
  async memoryOf(asked, signal) {
    const own = await this.prefill(asked.ids, asked, signal);
    if (!asked.twin) return own;
    const twin = await this.prefill(asked.twin, asked, signal);
    const memory = asked.acts.swaps.reduce((mixed, half) => mixed.withHalf(half, twin.memory), own.memory);
    return { memory, counts: own.counts };
  }

  /** Read all tokens but the last one under a request's acts of prefill. */
  async prefill(ids, { acts, readingKey }, signal) {
    const tokens = ids.slice(0, -1);
    const touched = [...acts.prefill.layers.keys()];
    if (!touched.length) return this.untouched(tokens, signal);
    const key = `${tokens}|${readingKey}`;
    if (this.prefills.has(key)) return this.prefills.get(key);
    const before = await this.untouched(tokens, signal);
    const first = before.inputs ? Math.min(...touched) : 0;
    const reading = await this.read(tokens, acts.prefill, signal, { ...before, first });
    return keep(this.prefills, key, reading, KEPT.prefills);
  }

  async untouched(tokens, signal) {
    const key = String(tokens);
    if (this.readings.has(key)) return this.readings.get(key);
    const nothing = { sample: 0n, layers: new Map() };
    return keep(this.readings, key, await this.read(tokens, nothing, signal), KEPT.readings);
  }

  /**
   * Read tokens in chunks; return {memory, counts, inputs}.
   *
   * @param before  An untouched reading of the same tokens and the first layer to run; layers below are taken from it.
   */
  async read(tokens, acts, signal, before = null) {
    const { model } = this;
    const { hidden } = model.config;
    const first = before?.first ?? 0;
    const top = model.layers.length - 1;
    const memory = model.newMemory(tokens.length + MOST_NEW_TOKENS + 1);
    if (before) memory.copyBelow(first, before.memory);
    const counts = new Map();
    const recorded = !before && !Memory.tooLong(tokens.length, model);
    const inputs = recorded ? model.layers.map(() => new Float64Array(tokens.length * hidden)) : null;
    for (let start = 0; start < tokens.length; start += CHUNK) {
      const part = tokens.slice(start, start + CHUNK);
      const rows = part.map((_, i) => ({ memory, position: start + i, count: counter(counts, "prefill"), looks: null }));
      const end = start + part.length;
      const x = first ? before.inputs[first].slice(start * hidden, end * hidden) : model.embed(part);
      const record = (layer, values) => inputs?.[layer].set(values, start * hidden);
      model.run(x, rows, acts, first, top, record);
      record(top, x);
      model.remember(x, rows, acts);
      await pause(signal);
    }
    return { memory, counts, inputs };
  }

  /**
   * Decode continuations of one prompt together, until each has ended. The prompt's last token is read once: what the first
   * continuation counts and looks at belongs to it, the others are forked behind it.
   */
  async decode({ ids, acts }, memory, continuations, signal) {
    const size = this.model.config.vocabulary;
    const own = { ...continuations[0], memory: memory.fork() };
    const first = this.feed([own], ids.slice(-1), ids.length - 1, acts.decode);
    for (const each of continuations) {
      each.memory = each === continuations[0] ? own.memory : own.memory.fork();
      choose(each, first, this.stop);
    }
    for (let step = 1; ; step++) {
      const going = continuations.filter((each) => !each.finish);
      if (!going.length) break;
      const logits = this.feed(going, going.map((each) => each.tokens.at(-1)), ids.length - 1 + step, acts.decode);
      going.forEach((each, i) => choose(each, logits.subarray(i * size, (i + 1) * size), this.stop));
      if (step % 8 === 7) await pause(signal);
    }
    signal?.throwIfAborted();
  }

  /** Feed one token to each continuation; return logits [continuations * vocabulary]. */
  feed(continuations, tokens, position, acts) {
    const rows = continuations.map(({ memory, count, looks }) => ({ memory, position, count, looks }));
    const x = this.model.embed(tokens);
    this.model.run(x, rows, acts);
    return this.model.logits(x, rows.length);
  }

  answerOf(request, asked, said, options, receipt, milliseconds) {
    const totals = options.map((option) => option.logprobs.reduce((total, logprob) => total + logprob, 0));
    const shares = totals.map((total) => Math.exp(total - Math.max(...totals)));
    const all = shares.reduce((total, share) => total + share, 0);
    const ended = said.finish === "stop" && this.special.has(said.tokens.at(-1)) ? said.tokens.length - 1 : said.tokens.length;
    return {
      intervention: textOf(request.parts),
      prompt: { tokens: asked.ids.map((token, i) => (i ? " " : "") + this.words[token]), needle: asked.needle },
      tokens: said.tokens.map((id, i) => ({ text: ` ${this.words[id]}`, id, probability: Math.exp(said.logprobs[i]) })),
      text: said.tokens.slice(0, ended).map((token) => this.words[token]).join(" "),
      finish: said.finish,
      options: request.prompt.options.map((text, i) => ({ text, logprob: totals[i], probability: shares[i] / all })),
      receipt: receiptOf(receipt, asked.acts.swaps),
      notes: notesOf(asked.acts, receipt),
      milliseconds: Math.round(milliseconds * 10) / 10,
    };
  }

  /** Return the Attention of one answer token. */
  attention({ looks, needle, length }, token) {
    const count = [...looks.values()][0]?.length ?? 0;
    if (!(Number.isInteger(token) && token >= 0 && token < count)) {
      throw new ProviderError(`the answer has tokens 0 to ${count - 1}, and no token ${token}`);
    }
    const { heads } = this.model.config;
    const inNeedle = needle.flatMap(([start, end]) => Array.from({ length: end - start }, (_, i) => start + i));
    const onNeedle = (row, t, h) => inNeedle.reduce((mass, k) => mass + row[h * (length + t) + k], 0);
    const massOf = (rows, h) => rows.reduce((mass, row, t) => mass + onNeedle(row, t, h), 0) / count;
    const each = (make) => Array.from({ length: heads }, (_, h) => make(h));
    return {
      token,
      layers: [...looks].map(([layer, rows]) => ({
        layer,
        weights: each((h) => Array.from(rows[token].subarray(h * (length + token), (h + 1) * (length + token)))),
      })),
      needle: [...looks].map(([layer, rows]) => ({ layer, mass: each((h) => massOf(rows, h)) })),
    };
  }
}

/**
 * Return what decodes up to `most` tokens, or the given ones. `count` and `looks` are those of a Row; `logits`, if it is an
 * array, receives those of each step.
 */
function continuation(most, forced = null) {
  return { memory: null, most, forced, tokens: [], logprobs: [], finish: null, count: null, looks: null, logits: null };
}

/** Append the next token of a continuation: the forced one, or the most likely. */
function choose(each, logits, stop) {
  let best = each.forced ? each.forced[each.tokens.length] : 0;
  let most = -Infinity;
  for (let i = 0; i < logits.length; i++) {
    if (logits[i] <= most) continue;
    most = logits[i];
    if (!each.forced) best = i;
  }
  if (!Number.isFinite(most)) throw new ProviderError("the logits are not finite");
  let total = 0;
  for (const value of logits) total += Math.exp(value - most);
  each.logits?.push(logits.slice());
  each.tokens.push(best);
  each.logprobs.push(logits[best] - most - Math.log(total));
  if (!each.forced && stop.has(best)) each.finish = "stop";
  else if (each.tokens.length >= each.most) each.finish = "length";
}

function wordsOf(text) {
  return text.split(/\s+/).filter(Boolean);
}

function counter(counts, phase) {
  return (layer, name, amount) => {
    const key = `${phase}/${layer}/${name}`;
    counts.set(key, (counts.get(key) ?? 0) + amount);
  };
}

function receiptOf(counts, swaps) {
  const sums = {};
  for (const [key, number] of counts) {
    const [phase, , name] = key.split("/");
    sums[phase] ??= {};
    sums[phase][name] = (sums[phase][name] ?? 0) + number;
  }
  if (swaps.length) sums[BETWEEN] = Object.fromEntries(swaps.map((half) => [`${half}_swapped`, 1]));
  return sums;
}

/** Return where acts had nothing to act on, as `Prepared.notes` does. */
function notesOf(acts, counts) {
  const notes = [];
  const hidden = new Map();
  for (const phase of ["prefill", "decode"]) {
    for (const [layer, { expose, limit }] of [...acts[phase].layers].sort(([a], [b]) => a - b)) {
      const count = (name) => counts.get(`${phase}/${layer}/${name}`) ?? 0;
      if (expose && !count("columns_exposed")) {
        notes.push(`layer ${layer}, ${phase}: the exposed span was outside what any query could see`);
      }
      if (limit) {
        const key = `the last ${limit.tokens} and the first ${limit.sinks}`;
        hidden.set(key, (hidden.get(key) ?? 0) + count("keys_hidden"));
      }
    }
  }
  for (const [key, keys] of hidden) if (!keys) notes.push(`nothing to hide: no query had keys beyond ${key}`);
  return notes;
}

/** Return what a prefill depends on besides its tokens. */
function readingKey(parts, acts, { needle }) {
  const reading = parts.filter((part) => part.phase !== "decode" && part.name !== "swap_memory");
  return JSON.stringify([textOf(reading), needle, String(acts.prefill.sample)]);
}

/** Store a value, drop the oldest ones above `most`, and return it. */
function keep(map, key, value, most) {
  map.set(key, value);
  while (map.size > most) map.delete(map.keys().next().value);
  return value;
}

/** Let the page draw and handle events; throw if the request was aborted meanwhile. */
async function pause(signal) {
  await new Promise((resolve) => setTimeout(resolve));
  signal?.throwIfAborted();
}
