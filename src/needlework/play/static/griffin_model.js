/**
 * RecurrentGemma (Griffin) in plain JavaScript: weights, memory, and the forward pass with interventions on every layer.
 *
 * A forward takes rows: consecutive tokens of one prompt, which share a memory, or the next tokens of several continuations, each
 * with a memory of its own. All values are doubles in row-major arrays [rows, width]. docs/method.md defines the interventions;
 * `griffin_acts.js` turns them into the acts that layers read here.
 */

import { randomScores } from "play/griffin_acts.js";

const RECORDED_PAIRS = 1 << 21; // numbers of a recorded prompt; longer prompts are not recorded

/** The weights of a model, and its forward pass. */
export class Griffin {
  /** @param header `config` and `tensors` of export.py; `bytes`: ArrayBuffer of its packed weights. */
  constructor({ config, tensors }, bytes) {
    this.config = config;
    const view = new DataView(bytes);
    this.tensors = new Map(tensors.map((tensor) => [tensor.name, readTensor(view, tensor)]));
    this.layers = config.layers.map((kind, i) => {
      const at = (name) => this.tensor(`layers.${i}.${name}`);
      return kind === "attention" ? new AttentionLayer(config, at, i) : new RecurrentLayer(config, at, i);
    });
    this.embedding = this.tensor("embed_tokens.weight");
    this.finalNorm = this.tensor("final_norm.weight").data;
  }

  tensor(name) {
    const found = this.tensors.get(name);
    if (!found) throw new Error(`the weights have no ${name}`);
    return found;
  }

  /** Return an empty memory with room for this many tokens. */
  newMemory(capacity) {
    return new Memory(this.layers.map((layer) => layer.newMemory(capacity)));
  }

  /** Return the input of the first layer, [tokens, hidden]. */
  embed(tokens) {
    const { hidden, embeddingScale } = this.config;
    const x = new Float64Array(tokens.length * hidden);
    tokens.forEach((token, i) => {
      for (let d = 0; d < hidden; d++) x[i * hidden + d] = this.embedding.data[token * hidden + d] * embeddingScale;
    });
    return x;
  }

  /**
   * Run layers `first` to `end` (excluded) in place on x [rows, hidden]. See `Row` for rows, griffin_acts.js for acts.
   *
   * @param inputs Called with each layer's index and input before it runs.
   */
  run(x, rows, acts, first = 0, end = this.layers.length, inputs = () => {}) {
    for (const layer of this.layers.slice(first, end)) {
      inputs(layer.index, x);
      layer.run(x, rows, acts);
    }
  }

  /** Read rows into the memory of the topmost layer only: nothing reads its output. x is not changed. */
  remember(x, rows, acts) {
    const top = this.layers.at(-1);
    top.remember(top.norm(x, rows.length), rows, acts);
  }

  /** Return logits [rows, vocabulary] of the last layer's output. */
  logits(x, count) {
    const { hidden, vocabulary, softCap, epsilon } = this.config;
    const out = linear(rmsNorm(x, count, hidden, this.finalNorm, epsilon), count, this.embedding, null);
    for (let i = 0; i < count * vocabulary; i++) out[i] = Math.tanh(out[i] / softCap) * softCap;
    return out;
  }
}

/**
 * @typedef {object} Row  One token of a forward.
 * @property {Memory} memory
 * @property {number} position
 * @property {((layer: number, name: string, amount: number) => void)|null} count  Counts for the receipt.
 * @property {Map<number, Float64Array[]>|null} looks  If given, attention is appended: layer -> [heads * keys], one per token.
 */

/** Keys and values of attention layers, windows and states of recurrent layers; by layer. */
export class Memory {
  constructor(layers) {
    this.layers = layers;
  }

  fork() {
    return new Memory(this.layers.map(copied));
  }

  /** Return a copy that has one half ("kv" or "recurrent") of another memory. */
  withHalf(half, other) {
    const fromOther = (layer) => "keys" in layer === (half === "kv");
    return new Memory(this.layers.map((layer, i) => copied(fromOther(layer) ? other.layers[i] : layer)));
  }

  /** Copy the layers below `end` from another memory. */
  copyBelow(end, other) {
    for (let i = 0; i < end; i++) for (const name of Object.keys(this.layers[i])) this.layers[i][name].set(other.layers[i][name]);
  }

