/**
 * Provider that looks answers up: an exported page holds those that `export.py` recorded.
 *
 * `data.recorded` is {"answers": {draw: {intervention text: Answer without its prompt}}, "prompts": {draw: Answer.prompt},
 * "attention": {draw: {intervention text: {"needle": ..., "tokens": [[{"layer", "heads", "keys", "bytes"}]]}}}}, where draws are
 * named "length/depth/seed" and bytes are base64 of 0..255 for weights of 0..1.
 */

import { textOf } from "play/intervention.js";
import { promptText, ProviderError } from "play/provider.js";

export async function open(data) {
  const { answers, prompts, attention } = data.recorded;
  const draws = new Map(Object.entries(data.samples).map(([name, prompt]) => [key(prompt), name]));
  const install = `pip install needlework[play]; needlework play ${data.description.name}`;

  function find(request) {
    const draw = draws.get(key(request.prompt));
    if (!draw) throw new ProviderError(`This page holds recorded answers; to ask about another prompt: ${install}`);
    const text = textOf(request.parts);
    const answer = answers[draw]?.[text];
    if (!answer) throw new ProviderError(`Not recorded in this page, or not together with what is changed already: reset first, or ${install}`);
    return { draw, text, answer };
  }

  return {
    describe: async () => data.description,
    stories: async () => data.stories,
    async sample({ length, depth, seed }) {
      const prompt = data.samples[`${length}/${depth}/${seed}`];
      if (!prompt) throw new ProviderError(`This page holds ${draws.size} prompts; to draw others: ${install}`);
      return prompt;
    },
    ranking: async (name) => data.rankings[name],
    async generate(request) {
      const { draw, text, answer } = find(request);
      return { ...answer, intervention: text, prompt: prompts[draw] };
    },
    async attention(request, token) {
      const { draw, text } = find(request);
      const found = attention[draw]?.[text];
      if (!found) throw new ProviderError(`Attention is recorded for the stories only; to see it here: ${install}`);
      return { token, needle: found.needle, layers: found.tokens[token].map(unpacked) };
    },
    unavailable(request) {
      try {
        find(request);
        return "";
      } catch (error) {
        return error.message;
      }
    },
  };
}

function key(prompt) {
  return JSON.stringify([promptText(prompt), prompt.twin, prompt.options]);
}

function unpacked({ layer, heads, keys, bytes }) {
  const raw = Uint8Array.from(atob(bytes), (c) => c.charCodeAt(0));
  const weights = Array.from({ length: heads }, (_, h) => Array.from(raw.subarray(h * keys, (h + 1) * keys), (w) => w / 255));
  return { layer, weights };
}
