/** Provider that asks `needlework play`: one call of its API for each method. */

import { ProviderError } from "play/provider.js";

const SUPERSEDED = 409;

/** Return the provider of the server that this page comes from. Its token is a part of the page's own address. */
export async function open() {
  const tab = crypto.randomUUID();

  async function call(method, body = {}, signal = undefined) {
    let response;
    try {
      response = await fetch(new URL(`api/${method}`, location.href.split(/[?#]/)[0]), {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ tab, ...body }),
        cache: "no-store",
        credentials: "omit",
        signal,
      });
    } catch (error) {
      if (signal?.aborted) throw signal.reason;
      throw new ProviderError("The server does not answer. If it was stopped, start `needlework play` again and open its new address.");
    }
    const answer = await response.json().catch(() => ({ error: `the server answered with status ${response.status}` }));
    if (response.status === SUPERSEDED) throw new DOMException("superseded", "AbortError");
    if (!response.ok) throw new ProviderError(answer.error);
    return answer;
  }

  const description = await call("describe");
  return {
    describe: async () => description,
    stories: () => call("stories"),
    sample: (draw) => call("sample", draw),
    ranking: (name) => call("ranking", { name }),
    generate: (request, { signal } = {}) => call("generate", { request }, signal),
    attention: (request, token, { signal } = {}) => call("attention", { request, token }, signal),
    unavailable: () => "",
  };
}