  /** The inputs of a prompt's layers would take too much room. */
  static tooLong(tokens, model) {
    return tokens * model.config.hidden * model.layers.length > RECORDED_PAIRS;
  }
}

function copied(layer) {
  return Object.fromEntries(Object.entries(layer).map(([name, values]) => [name, values.slice()]));
}

/** What both kinds of layers share: norms, residual sums and the gated MLP. */
class Layer {
  constructor(config, at, index) {
    Object.assign(this, { config, index });
    this.mixerNorm = at("temporal_pre_norm.weight").data;
    this.mlpNorm = at("channel_pre_norm.weight").data;
    for (const name of ["gate", "up", "down"]) {
      this[name] = at(`mlp_block.${name}_proj.weight`);
      this[`${name}Bias`] = at(`mlp_block.${name}_proj.bias`).data;
    }
  }

  norm(x, count) {
    return rmsNorm(x, count, this.config.hidden, this.mixerNorm, this.config.epsilon);
  }

  run(x, rows, acts) {
    const count = rows.length;
    const act = acts.layers.get(this.index);
    const mixed = this.mix(this.norm(x, count), rows, act, acts);
    if (act?.dropped) tally(rows, this.index, "blocks_dropped", 1);
    else add(x, mixed);
    const normed = rmsNorm(x, count, this.config.hidden, this.mlpNorm, this.config.epsilon);
    const gate = gelu(linear(normed, count, this.gate, this.gateBias));
    const up = linear(normed, count, this.up, this.upBias);
    for (let i = 0; i < gate.length; i++) gate[i] *= up[i];
    add(x, linear(gate, count, this.down, this.downBias));
  }
}

/** Grouped-query attention with rotary positions and a sliding window. */
class AttentionLayer extends Layer {
  constructor(config, at, index) {
    super(config, at, index);
    for (const name of ["q", "k", "v", "o"]) this[name] = at(`temporal_block.${name}_proj.weight`);
    const bias = (name) => (name === "o" || config.attentionBias ? at(`temporal_block.${name}_proj.bias`).data : null);
    for (const name of ["q", "k", "v", "o"]) this[`${name}Bias`] = bias(name);
    const half = config.rotary / 2;
    this.frequencies = Float32Array.from({ length: half }, (_, i) => 1 / config.theta ** (i / half));
  }

  newMemory(capacity) {
    const size = capacity * this.config.kvHeads * this.config.headDim;
    return { keys: new Float64Array(size), values: new Float64Array(size) };
  }

  /** Store keys and values of normed rows. */
  store(normed, rows) {
    const width = this.config.kvHeads * this.config.headDim;
    const keys = linear(normed, rows.length, this.k, this.kBias);
    const values = linear(normed, rows.length, this.v, this.vBias);
    rows.forEach(({ memory, position }, i) => {
      this.rotate(keys, i * width, this.config.kvHeads, position);
      memory.layers[this.index].keys.set(keys.subarray(i * width, (i + 1) * width), position * width);
      memory.layers[this.index].values.set(values.subarray(i * width, (i + 1) * width), position * width);
    });
  }

  /** Rotate the first dims of each head in place, by the token's position. */
  rotate(values, start, heads, position) {
    const { headDim, rotary } = this.config;
    const half = rotary / 2;
    for (let i = 0; i < half; i++) {
      const angle = Math.fround(position * this.frequencies[i]);
      const [cos, sin] = [Math.cos(angle), Math.sin(angle)];
      for (let h = 0, at = start + i; h < heads; h++, at += headDim) {
        const [a, b] = [values[at], values[at + half]];
        values[at] = a * cos - b * sin;
        values[at + half] = b * cos + a * sin;
      }
    }
  }

  mix(normed, rows, act, acts) {
    const { heads, headDim } = this.config;
    this.store(normed, rows);
    const queries = linear(normed, rows.length, this.q, this.qBias);
    const width = heads * headDim;
    const out = new Float64Array(rows.length * width);
    rows.forEach((row, i) => {
      const [start, end] = [i * width, (i + 1) * width];
      this.rotate(queries, start, heads, row.position);
      this.attend(row, queries.subarray(start, end), out.subarray(start, end), act ?? {}, acts.sample);
    });
    return linear(out, rows.length, this.o, this.oBias);
  }

