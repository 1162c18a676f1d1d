/**
 * The provider interface: everything that the page asks of a model.
 *
 * Three modules implement it, and the page knows no difference between them:
 *   server.js    asks `needlework play` over loopback;
 *   recorded.js  looks answers up that `export.py` stored in the page;
 *   griffin.js   runs RecurrentGemma in the browser, on weights that `export.py` packed into the page.
 *
 * All positions count from the first token of the prompt, BOS included. The phase "prefill" is the prompt without its last
 * token, "decode" everything from the last prompt token on (needlework's default boundary).
 *
 * Modules import each other by names such as "play/provider.js": an import map resolves them, to files of the server or to
 * data: URLs inside of an exported page.
 *
 * @typedef {object} Prompt  What the model reads: before + needle + after + question, joined by `promptText`.
 * @property {string} before   Text in front of the needle.
 * @property {string} needle   The sentence that holds the answer. Its tokens are the span "needle".
 * @property {string} after    Text behind the needle.
 * @property {string} question Question and lead: the prompt ends with it.
 * @property {string} twin     Needle of the twin prompt for `swap_memory`, of as many tokens as the needle; "" if there is none.
 * @property {string[]} options Continuations for the forced choice, in the order shown; may be empty.
 * @property {string} target   The right answer; "" if it is not known.
 * @property {boolean} special Whether special tokens (BOS) are added; false for the text of a chat template.
 * @property {string} label    How it was drawn, e.g. "192 words, needle at 50 %, draw 0"; "" if it was typed.
 *
 * @typedef {object} Part  One part of an intervention: its name, and its fields as in the text form. `intervention.js` and
 *   `state.py` turn lists of parts into text; intervention.schema.json is their schema. "[layer, head]" pairs are lists.
 *   {"name": "keep_heads", "phase": "decode", "k": 2, "by": "entropy"}; by: "entropy" | "l2" | "norm" | "random" (with "seed")
 *     | {"ranking": [[layer, head], ...]}
 *   {"name": "ablate_heads", "heads": [[2, 0], [5, 3]]}      {"name": "ablate_attention", "layers": [2]}
 *   {"name": "ablate_recurrent", "site": "memory" | "conv" | "state" | "block"}
 *   {"name": "ablate_recurrent_groups", "groups": [[0, 1]]}
 *   {"name": "expose_tokens", "mode": "omit" | "only" | "null" | "balanced", "phase": "decode"}   (span: "needle")
 *   {"name": "limit_context", "tokens": 32, "sinks": 0}      {"name": "swap_memory", "half": "kv" | "recurrent"}
 *   Fields that are left out have the defaults of the text form; `phase` is "prefill", "decode" or "both" (the default).
 *
 * @typedef {object} Request
 * @property {Prompt} prompt
 * @property {Part[]} parts           [] leaves the model untouched.
 * @property {number} max_new_tokens
 *
 * @typedef {object} Answer
 * @property {string} intervention    Canonical text of the parts ("none" for []).
 * @property {{tokens: string[], needle: [number, number][]}} prompt  Text of each prompt token; half-open ranges of the needle.
 * @property {{text: string, id: number, probability: number}[]} tokens  The greedy answer.
 * @property {string} text            All tokens decoded, without the special token that ended the answer.
 * @property {"stop"|"length"} finish
 * @property {{text: string, logprob: number, probability: number}[]} options  In the order of `prompt.options`: log-likelihood of
 *   the option when it is decoded token by token under the same intervention; probability: its share among the options.
 * @property {Record<string, Record<string, number>>} receipt  What was done: {"decode": {"heads_zeroed": 60, ...}, ...}, summed
 *   over layers, without zeros; the names are those of docs/method.md.
 * @property {string[]} notes         Where an intervention had nothing to act on.
 * @property {number} milliseconds    Time to compute it.
 *
 * @typedef {object} Attention  Where heads looked from one answer token, also heads that are switched off: after `limit_context`,
 *   before `expose_tokens`.
 * @property {number} token           Index of the answer token; its query is the position before it (prompt length - 1 + token).
 * @property {{layer: number, weights: number[][]}[]} layers  [heads][keys] of each attention layer; keys 0 .. prompt + token - 1.
 *   Keys that are hidden or outside of the window have weight 0.
 * @property {{layer: number, mass: number[]}[]} needle  [heads] attention on the needle, averaged over all answer tokens.
 *
 * @typedef {object} Description
 * @property {string} name
 * @property {string} architecture
 * @property {number} parameters
 * @property {"server"|"recorded"|"browser"} provider
 * @property {"toy"|"english"} language  What prompts are drawn in.
 * @property {number|null} max_tokens    Longest sequence.
 * @property {number} max_characters     Longest prompt that a provider accepts.
 * @property {number} max_new_tokens     Of an answer.
 * @property {{index: number, kind: "attention"|"recurrent"|"hybrid"|"other",
 *   attention: {heads: number, kv_heads: number, window: number|null}|null,
 *   recurrent: {mixer: string, groups: number, group_kind: string, no_groups: string, conv: boolean, state: boolean}|null}[]} layers
 * @property {string[]} scores           Values of `by` that need no ranking.
 * @property {string[]} rankings         Names that `ranking` accepts.
 * @property {{lengths: number[], depths: number[], draws: number, first: {length: number, depth: number, seed: number}}} draws
 *   What `sample` accepts; draws: seeds 0 .. draws - 1; first: what the page opens with.
 * @property {string} weights            Hash of the weights.
 *
 * @typedef {object} Story
 * @property {string} id
 * @property {string} title
 * @property {string} sentence
 * @property {Part[]} parts
 * @property {string} missing            Why this model cannot show it; "" if it can.
 *
 * @typedef {object} Provider
 * @property {() => Promise<Description>} describe
 * @property {() => Promise<Story[]>} stories
 * @property {(draw: {length: number, depth: number, seed: number}) => Promise<Prompt>} sample
 * @property {(name: string) => Promise<[number, number][]>} ranking  [layer, head] pairs, best first.
 * @property {(request: Request, options?: {signal?: AbortSignal}) => Promise<Answer>} generate
 * @property {(request: Request, token: number, options?: {signal?: AbortSignal}) => Promise<Attention>} attention
 * @property {(request: Request) => string} unavailable  Why this provider cannot answer the request, for the control that would
 *   lead to it; "" if it can. Answers at once. Errors that need the model (a prompt too long) are thrown by `generate` instead.
 *
 * Methods throw `ProviderError` with a message for the reader. An aborted call throws the signal's AbortError.
 *
 * What an exported page holds, and who writes it (`export.py` unless it is said otherwise):
 *   <script type="application/json" id="play-data">
 *     {"description": Description, "stories": Story[], "samples": {"64/50/0": Prompt, ...} by "length/depth/seed",
 *      "rankings": {name: [[layer, head], ...]},
 *      "recorded": Recorded answers of recorded.js, or null where the model runs in the browser,
 *      "browser": header of `export.py` (configuration, tensors, vocabulary), or null}
 *   <script type="text/plain" id="play-weights">  base64 of the bytes of `export.py`; absent without a browser model.
 * griffin.js exports `open(data, bytes)`, which returns a Promise of a Provider; `bytes` is an ArrayBuffer.
 * `browser_model` in export.py makes the header and the bytes.
 */

/** An error with a message for the reader. */
export class ProviderError extends Error {}

/** Return the text of a prompt: its four parts, with a space wherever two of them would otherwise touch. */
export function promptText(prompt) {
  return [prompt.before, prompt.needle, prompt.after, prompt.question].filter((part) => part !== "").reduce(joined, "");
}

/** Return the character range of the needle in `promptText(prompt)`, without white space at its ends; null if it is empty. */
export function needleRange(prompt) {
  const needle = prompt.needle.trim();
  if (!needle) return null;
  const upTo = prompt.before === "" ? prompt.needle : joined(prompt.before, prompt.needle);
  const end = upTo.trimEnd().length;
  return [end - needle.length, end];
}

/** Return the prompt whose needle is the twin's. */
export function twinPrompt(prompt) {
  return { ...prompt, needle: prompt.twin };
}

function joined(a, b) {
  return a === "" || b === "" || /\s$/.test(a) || /^\s/.test(b) ? a + b : a + " " + b;
}
