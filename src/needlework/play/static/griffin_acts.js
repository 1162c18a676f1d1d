/**
 * Interventions for griffin_model.js: parts (see provider.js) are checked and lowered to acts, by phase and layer, as Python's
 * `Intervention.check` and `lower` do; and the random choice of heads with the engine's own hash.
 *
 * Acts of an attention layer: {keep: {k, by, seed}, off: [heads] of 0 or 1, dropped, limit: {tokens, sinks}, expose: {mode,
 * columns: [positions] of 0 or 1, renormalize}}; of a recurrent one: {cut, convolution, state, dropped, groups: [groups] of 0
 * or 1}. Fields that are missing do nothing.
 */

import { textOf } from "play/intervention.js";
import { ProviderError } from "play/provider.js";

const PHASES = { prefill: ["prefill"], decode: ["decode"], both: ["prefill", "decode"] };
const CUTS = { memory: "cut", conv: "convolution", state: "state", block: "dropped" };
const SCORES = ["entropy", "l2", "norm", "random"];
const CHOICES = {
  ablate_attention: ["site", "heads", ["heads", "block"]],
  ablate_recurrent: ["site", "memory", Object.keys(CUTS)],
  expose_tokens: ["mode", "", ["keep", "omit", "only", "null", "balanced"]],
  swap_memory: ["half", "", ["kv", "recurrent"]],
};

/**
 * Return {prefill, decode, swaps}: acts of both phases as {sample, layers: Map}, and the halves of the memory that a twin gives.
 *
 * @param layers  `layers` of the provider's description.
 * @param prompt  {ids, needle}: its tokens, and ranges of the needle.
 * @param sample  BigInt that seeds random choices, see `sampleKey`.
 */
export function lower(parts, layers, prompt, sample) {
  const acts = { prefill: { sample, layers: new Map() }, decode: { sample, layers: new Map() }, swaps: [] };
  checkClashes(parts);
  for (const part of parts) {
    check(part, layers);
    checkPhases(part, prompt);
    if (part.name === "swap_memory") {
      acts.swaps.push(part.half);
      continue;
    }
    const edits = editsOf(part, layers, prompt);
    for (const phase of PHASES[part.phase ?? "both"]) {
      const own = acts[phase].layers;
      for (const [layer, edit] of edits) own.set(layer, merged(own.get(layer), edit));
    }
  }
  return acts;
}

function merged(one = {}, other) {
  const both = { ...one, ...other };
  if (one.off && other.off) both.off = other.off.map((off, h) => off | one.off[h]);
  return both;
}

/** Return [layer, act] pairs of one part. */
function editsOf(part, layers, prompt) {
  const at = where(part, layers);
  const heads = (layer) => layers[layer].attention.heads;
  switch (part.name) {
    case "keep_heads":
      return at.filter((layer) => part.k < heads(layer)).map((layer) => [layer, keepOf(part, layer, heads(layer))]);
    case "ablate_heads":
      return at.map((layer) => [layer, { off: marks(heads(layer), own(part.heads, layer)) }]);
    case "ablate_attention":
      if (part.site === "block") return at.map((layer) => [layer, { dropped: true }]);
      return at.map((layer) => [layer, { off: new Uint8Array(heads(layer)).fill(1) }]);
    case "limit_context":
      return at.map((layer) => [layer, { limit: { tokens: part.tokens, sinks: part.sinks ?? 0 } }]);
    case "expose_tokens":
      return exposeOf(part, at, prompt);
    case "ablate_recurrent":
      return at.map((layer) => [layer, { [CUTS[part.site ?? "memory"]]: true }]);
    default: // ablate_recurrent_groups
      return at.map((layer) => [layer, { groups: marks(layers[layer].recurrent.groups, own(part.groups, layer)) }]);
  }
}

function keepOf({ k, by = "entropy", seed = 0 }, layer, heads) {
  if (!by.ranking) return { keep: { k, by, seed } };
  const kept = own(by.ranking, layer).slice(0, k);
  return { off: marks(heads, kept).map((mark) => 1 - mark) };
}

function exposeOf({ mode, renormalize = false }, at, { ids, needle }) {
  if (!needle.length) throw new ProviderError("the prompt has no span 'needle': expose_tokens needs one; type a needle");
  const columns = marks(ids.length, needle.flatMap(([start, end]) => Array.from({ length: end - start }, (_, i) => start + i)));
  return mode === "keep" ? [] : at.map((layer) => [layer, { expose: { mode, columns, renormalize } }]);
}

