/**
 * Interventions in the browser: lists of parts (see provider.js), their text form, and the page's controls.
 *
 * `textOf` writes what Python's `str(intervention)` writes, and `partsOf` reads it. `partsOfControls` and `controlsOf` convert
 * between parts and the settings of the page's controls; parts that no setting stands for are carried along.
 */

// Fields in the order of the text form, with their defaults; undefined marks a field that must be given.
const BOTH = { phase: "both", layers: null };
const SPEC = {
  keep_heads: { ...BOTH, k: undefined, by: "entropy", seed: 0 },
  ablate_heads: { ...BOTH, heads: undefined },
  ablate_attention: { ...BOTH, site: "heads" },
  ablate_recurrent: { ...BOTH, site: "memory" },
  ablate_recurrent_groups: { ...BOTH, groups: undefined },
  expose_tokens: { ...BOTH, mode: undefined, span: "needle", renormalize: false },
  limit_context: { ...BOTH, tokens: undefined, sinks: 0 },
  swap_memory: { half: undefined, from: "twin" },
};
const PHASES = ["prefill", "decode", "both"];
const PAIRS = new Set(["heads", "groups"]);

/** Return the canonical text of a list of parts. */
export function textOf(parts) {
  return parts.map(partText).sort().join(" + ") || "none";
}

function partText(part) {
  const fields = Object.entries(SPEC[part.name])
    .filter(([key, standard]) => part[key] !== undefined && !same(part[key], standard))
    .map(([key]) => `${key}=${valueText(part[key])}`);
  return `${part.name}(${fields.join(", ")})`;
}

function valueText(value) {
  if (value && value.ranking) return `ranking('${value.ranking.map((pair) => pair.join(".")).join(" ")}')`;
  if (Array.isArray(value)) return `[${value.map(valueText).join(", ")}]`;
  if (typeof value === "boolean") return value ? "True" : "False";
  return typeof value === "string" ? `'${value}'` : String(value);
}

function same(a, b) {
  return JSON.stringify(a) === JSON.stringify(b);
}

/** Return the parts of a text; throw an Error with a message for the reader if it is none. */
export function partsOf(text) {
  const reader = new Reader(text);
  const parts = [];
  if (text.trim() === "" || text.trim() === "none") return parts;
  do parts.push(readPart(reader));
  while (reader.take("+"));
  reader.end();
  return parts.sort((a, b) => (partText(a) < partText(b) ? -1 : 1));
}

function readPart(reader) {
  const name = reader.word();
  const spec = Object.hasOwn(SPEC, name) ? SPEC[name] : null;
  if (!spec) throw new Error(`the page has no part ${name || "here"}; it has ${Object.keys(SPEC).join(", ")}`);
  const own = Object.keys(spec).filter((key) => !(key in BOTH));
  const part = { name };
  let places = 0;
  reader.need("(");
  while (!reader.take(")")) {
    const key = reader.key() || own[places++];
    if (!Object.hasOwn(spec, key ?? "")) throw new Error(`${name} has no field ${key ?? "more"} on the page`);
    if (key in part) throw new Error(`${name} is given ${key} twice`);
    part[key] = checked(name, key, reader.value());
    if (!reader.take(",")) {
      reader.need(")");
      break;
    }
  }
  for (const [key, standard] of Object.entries(spec)) {
    if (standard === undefined && !(key in part)) throw new Error(`${name} needs ${key}`);
    if (same(part[key], standard)) delete part[key];
  }
  if ("span" in part || "from" in part) throw new Error(`${name}: the page knows the span 'needle' and the twin 'twin' only`);
  return part;
}

function checked(name, key, value) {
  const wrong = (wanted) => new Error(`${name}: ${key} is ${wanted}`);
  if (key === "phase" && !PHASES.includes(value)) throw wrong("'prefill', 'decode' or 'both'");
  if (PAIRS.has(key)) {
    if (!Array.isArray(value) || !value.length || !value.every(isPair)) throw wrong("a list of [layer, index] pairs");
    return sortedPairs(value);
  }
  if (key === "layers") {
    if (!Array.isArray(value) || !value.length || !value.every(Number.isInteger)) throw wrong("a list of whole numbers");
    return [...new Set(value)].sort((a, b) => a - b);
  }
  if (["k", "tokens", "sinks", "seed"].includes(key) && !Number.isInteger(value)) throw wrong("a whole number");
  if (["k", "sinks"].includes(key) && value < 0) throw wrong("0 or more");
  if (key === "tokens" && value < 1) throw wrong("1 or more");
  return value;
}

function isPair(value) {
  return Array.isArray(value) && value.length === 2 && value.every(Number.isInteger);
}