  /** Store keys and values, and count what acts would do to the outputs, which nothing reads. */
  remember(normed, rows, acts) {
    const act = acts.layers.get(this.index);
    if (act?.keep && act.off) {
      this.mix(normed, rows, act, acts); // how many heads are off depends on the scores
    } else {
      this.store(normed, rows);
      const off = act?.keep ? this.config.heads - act.keep.k : sum(act?.off ?? []);
      if (off) tally(rows, this.index, "heads_zeroed", off);
      for (const row of act?.limit || act?.expose ? rows : []) {
        const ranges = this.visible(row, act);
        if (act.expose) countColumns(row, this.index, act.expose, ranges);
      }
    }
    if (act?.dropped) tally(rows, this.index, "blocks_dropped", 1);
  }

  /** Return the ranges [start, end) of keys that a token sees, and count those that a limit hides. */
  visible({ position, count }, act) {
    const { window } = this.config;
    const first = window === null ? 0 : Math.max(0, position - window + 1);
    if (!act.limit) return [[first, position + 1]];
    const near = Math.max(first, position - act.limit.tokens + 1);
    const sinks = Math.max(first, Math.min(act.limit.sinks, near));
    if (near > sinks) count?.(this.index, "keys_hidden", near - sinks);
    return [[first, sinks], [near, position + 1]].filter(([start, end]) => start < end);
  }

  /** Compute the outputs [heads * dim] of one token. */
  attend(row, query, out, act, sample) {
    const { heads } = this.config;
    const ranges = this.visible(row, act);
    const length = row.position + 1;
    const random = act.keep?.by === "random";
    const dynamic = act.keep && !random;
    let off = act.keep ? null : (act.off ?? null);
    if (random) off = this.chosen(act, randomScores(act.keep.seed, sample, this.index, row.position, heads));
    const needAll = row.looks || dynamic || act.expose?.mode === "balanced";
    const weights = new Float64Array(heads * length);
    const ofHead = (h) => weights.subarray(h * length, (h + 1) * length);
    for (let h = 0; h < heads; h++) if (needAll || !off?.[h]) this.softmax(row, query, h, ranges, ofHead(h));
    if (row.looks) row.looks.get(this.index).push(weights.slice());
    if (dynamic) off = this.chosen(act, this.scores(row, act.keep.by, weights, ranges));
    if (act.expose) expose(row, this.index, act.expose, ranges, weights, heads);
    for (let h = 0; h < heads; h++) if (!off?.[h]) this.output(row, h, ranges, ofHead(h), out);
    if (off) row.count?.(this.index, "heads_zeroed", sum(off));
  }

  /** Write a head's attention on the visible keys into `weights` [keys]. */
  softmax(row, query, head, ranges, weights) {
    const { heads, kvHeads, headDim } = this.config;
    const { keys } = row.memory.layers[this.index];
    const group = Math.floor(head / (heads / kvHeads));
    const scale = headDim ** -0.5;
    const at = head * headDim;
    let most = -Infinity;
    for (const [start, end] of ranges) {
      for (let k = start; k < end; k++) {
        const from = (k * kvHeads + group) * headDim;
        let score = 0;
        for (let d = 0; d < headDim; d++) score += query[at + d] * keys[from + d];
        weights[k] = score *= scale;
        if (score > most) most = score;
      }
    }
    let total = 0;
    for (const [start, end] of ranges) for (let k = start; k < end; k++) total += weights[k] = Math.exp(weights[k] - most);
    for (const [start, end] of ranges) for (let k = start; k < end; k++) weights[k] /= total;
  }

  /** Add a head's values, weighted, to its part of `out`. */
  output(row, head, ranges, weights, out) {
    const { heads, kvHeads, headDim } = this.config;
    const { values } = row.memory.layers[this.index];
    const group = Math.floor(head / (heads / kvHeads));
    const at = head * headDim;
    for (const [start, end] of ranges) {
      for (let k = start; k < end; k++) {
        const weight = weights[k];
        if (weight === 0) continue;
        const from = (k * kvHeads + group) * headDim;
        for (let d = 0; d < headDim; d++) out[at + d] += weight * values[from + d];
      }
    }
  }