function own(pairs, layer) {
  return pairs.filter((pair) => pair[0] === layer).map((pair) => pair[1]);
}

function marks(length, places) {
  const found = new Uint8Array(length);
  for (const place of places) found[place] = 1;
  return found;
}

// --- checks ----------------------------------------------------------------------------------------------------------------

/** Return the layers that a part acts on. */
function where(part, layers) {
  const pairs = part.name === "ablate_heads" ? part.heads : part.name === "ablate_recurrent_groups" ? part.groups : null;
  if (pairs) return [...new Set(pairs.map(([layer]) => layer))].sort((a, b) => a - b);
  return part.layers ?? layers.filter((layer) => layer[side(part)]).map((layer) => layer.index);
}

function side(part) {
  return part.name.startsWith("ablate_recurrent") ? "recurrent" : "attention";
}

function check(part, layers) {
  const fail = (why) => {
    throw new ProviderError(`${textOf([part])}: ${why}`);
  };
  const [field, standard, known] = CHOICES[part.name] ?? [];
  if (field && !known.includes(part[field] ?? standard)) fail(`${field} is one of ${known.join(", ")}`);
  if (part.name === "swap_memory") return;
  const kind = side(part);
  const all = layers.filter((layer) => layer[kind]).map((layer) => layer.index);
  const wrong = [...where(part, layers), ...(part.layers ?? [])].filter((layer) => !all.includes(layer));
  if (wrong.length) fail(`layers ${[...new Set(wrong)].join(", ")} are no ${kind} layers; choose from ${all.join(", ")}`);
  for (const [name, size] of [["heads", "heads"], ["groups", "groups"]]) {
    const missing = (part[name] ?? []).filter(([layer, i]) => !(i >= 0 && i < layers[layer][kind][size]));
    if (missing.length) fail(`there are no ${name} ${missing.map((pair) => pair.join(".")).join(", ")} in this model`);
    const left = (part[name] ?? []).filter(([layer]) => part.layers && !part.layers.includes(layer));
    if (left.length) fail(`it names ${name} of layer ${left[0][0]}, which layers leaves out: drop layers`);
  }
  if (part.name === "keep_heads") checkKeep(part, layers, fail);
}

function checkKeep(part, layers, fail) {
  const by = part.by ?? "entropy";
  const at = where(part, layers);
  const most = Math.min(...at.map((layer) => layers[layer].attention.heads));
  if (part.k > most) fail(`k=${part.k} is more than the ${most} heads there are`);
  if (!by.ranking && !SCORES.includes(by)) fail(`there is no head score ${by}; it is one of ${SCORES.join(", ")}, or a ranking`);
  if (!by.ranking) return;
  const ranked = new Set(by.ranking.map((pair) => pair.join(".")));
  const missing = at.flatMap((layer) => Array.from({ length: layers[layer].attention.heads }, (_, h) => `${layer}.${h}`));
  const without = missing.filter((name) => !ranked.has(name));
  if (without.length) fail(`the ranking does not cover heads ${without.slice(0, 5).join(", ")} of this model`);
  const unknown = by.ranking.filter(([layer, h]) => !(h >= 0 && h < (layers[layer]?.attention?.heads ?? 0)));
  const named = unknown.slice(0, 5).map((pair) => pair.join("."));
  if (unknown.length) fail(`the ranking has heads ${named.join(", ")}, which this model has not`);
}

/** Throw if a part acts only in a phase that reads no token: a prompt of one token has no prefill. */
function checkPhases(part, { ids }) {
  if (ids.length > 1 || !(part.phase === "prefill" || part.name === "swap_memory")) return;
  throw new ProviderError(`${textOf([part])}: a prompt of ${ids.length} token has no prefill token; give it more words`);
}

/** Throw if two parts of one name meet in one phase and layer. */
function checkClashes(parts) {
  parts.forEach((a, i) => {
    for (const b of parts.slice(i + 1)) {
      if (a.name !== b.name || !clash(a, b)) continue;
      const both = `(${textOf([a])}; ${textOf([b])})`;
      const hint = "merge them, or give them different phases or layers";
      throw new ProviderError(`two ${a.name} meet in one phase and layer ${both}: ${hint}`);
    }
  });
}