function sortedPairs(pairs) {
  const known = new Map(pairs.map((pair) => [pair.join("."), pair]));
  return [...known.values()].sort((a, b) => a[0] - b[0] || a[1] - b[1]);
}

/** Reads the tokens of the text form: names, whole numbers, quoted words, lists. */
class Reader {
  constructor(text) {
    this.text = text;
    this.at = 0;
  }

  match(pattern) {
    this.at += /^\s*/.exec(this.text.slice(this.at))[0].length;
    const found = pattern.exec(this.text.slice(this.at));
    if (found) this.at += found[0].length;
    return found;
  }

  take(mark) {
    return this.match(new RegExp("^\\" + mark)) !== null;
  }

  need(mark) {
    if (!this.take(mark)) throw new Error(`"${mark}" is missing before "${this.text.slice(this.at, this.at + 20)}"`);
  }

  word() {
    return (this.match(/^[a-z_]+/i) || [""])[0];
  }

  key() {
    const found = this.match(/^([a-z_]+)\s*=/i);
    return found && found[1].replace(/_$/, "");
  }

  end() {
    if (this.match(/^[^]/)) throw new Error(`"${this.text.slice(this.at - 1, this.at + 20)}" is too much; join parts with +`);
  }

  value() {
    let found;
    if ((found = this.match(/^-?\d+(?![\w.])/))) return Number(found[0]);
    if ((found = this.match(/^'([^'\\]*)'|^"([^"\\]*)"/))) return found[1] ?? found[2];
    if ((found = this.match(/^(True|False|None)\b/))) return { True: true, False: false, None: null }[found[1]];
    if ((found = this.match(/^ranking\(\s*(?:'([^']*)'|"([^"]*)")\s*\)/))) {
      const words = (found[1] ?? found[2]).trim().split(/\s+/).map((word) => word.split(".").map(Number));
      if (!words.every(isPair)) throw new Error("a ranking is written ranking('2.0 5.3'): layer.head, best first");
      return { ranking: words };
    }
    if ((found = this.match(/^[[(]/))) {
      const end = found[0] === "[" ? "]" : ")";
      const list = [];
      while (!this.take(end)) {
        list.push(this.value());
        if (!this.take(",")) {
          this.need(end);
          break;
        }
      }
      return list;
    }
    throw new Error(`"${this.text.slice(this.at, this.at + 20)}" is no value that the page knows`);
  }
}

/**
 * Return the settings of all controls with nothing changed.
 *
 * heads.off and recurrent.groups hold "layer.index"; recurrent.cut maps a layer to "memory", "conv", "state" or "block";
 * heads.keep is null or {k, by, seed}, where by is a name or {ranking}; rest holds {part, why} of parts that no control shows.
 */
export function untouched() {
  return {
    heads: { off: [], keep: null, phase: "both" },
    hide: { prefill: "keep", decode: "keep" },
    limit: { tokens: null, sinks: 0, phase: "both" },
    recurrent: { groups: [], cut: {}, phase: "both" },
    swap: { kv: false, recurrent: false },
    rest: [],
  };
}

/** Return the parts that settings stand for. `layers` is that of the provider's description. */
export function partsOfControls(controls, layers) {
  const { heads, hide, limit, recurrent, swap } = controls;
  const parts = [...headParts(heads, layers), ...recurrentParts(recurrent, layers)];
  if (hide.prefill === hide.decode) {
    if (hide.prefill !== "keep") parts.push({ name: "expose_tokens", mode: hide.prefill });
  } else {
    for (const phase of ["prefill", "decode"]) {
      if (hide[phase] !== "keep") parts.push({ name: "expose_tokens", phase, mode: hide[phase] });
    }
  }
  if (limit.tokens !== null) {
    const sinks = limit.sinks ? { sinks: limit.sinks } : {};
    parts.push({ name: "limit_context", ...inPhase(limit.phase), tokens: limit.tokens, ...sinks });
  }
  for (const half of ["kv", "recurrent"]) if (swap[half]) parts.push({ name: "swap_memory", half });
  parts.push(...controls.rest.map(({ part }) => part));
  return parts.sort((a, b) => (partText(a) < partText(b) ? -1 : 1));
}

function headParts({ off, keep, phase }, layers) {
  const parts = [];
  const own = layers.filter((layer) => layer.attention);
  const of = (layer) => off.filter((name) => Number(name.split(".")[0]) === layer.index);
  const whole = own.filter((layer) => of(layer).length === layer.attention.heads);
  const single = own.filter((layer) => !whole.includes(layer)).flatMap(of);
  if (whole.length) parts.push({ name: "ablate_attention", ...inPhase(phase), ...inLayers(whole, own) });
  if (single.length) parts.push({ name: "ablate_heads", ...inPhase(phase), heads: sortedPairs(single.map(pairOf)) });
  if (keep) {
    const by = keep.by === "entropy" ? {} : { by: keep.by };
    const seed = keep.by === "random" && keep.seed ? { seed: keep.seed } : {};
    parts.push({ name: "keep_heads", ...inPhase(phase), k: keep.k, ...by, ...seed });
  }
  return parts;
}

function recurrentParts({ groups, cut, phase }, layers) {
  const parts = [];
  const own = layers.filter((layer) => layer.recurrent);
  for (const site of ["memory", "conv", "state", "block"]) {
    const cutLayers = own.filter((layer) => cut[layer.index] === site);
    const where = site === "memory" ? {} : { site };
    if (cutLayers.length) parts.push({ name: "ablate_recurrent", ...inPhase(phase), ...inLayers(cutLayers, own), ...where });
  }
  if (groups.length) parts.push({ name: "ablate_recurrent_groups", ...inPhase(phase), groups: sortedPairs(groups.map(pairOf)) });
  return parts;
}

function inPhase(phase) {
  return phase === "both" ? {} : { phase };
}

function inLayers(some, all) {
  return some.length === all.length ? {} : { layers: some.map((layer) => layer.index) };
}

export function pairOf(name) {
  return name.split(".").map(Number);
}

/** Return the settings that stand for parts. */
export function controlsOf(parts, layers) {
  let settings = { controls: untouched(), phases: {} };
  for (const part of parts) {
    const tried = structuredClone(settings);
    try {
      addPart(tried, part, layers);
      settings = tried;
    } catch (error) {
      settings.controls.rest.push({ part, why: error.message });
    }
  }
  return settings.controls;
}

/** Return which parts no control shows, and why, in words; "" if all are shown. */
export function unshown({ rest }) {
  if (!rest.length) return "";
  const parts = rest.map(({ part, why }) => `${partText(part)} (${why})`).join(", ");
  return `No control shows ${parts}. It acts all the same; Reset takes it away.`;
}

function addPart({ controls, phases }, part, layers) {
  const setPhase = (group) => {
    const phase = part.phase ?? "both";
    if (phases[group] && phases[group] !== phase) throw new Error(`the controls of ${group} have one phase`);
    phases[group] = controls[group].phase = phase;
  };
  if (part.name === "swap_memory") controls.swap[part.half] = true;
  else if (part.name === "expose_tokens") addExposure(controls.hide, part);
  else if (part.name === "limit_context") {
    if (part.layers || controls.limit.tokens !== null) throw new Error("the controls have one limit for all layers");
    setPhase("limit");
    Object.assign(controls.limit, { tokens: part.tokens, sinks: part.sinks ?? 0 });
  } else if (part.name.startsWith("ablate_recurrent")) {
    setPhase("recurrent");
    addRecurrent(controls.recurrent, part, layers);
  } else {
    setPhase("heads");
    addHeads(controls.heads, part, layers);
  }
}

function addExposure(hide, part) {
  if (part.layers || part.renormalize) throw new Error("the controls hide the needle in all layers, and renormalise nothing");
  for (const phase of part.phase && part.phase !== "both" ? [part.phase] : ["prefill", "decode"]) hide[phase] = part.mode;
}

function addHeads(heads, part, layers) {
  if (part.name === "keep_heads") {
    if (part.layers || heads.keep) throw new Error("the controls keep as many heads in every layer");
    heads.keep = { k: part.k, by: part.by ?? "entropy", seed: part.seed ?? 0 };
    return;
  }
  if (part.site === "block") throw new Error("the controls switch heads off, not whole attention blocks");
  const own = layers.filter((layer) => layer.attention && (!part.layers || part.layers.includes(layer.index)));
  const names =
    part.name === "ablate_attention"
      ? own.flatMap((layer) => Array.from({ length: layer.attention.heads }, (_, i) => `${layer.index}.${i}`))
      : part.heads.map((pair) => pair.join("."));
  heads.off = [...new Set([...heads.off, ...names])];
}

function addRecurrent(recurrent, part, layers) {
  if (part.name === "ablate_recurrent_groups") {
    recurrent.groups = [...new Set([...recurrent.groups, ...part.groups.map((pair) => pair.join("."))])];
    return;
  }
  const site = part.site ?? "memory";
  for (const layer of layers.filter((each) => each.recurrent && (!part.layers || part.layers.includes(each.index)))) {
    const before = recurrent.cut[layer.index];
    recurrent.cut[layer.index] = before && before !== site ? "memory" : site; // convolution and state together are the memory
  }
}