  /** Return each head's score: higher is kept. */
  scores(row, by, weights, ranges) {
    const { heads, headDim } = this.config;
    const length = row.position + 1;
    const out = new Float64Array(heads * headDim);
    return Float32Array.from({ length: heads }, (_, h) => {
      const own = weights.subarray(h * length, (h + 1) * length);
      let total = 0;
      if (by === "norm") {
        this.output(row, h, ranges, own, out.fill(0));
        for (let d = h * headDim; d < (h + 1) * headDim; d++) total += out[d] * out[d];
        return Math.sqrt(total);
      }
      for (const p of own) if (p > 0) total += by === "entropy" ? p * Math.log(p) : p * p;
      return by === "entropy" ? total : Math.sqrt(total);
    });
  }

  /** Return which heads are off: all but the k best, ties going to the lower index, and those that are off anyway. */
  chosen(act, scores) {
    const order = Array.from(scores, (_, h) => h).sort((a, b) => scores[b] - scores[a] || a - b);
    const off = act.off ? Uint8Array.from(act.off) : new Uint8Array(scores.length);
    for (const head of order.slice(act.keep.k)) off[head] = 1;
    return off;
  }
}

/** Edit the attention [heads * keys] of one token on or off the exposed columns; count the columns. */
function expose(row, layer, { mode, columns, renormalize }, ranges, weights, heads) {
  const length = row.position + 1;
  countColumns(row, layer, { mode, columns }, ranges);
  let exposed = 0;
  let mass = 0;
  for (const [start, end] of ranges) {
    for (let k = start; k < end; k++) {
      if (!columns[k]) continue;
      exposed += 1;
      for (let h = 0; h < heads; h++) mass += weights[h * length + k];
    }
  }
  const even = exposed ? mass / heads / exposed : 0;
  for (let h = 0; h < heads; h++) {
    const own = weights.subarray(h * length, (h + 1) * length);
    for (let k = 0; k < length; k++) {
      if (mode === "balanced") own[k] = columns[k] && isVisible(k, ranges) ? even : 0;
      else if (mode === "null" || Boolean(columns[k]) === (mode === "omit")) own[k] = 0;
    }
    const left = renormalize ? sum(own) : 0;
    if (left > 0) for (let k = 0; k < length; k++) own[k] /= left;
  }
}

function countColumns(row, layer, { mode, columns }, ranges) {
  let [seen, inside] = [0, 0];
  for (const [start, end] of ranges) {
    seen += end - start;
    for (let k = start; k < end; k++) inside += columns[k] ? 1 : 0;
  }
  const touched = { omit: inside, only: seen - inside, null: seen, balanced: seen }[mode];
  if (touched) row.count?.(layer, "columns_touched", touched);
  if (inside) row.count?.(layer, "columns_exposed", inside);
}

function isVisible(key, ranges) {
  return ranges.some(([start, end]) => start <= key && key < end);
}

/** The RG-LRU block: a short convolution and a gated linear recurrence, beside a gelu branch. */
class RecurrentLayer extends Layer {
  constructor(config, at, index) {
    super(config, at, index);
    for (const name of ["x", "y", "out"]) {
      this[name] = at(`temporal_block.linear_${name}.weight`);
      this[`${name}Bias`] = at(`temporal_block.linear_${name}.bias`).data;
    }
    this.taps = at("temporal_block.conv_1d.weight").data; // [width, taps], the token's own tap last
    this.tapsBias = at("temporal_block.conv_1d.bias").data;
    for (const name of ["input", "recurrent"]) {
      this[`${name}Gate`] = at(`temporal_block.rg_lru.${name}_gate_weight`).data; // [blocks, in, out]
      this[`${name}GateBias`] = at(`temporal_block.rg_lru.${name}_gate_bias`).data;
    }
    this.rate = at("temporal_block.rg_lru.recurrent_param").data.map((value) => 8 * Math.log1p(Math.exp(value)));
  }

  newMemory() {
    const { width, taps } = this.config;
    return { window: new Float64Array((taps - 1) * width), state: new Float64Array(width) };
  }

