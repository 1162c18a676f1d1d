/** The state of the page as text, as Python and as a plan of `needlework run`. */

import { textOf } from "play/intervention.js";
import { promptText } from "play/provider.js";

/** Return {Text, Python, Plan} of a state. `answer` is the untouched or the changed answer; it holds the needle's tokens. */
export function codeOf(description, request, draw, answer) {
  return {
    Text: textOf(request.parts),
    Python: python(description, request, answer),
    Plan: plan(description, request, draw),
  };
}

function python(description, { prompt, parts, max_new_tokens }, answer) {
  const spans = answer?.prompt.needle.length
    ? `    spans=[{"needle": (${answer.prompt.needle.map(([start, end]) => `(${start}, ${end})`).join(", ")},)}],\n`
    : "";
  const swaps = parts.some((part) => part.name === "swap_memory");
  const twin = swaps ? `    twins=[{"twin": ${JSON.stringify(promptText({ ...prompt, needle: prompt.twin }))}}],\n` : "";
  const stop = description.stop.length ? `    stop=${JSON.stringify(description.stop)},\n` : "";
  return `import needlework as nw

subject = nw.load(${JSON.stringify(description.name)})
prompt = ${JSON.stringify(promptText(prompt))}
answer = subject.generate(
    [prompt],
    ${JSON.stringify(textOf(parts))},
${spans}${twin}${stop}    max_new_tokens=${max_new_tokens},
)[0]
print(answer.text, answer.receipt)
`;
}

function plan(description, { prompt, parts }, draw) {
  const text = textOf(parts);
  const interventions = text === "none" ? "[none]" : `[none, ${JSON.stringify(text)}]`;
  const head = `models: [${JSON.stringify(description.name)}]\n`;
  if (draw) {
    const task = { ...description.task, lengths: [draw.length], depths: [draw.depth] };
    return `name: playground
${head}seeds: [${draw.seed}]
experiments:
  playground:
    tasks:
      - ${JSON.stringify(task)}
    interventions: ${interventions}
`;
  }
  const line = { prompt: promptText(prompt), target: prompt.target.trim(), needle: prompt.needle.trim() || undefined };
  return `# prompts.jsonl, a file beside this one, holds the prompt in one line:
# ${JSON.stringify(line)}
name: playground
${head}experiments:
  playground:
    tasks:
      - {kind: prompts, file: prompts.jsonl}
    interventions: ${interventions}
`;
}
