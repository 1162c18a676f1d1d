"""The law of the window: every layer shows as many keys as its window says, not one more and not one fewer."""

from __future__ import annotations

from collections.abc import Sequence

from needlework.checkup.case import Case, DoesNotApply, Finding, near, worst
from needlework.interventions.base import NONE, Intervention
from needlework.interventions.text import parse
from needlework.requests import Answer, Request

_PAST = 6  # tokens beyond the edge


def window_edge(case: Case) -> Finding:
    """A limit of as many keys as the window hides none; of one fewer, exactly one for every query beyond the edge."""
    case.need_heads()
    case.need_full_heads()
    windows = {layer: part.window for layer, part in case.anatomy.attention_parts()}
    own = {window for window in windows.values() if window}
    if not own:
        raise DoesNotApply("no layer has a window: attention sees all tokens before it")
    tokens = max(own) + _PAST
    if tokens + case.after > case.most_tokens or min(own) < 2:
        raise DoesNotApply(f"the window of {max(own):,} tokens ends beyond the {case.most_tokens:,} that are read here")
    if (configured := _configured(case)) and not own <= configured:
        words = f"attention is called with windows of {_listed(own)} keys, the configuration says {_listed(configured)}"
        return Finding(False, words)
    ids = case.sequence(tokens + case.after)
    shown = {layer: window or tokens for layer, window in windows.items()}
    whole, fewer = case.ask([_limited(case, ids, tokens, shown, less) for less in (0, 1)])
    if wrong := _wrong_edge(whole, fewer, shown, tokens):
        return Finding(False, wrong)
    idle = case.subject.logits([ids])[0, tokens - 1 : -1]
    rows = case.ask([case.forced(prompt=ids[:tokens], after=ids[tokens:]) for _ in range(2)])  # rows that share their keys
    found = worst(*(case.follows(answer.logprobs, idle, ids[tokens:]) for answer in (whole, *rows)))
    seen = " and ".join(sorted({f"{window} keys" if window else "all keys" for window in windows.values()}))
    why = f"layers show {seen}, as configured; {len(ids)} tokens read at once, with the limit, and decoded past the edge"
    return near(found, case.between_routes, why)


def _limited(case: Case, ids: Sequence[int], tokens: int, shown: dict[int, int], less: int) -> Request:
    """While the prompt is read, every layer limited to the keys that it shows, or to one fewer."""
    act: Intervention = NONE
    for window in sorted(set(shown.values())):
        layers = [i for i, keys in shown.items() if keys == window]
        act = act + parse(f"limit_context({window - less}, layers={layers}, phase='prefill')")
    return Request(tuple(ids[:tokens]), act, forced=tuple(ids[tokens:]), boundary="prefill")


def _wrong_edge(whole: Answer, fewer: Answer, shown: dict[int, int], tokens: int) -> str:
    """Which layer shows another number of keys than it should; empty if none does."""
    for layer, window in shown.items():
        passes = whole.receipt.total("positions", "prefill", layer) // tokens  # some modules run several times a token
        for answer, limit, right in ((whole, window, 0), (fewer, window - 1, passes * (tokens - window + 1))):
            hidden = answer.receipt.total("keys_hidden", "prefill", layer)
            if hidden != right:
                keys = "more" if hidden > right else "fewer"
                return f"layer {layer} shows {keys} than {window} keys: a limit of {limit} hid {hidden} pairs, not {right}"
    return ""


def _configured(case: Case) -> set[int]:
    """Windows that the configuration names, in force or not."""
    config = case.subject.model.config.get_text_config(decoder=True)
    named = [
        value for name, value in vars(config).items() if name == "sliding_window" or name.endswith(("window_size", "window"))
    ]
    return {value for value in named if isinstance(value, int) and not isinstance(value, bool)}


def _listed(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