  mix(normed, rows, act) {
    const count = rows.length;
    const gate = gelu(linear(normed, count, this.y, this.yBias));
    const hidden = this.recur(normed, rows, act);
    for (let i = 0; i < hidden.length; i++) hidden[i] *= gate[i];
    if (act?.groups) this.zeroGroups(hidden, rows, act.groups);
    return linear(hidden, count, this.out, this.outBias);
  }

  remember(normed, rows, acts) {
    const act = acts.layers.get(this.index);
    this.recur(normed, rows, act);
    if (act?.groups) tally(rows, this.index, "groups_zeroed", sum(act.groups));
    if (act?.dropped) tally(rows, this.index, "blocks_dropped", 1);
  }

  zeroGroups(hidden, rows, groups) {
    const { width } = this.config;
    const size = width / groups.length;
    tally(rows, this.index, "groups_zeroed", sum(groups));
    for (let i = 0; i < hidden.length; i++) if (groups[Math.floor((i % width) / size)]) hidden[i] = 0;
  }

  /** Pass rows through convolution and recurrence, updating their memories; return [rows, width]. */
  recur(normed, rows, act = {}) {
    const { width } = this.config;
    const x = linear(normed, rows.length, this.x, this.xBias);
    const alone = { window: Boolean(act.cut || act.convolution), state: Boolean(act.cut || act.state) };
    for (const [edit, name] of [["cut", "states_cut"], ["convolution", "convolutions_cut"], ["state", "carries_cut"]]) {
      if (act[edit]) tally(rows, this.index, name, 1);
    }
    rows.forEach(({ memory, position }, i) => {
      const { window, state } = memory.layers[this.index];
      const own = x.subarray(i * width, (i + 1) * width);
      this.convolve(own, window, alone.window);
      this.step(own, state, position === 0, alone.state);
    });
    return x;
  }

  /** Replace a token's x [width] by the convolution's output. `window` holds the inputs before it, oldest first. */
  convolve(x, window, alone) {
    const { width, taps } = this.config;
    const past = taps - 1;
    for (let c = 0; c < width; c++) {
      const own = x[c];
      let total = this.tapsBias[c] + this.taps[c * taps + past] * own;
      for (let t = 0; t < past && !alone; t++) total += this.taps[c * taps + t] * window[t * width + c];
      x[c] = total;
      for (let t = 0; t < past - 1; t++) window[t * width + c] = window[(t + 1) * width + c];
      if (past) window[(past - 1) * width + c] = own;
    }
    if (alone) window.fill(0);
  }

  /** Replace x [width] by the next hidden state. The first token of a sequence is not scaled by its gate's root. */
  step(x, state, first, alone) {
    const { width, blocks } = this.config;
    const size = width / blocks;
    const input = blockDiagonal(x, this.inputGate, this.inputGateBias, blocks, size);
    const keep = blockDiagonal(x, this.recurrentGate, this.recurrentGateBias, blocks, size);
    for (let c = 0; c < width; c++) {
      const decay = first ? 0 : Math.exp(-this.rate[c] * sigmoid(keep[c]));
      const carried = alone ? 0 : decay * state[c];
      x[c] = carried + x[c] * sigmoid(input[c]) * Math.sqrt(1 - decay * decay);
      state[c] = alone ? 0 : x[c];
    }
  }
}

// --- arithmetic ------------------------------------------------------------------------------------------------------------

/**
 * Return x [count, in] times a matrix [out, in], plus a bias [out] or null. Tiles of four rows and two outputs keep their sums in
 * registers.
 */
export function linear(x, count, { data: w, shape }, bias) {
  const outputs = shape[0];
  const inputs = shape[1];
  const out = new Float64Array(count * outputs);
  if (bias) for (let i = 0; i < count; i++) out.set(bias, i * outputs);
  const paired = outputs - (outputs % 2);
  let i = 0;
  for (; i + 4 <= count; i += 4) fourRows(x, i, w, paired, inputs, out, outputs);
  for (; i < count; i++) oneRow(x, i, w, 0, paired, inputs, out, outputs);
  if (paired < outputs) for (i = 0; i < count; i++) lastOutput(x, i, w, inputs, out, outputs);
  return out;
}