function clash(a, b) {
  if (a.name === "swap_memory") return a.half === b.half;
  const sites = [a.site, b.site];
  if (a.name === "ablate_recurrent" && sites.includes("conv") && sites.includes("state")) return false;
  const [one, other] = [a.phase ?? "both", b.phase ?? "both"];
  const phasesMeet = one === other || one === "both" || other === "both";
  return phasesMeet && (!a.layers || !b.layers || a.layers.some((layer) => b.layers.includes(layer)));
}

// --- random heads ----------------------------------------------------------------------------------------------------------

const GOLDEN = 0x9e3779b97f4a7c15n;
const MIX1 = 0xbf58476d1ce4e5b9n;
const MIX2 = 0x94d049bb133111ebn;

/** Return one round of splitmix64. */
function mix(given) {
  let state = BigInt.asUintN(64, given + GOLDEN);
  state = BigInt.asUintN(64, (state ^ (state >> 30n)) * MIX1);
  state = BigInt.asUintN(64, (state ^ (state >> 27n)) * MIX2);
  return state ^ (state >> 31n);
}

/** Return random scores of a token's heads: the same as in the engine, for any seed, sample, layer and position. */
export function randomScores(seed, sample, layer, position, heads) {
  let state = 0n;
  for (const key of [BigInt(seed), sample, BigInt(layer), BigInt(position)]) state = mix(state ^ BigInt.asUintN(64, key));
  // The engine shifts a signed number, so that the order of heads is that of signed ones.
  return Array.from({ length: heads }, (_, h) => Number(BigInt.asIntN(64, mix(state ^ BigInt(h))) >> 40n));
}

/** Return the first 64 bits of the SHA-256 of the tokens, written as Python writes a tuple. */
export function sampleKey(ids) {
  const [high, low] = sha256(`(${ids.join(", ")}${ids.length === 1 ? "," : ""})`);
  return (BigInt(high) << 32n) | BigInt(low);
}

/** Return the SHA-256 of an ASCII text as eight 32-bit numbers. (crypto.subtle is closed to pages without a secure origin.) */
function sha256(text) {
  const length = text.length;
  const words = new Uint32Array(16 * (((length + 8) >> 6) + 1));
  for (let i = 0; i < length; i++) words[i >> 2] |= text.charCodeAt(i) << (24 - 8 * (i % 4));
  words[length >> 2] |= 0x80 << (24 - 8 * (length % 4));
  words[words.length - 1] = 8 * length;
  const hash = Uint32Array.from(primes(8), (p) => fraction(Math.sqrt(p)));
  const constants = Uint32Array.from(primes(64), (p) => fraction(Math.cbrt(p)));
  for (let block = 0; block < words.length; block += 16) compress(hash, words.subarray(block, block + 16), constants);
  return hash;
}

function compress(hash, block, constants) {
  const w = new Uint32Array(64);
  w.set(block);
  const turn = (x, n) => (x >>> n) | (x << (32 - n));
  for (let i = 16; i < 64; i++) {
    const s0 = turn(w[i - 15], 7) ^ turn(w[i - 15], 18) ^ (w[i - 15] >>> 3);
    const s1 = turn(w[i - 2], 17) ^ turn(w[i - 2], 19) ^ (w[i - 2] >>> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  let [a, b, c, d, e, f, g, h] = hash;
  for (let i = 0; i < 64; i++) {
    const s1 = turn(e, 6) ^ turn(e, 11) ^ turn(e, 25);
    const one = (h + s1 + ((e & f) ^ (~e & g)) + constants[i] + w[i]) | 0;
    const s0 = turn(a, 2) ^ turn(a, 13) ^ turn(a, 22);
    const two = (s0 + ((a & b) ^ (a & c) ^ (b & c))) | 0;
    [h, g, f, e, d, c, b, a] = [g, f, e, (d + one) | 0, c, b, a, (one + two) | 0];
  }
  [a, b, c, d, e, f, g, h].forEach((value, i) => (hash[i] += value));
}

function primes(count) {
  const found = [];
  for (let n = 2; found.length < count; n++) if (found.every((p) => n % p)) found.push(n);
  return found;
}

function fraction(root) {
  return Math.floor((root - Math.floor(root)) * 2 ** 32);
}