function fourRows(x, row, w, paired, inputs, out, outputs) {
  const x0 = row * inputs;
  const x1 = x0 + inputs;
  const x2 = x1 + inputs;
  const x3 = x2 + inputs;
  for (let o = 0; o < paired; o += 2) {
    const w0 = o * inputs;
    const w1 = w0 + inputs;
    let a0 = 0, a1 = 0, a2 = 0, a3 = 0, b0 = 0, b1 = 0, b2 = 0, b3 = 0;
    for (let k = 0; k < inputs; k++) {
      const a = w[w0 + k];
      const b = w[w1 + k];
      const y0 = x[x0 + k];
      const y1 = x[x1 + k];
      const y2 = x[x2 + k];
      const y3 = x[x3 + k];
      a0 += a * y0;
      b0 += b * y0;
      a1 += a * y1;
      b1 += b * y1;
      a2 += a * y2;
      b2 += b * y2;
      a3 += a * y3;
      b3 += b * y3;
    }
    let at = row * outputs + o;
    out[at] += a0;
    out[at + 1] += b0;
    at += outputs;
    out[at] += a1;
    out[at + 1] += b1;
    at += outputs;
    out[at] += a2;
    out[at + 1] += b2;
    at += outputs;
    out[at] += a3;
    out[at + 1] += b3;
  }
}

function oneRow(x, row, w, from, paired, inputs, out, outputs) {
  const x0 = row * inputs;
  for (let o = from; o < paired; o += 2) {
    const w0 = o * inputs;
    const w1 = w0 + inputs;
    let a = 0, b = 0;
    for (let k = 0; k < inputs; k++) {
      const y = x[x0 + k];
      a += w[w0 + k] * y;
      b += w[w1 + k] * y;
    }
    out[row * outputs + o] += a;
    out[row * outputs + o + 1] += b;
  }
}

function lastOutput(x, row, w, inputs, out, outputs) {
  let total = 0;
  for (let k = 0; k < inputs; k++) total += w[(outputs - 1) * inputs + k] * x[row * inputs + k];
  out[row * outputs + outputs - 1] += total;
}

/** Return x [width] times matrices [blocks, in, out], plus a bias [width]. */
function blockDiagonal(x, weights, bias, blocks, size) {
  const out = Float64Array.from(bias);
  for (let b = 0; b < blocks; b++) {
    for (let i = 0; i < size; i++) {
      const value = x[b * size + i];
      const from = (b * size + i) * size;
      for (let o = 0; o < size; o++) out[b * size + o] += value * weights[from + o];
    }
  }
  return out;
}

/** Return x [count, width] divided by its root mean square, times 1 + weight. */
function rmsNorm(x, count, width, weight, epsilon) {
  const out = new Float64Array(count * width);
  for (let i = 0; i < count; i++) {
    let squares = 0;
    for (let d = i * width; d < (i + 1) * width; d++) squares += x[d] * x[d];
    const scale = 1 / Math.sqrt(squares / width + epsilon);
    for (let d = 0; d < width; d++) out[i * width + d] = x[i * width + d] * scale * (1 + weight[d]);
  }
  return out;
}

/** Apply gelu in its tanh form, in place: x / 2 * (1 + tanh u) is x * sigmoid(2 u). */
function gelu(values) {
  const factor = 2 * Math.sqrt(2 / Math.PI);
  for (let i = 0; i < values.length; i++) {
    const x = values[i];
    values[i] = x / (1 + Math.exp(-factor * (x + 0.044715 * x * x * x)));
  }
  return values;
}

function sigmoid(x) {
  return 1 / (1 + Math.exp(-x));
}

function add(x, y) {
  for (let i = 0; i < x.length; i++) x[i] += y[i];
}

function sum(values) {
  let total = 0;
  for (const value of values) total += value;
  return total;
}

function tally(rows, layer, name, each) {
  for (const row of rows) row.count?.(layer, name, each);
}

/** Return a tensor: whole numbers of 24 bits, times a float32 factor for each row. */
function readTensor(view, { shape, factors, numbers }) {
  const size = shape.reduce((product, n) => product * n, 1);
  const width = shape.at(-1);
  const data = new Float64Array(size);
  for (let i = 0; i < size; i++) {
    const number = (view.getInt8(numbers + 3 * i + 2) << 16) | view.getUint16(numbers + 3 * i, true);
    data[i] = number * view.getFloat32(factors + 4 * Math.floor(i / width), true);
  }
  return { shape, data };
}
