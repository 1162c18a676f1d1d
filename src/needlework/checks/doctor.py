"""`nw.doctor(subject)`: check every law on one model. A law is a property that must hold on any model, one function each.

An exception inside a law is a failure of that law.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import torch
import transformers
from torch import Tensor

from needlework.checks import Check, Checkup, Outcome
from needlework.checks.case import Case, DoesNotApply, LawResult, near, worst
from needlework.interventions.base import NONE, Intervention, parse
from needlework.measure import Progress, no_progress
from needlework.requests import Request
from needlework.subject import Subject
from needlework.tasks import make_task, toy
from needlework.tasks.base import Item
from needlework.tasks.haystack import fill_template
from needlework.tasks.niah import KEY, NEEDLE, VALUE
from needlework.tasks.prompts import MARKER, has_chat, token_ids
from needlework.terminal import Bar

_Check = Callable[[Case], LawResult]
LAWS: dict[str, tuple[str, _Check]] = {}  # name -> what must hold, and the function that checks it
TOKENS, QUICK_TOKENS = 32, 16  # length of test prompts; the window law may need longer ones
AFTER, QUICK_AFTER = 4, 2  # tokens after the prompt
MOST_TOKENS, QUICK_MOST_TOKENS = 4096, 256
_EFFECT = 1e-5  # standard deviations: least change by an intervention that has an effect
_HIDES_NOTHING = parse(f"limit_context({1 << 30})")  # no-op that makes attention use needlework's implementation
_PAST = 6  # tokens beyond the edge of the window


def law(name: str, says: str) -> Callable[[_Check], _Check]:
    """Register a function that checks a law on a Case, by the law's name and what must hold."""

    def register(check: _Check) -> _Check:
        LAWS[name] = (says, check)
        return check

    return register


@law("idle is stock", "with nothing done, logits are those of transformers")
def idle_is_stock(case: Case) -> LawResult:
    case.need_full_heads()
    found = case.distance(case.idle, case.stock(case.prompt))
    return near(found, case.rounding, f"logits of {case.tokens} tokens against transformers' own forward with SDPA")


@law("causal", "changing later tokens changes no logits before them")
def causal(case: Case) -> LawResult:
    """Change the last tokens: logits before them must not change, in any implementation of the forward."""
    kept = case.tokens - 4
    other = case.changed(case.prompt, range(kept, case.tokens))
    ways: dict[str, Callable[[Sequence[int]], Tensor]] = {
        "transformers' own forward": case.stock,
        "needlework, idle": lambda ids: case.subject.logits([ids]),
    }
    if case.anatomy.attention_layers:
        ways["needlework's own attention"] = lambda ids: case.subject.logits([ids], _HIDES_NOTHING)
    found = 0.0
    for way, read in ways.items():
        found = worst(found, case.distance(*(read(ids)[:, :kept] for ids in (case.prompt, other))))
        if not found <= case.rounding:
            return LawResult(False, f"{way}: tokens that come later change the logits before them", found, case.rounding)
    why = f"the last 4 of {case.tokens} tokens changed, logits before them stay, in {len(ways)} ways of reading"
    return LawResult(True, why, found, case.rounding)


@law("reached", "with heads and memory silenced, no token hears of another")
def reached(case: Case) -> LawResult:
    """Ablate attention and recurrence: no token may depend on another, or a mixing layer is not controlled."""
    anatomy = case.anatomy
    parts = {"ablate_attention()": anatomy.attention_layers, "ablate_recurrent()": anatomy.recurrent_layers}
    silent = parse(" + ".join(text for text, layers in parts.items() if layers) or "none")
    other = case.changed(case.prompt, range(case.tokens - 1))
    a, b = (case.subject.logits([ids], silent)[:, -1] for ids in (case.prompt, other))
    found = case.distance(a, b)
    if not found <= case.rounding and anatomy.no_mixer_reason:
        raise DoesNotApply(f"tokens hear of each other without attention: {anatomy.no_mixer_reason}")
    why = f"{silent}: all tokens before the last changed, its logits stay"
    return near(found, case.rounding, why, f"{silent}: tokens still hear of each other, so a layer is not under control")


@law("k = all", "keeping all heads is the identity")
def keeping_all_is_identity(case: Case) -> LawResult:
    case.need_heads()
    all_heads = parse("keep_heads(fraction=1.0)")
    acts = (all_heads, all_heads + _HIDES_NOTHING)
    found = worst(*(case.distance(case.subject.logits([case.prompt], act), case.idle) for act in acts))
    return near(found, case.rounding, "k = all against idle, also where needlework computes attention itself")


@law("k = 0", "keeping no head is ablating attention")
def keeping_none_is_ablation(case: Case) -> LawResult:
    """Keep no head: logits and the count of zeroed heads must equal those of ablate_attention()."""
    case.need_heads()
    acts = (parse("keep_heads(k=0)"), parse("ablate_attention()"))
    found = case.distance(*(case.subject.logits([case.prompt], act) for act in acts))
    a, b = (case.run([case.forced(act)])[0].receipt.total("heads_zeroed") for act in acts)
    if a != b:
        return LawResult(False, f"k = 0 zeroed {a} head outputs, ablate_attention() {b}", found, case.rounding)
    return near(found, case.rounding, f"k = 0 against ablate_attention(); both zeroed {a} head outputs")


@law("heads act", "silencing a layer's heads is counted and changes the answer")
def silencing_heads_acts(case: Case) -> LawResult:
    case.need_heads()
    heads = {layer.index: len(layer.heads) for layer in case.anatomy.attention_layers}
    return _each_layer_acts(case, "ablate_attention", "heads_zeroed", heads)


@law("memory acts", "cutting a layer's recurrent memory is counted and changes the answer")
def cutting_memory_acts(case: Case) -> LawResult:
    layers = [layer.index for layer in case.anatomy.recurrent_layers]
    if not layers:
        raise DoesNotApply(case.anatomy.no_mixer_reason or f"{case.anatomy.architecture} has no recurrent layers")
    return _each_layer_acts(case, "ablate_recurrent", "states_cut", dict.fromkeys(layers, 1))


def _each_layer_acts(case: Case, act: str, count: str, per_token: dict[int, int]) -> LawResult:
    """Ablate each layer alone: only its receipt counts, it counts every token, and log-probabilities change."""
    acts = [parse(f"{act}(layers=[{layer}])") for layer in per_token]
    idle, again, *acted = case.run([case.forced(), case.forced(), *map(case.forced, acts)])
    least = worst(_EFFECT, 3 * case.logprob_distance(idle, again))
    read = case.tokens + case.after - 1
    effects = {}
    for layer, answer in zip(per_token, acted, strict=True):
        counted, everywhere = answer.receipt.total(count, layer=layer), answer.receipt.total(count)
        passes = max(1, answer.receipt.total("positions", layer=layer) // read)  # some modules run several times per token
        expected = passes * read * per_token[layer]
        if counted != everywhere or counted != expected:
            return LawResult(False, f"layer {layer}: {count} is {counted} ({everywhere} in all), not {expected}")
        effects[layer] = case.logprob_distance(idle, answer)
        if math.isnan(effects[layer]):
            return LawResult(False, f"layer {layer}: the change of log-probabilities is NaN", effects[layer], least)
    weakest = min(effects, key=effects.__getitem__)
    if not effects[weakest] > least:
        why = f"layer {weakest}: the receipt says that it was silenced, but log-probabilities do not move"
        return LawResult(False, why, effects[weakest], least)
    why = f"each of {len(effects)} layers by itself moves log-probabilities, layer {weakest} least; receipts are whole"
    return LawResult(True, why, effects[weakest])


@law("decode", "tokens decoded one by one give the logits of one forward")
def decode_is_full_forward(case: Case) -> LawResult:
    stepwise = case.subject.logits([case.prompt], prompt_tokens=case.tokens // 2)
    drift = case.subject.body.family.drift_reason
    found = case.distance(stepwise, case.idle)
    why = f"{case.tokens - case.tokens // 2} tokens decoded one by one against one forward"
    known = f"{why}; this family's own drift: {drift}" if drift else why
    return near(found, case.between_routes, known)


@law("continued", "a prompt read in pieces is the prompt read at once")
def continued_is_one_shot(case: Case) -> LawResult:
    """Prefill a prompt in two parts, as for options and shared prefixes."""
    cut = case.tokens // 2
    start, rest = case.prompt[:cut], case.prompt[cut:]
    options = (rest, rest[: len(rest) // 2], case.sequence(3, seed=4))
    (answer,) = case.run([Request(start, options=options)])
    found = 0.0
    for option, logprobs in zip(options, answer.option_logprobs, strict=True):
        found = worst(found, case.distance_from_logits(logprobs, case.subject.logits([start + option])[0, cut - 1 : -1], option))
    body = case.subject.body
    how, long = "in two pieces", f"long prompts are read in chunks of {body.chunk:,} tokens"
    if not body.continues:
        how, long = "token by token after the first piece, as this model needs it", "long prompts are read in one piece"
    return near(found, case.between_routes, f"{case.tokens} tokens read {how} against one forward; {long}")


@law("forks", "rows that share a prompt do not mix")
def forked_rows_do_not_mix(case: Case) -> LawResult:
    """Decode rows that share one prefill, under several interventions and each with its own continuation."""
    of_heads = ("ablate_attention(phase='decode')", "keep_heads(1, phase='decode')", "limit_context(4, phase='decode')")
    texts = ["none", "none", *(of_heads if case.anatomy.attention_layers else ())]
    texts += ["ablate_recurrent(phase='decode')"] * bool(case.anatomy.recurrent_layers)
    requests = [case.forced(parse(text), after=case.sequence(case.after, seed=10 + i)) for i, text in enumerate(texts)]
    return _together_and_alone(case, requests, f"{len(texts)} rows forked from one prompt")


@law("batch", "a row of a batch is the request by itself")
def batch_is_single(case: Case) -> LawResult:
    lengths = (case.tokens, case.tokens - 5, case.tokens // 2)
    prompts = [case.prompt, *(case.sequence(count, seed=20 + count) for count in lengths)]
    few = parse("keep_heads(k=1)") if case.anatomy.attention_layers else NONE
    requests = [case.forced(few if i % 2 else NONE, prompt) for i, prompt in enumerate(prompts)]
    return _together_and_alone(case, requests, f"{len(requests)} requests of {len(set(lengths))} lengths")


def _together_and_alone(case: Case, requests: Sequence[Request], what: str) -> LawResult:
    """Compare answers and receipts of a batch with those of each request run alone."""
    found = 0.0
    for number, (request, answer) in enumerate(zip(requests, case.run(requests), strict=True)):
        (alone,) = case.run([request])
        if alone.receipt != answer.receipt:
            return LawResult(False, f"{what}: of request {number} ({request.intervention}) another receipt than by itself")
        found = worst(found, case.logprob_distance(answer, alone))
    return near(found, case.rounding, f"{what}: log-probabilities and receipts together against each by itself")


@law("greedy", "answers are the model's first choices")
def greedy(case: Case) -> LawResult:
    """Check that every generated token is the argmax given all tokens before it."""
    said = case.run([Request(case.prompt, max_new_tokens=2 * case.after)])[0].tokens
    ids, whose = case.prompt + said, "transformers' own forward"
    body = case.subject.body
    if case.half or body.streams or body.family.drift:  # prefill and decode may differ: compare with decode
        logits, whose = case.subject.logits([ids], prompt_tokens=case.tokens)[0, case.tokens - 1 : -1], "the same decode"
    else:
        logits = case.stock(ids)[0, case.tokens - 1 : -1]
    chosen = logits.gather(1, torch.tensor(said, device=logits.device)[:, None])[:, 0]
    behind = ((logits.max(-1).values - chosen) / case.spread).tolist()
    ties = sum(value > 0 for value in behind)
    why = f"{len(said)} tokens, each the first choice of {whose}" + (f"; {ties} of them near ties" if ties else "")
    return near(worst(*behind), case.between_routes, why, f"a token was said that is not the first choice of {whose}")


@law("window", "attention ends where the configuration says")
def window_edge(case: Case) -> LawResult:
    """Limit attention to the window: no key is hidden; to one key fewer: exactly one per query beyond the edge."""
    case.need_heads()
    case.need_full_heads()
    windows = {layer: part.window for layer, part in case.anatomy.attention_parts()}
    own = {window for window in windows.values() if window}
    if not own:
        raise DoesNotApply("no layer has a window: attention sees all tokens before it")
    tokens = max(own) + _PAST
    if tokens + case.after > case.most_tokens or min(own) < 2:
        raise DoesNotApply(f"the window of {max(own):,} tokens ends beyond the {case.most_tokens:,} that are read here")
    config = vars(case.subject.model.config.get_text_config(decoder=True))
    configured = {
        value
        for name, value in config.items()
        if name.endswith(("window_size", "window")) and isinstance(value, int) and not isinstance(value, bool)
    }
    if configured and not own <= configured:
        called, said = (", ".join(map(str, sorted(numbers))) for numbers in (own, configured))
        return LawResult(False, f"attention is called with windows of {called} keys, the configuration says {said}")
    ids = case.sequence(tokens + case.after)
    shown = {layer: window or tokens for layer, window in windows.items()}
    requests = []
    for less in (0, 1):  # keys that every layer sees fewer than its window
        act: Intervention = NONE
        for keys in sorted(set(shown.values())):
            layers = [layer for layer, window in shown.items() if window == keys]
            act = act + parse(f"limit_context({keys - less}, layers={layers}, phase='prefill')")
        requests.append(Request(ids[:tokens], act, forced=ids[tokens:], boundary="prefill"))
    whole, fewer = case.run(requests)
    for layer, window in shown.items():
        passes = whole.receipt.total("positions", "prefill", layer) // tokens  # some modules run several times per token
        for answer, limit, right in ((whole, window, 0), (fewer, window - 1, passes * (tokens - window + 1))):
            hidden = answer.receipt.total("keys_hidden", "prefill", layer)
            if hidden != right:
                words = f"layer {layer} shows {'more' if hidden > right else 'fewer'} than {window} keys"
                return LawResult(False, f"{words}: a limit of {limit} hid {hidden} pairs, not {right}")
    idle = case.subject.logits([ids])[0, tokens - 1 : -1]
    rows = case.run([case.forced(prompt=ids[:tokens], after=ids[tokens:]) for _ in range(2)])  # that share a prefill
    found = worst(*(case.distance_from_logits(answer.logprobs, idle, ids[tokens:]) for answer in (whole, *rows)))
    seen = " and ".join(sorted({f"{window} keys" if window else "all keys" for window in windows.values()}))
    why = f"layers show {seen}, as configured; {len(ids)} tokens read at once, with the limit, and decoded past the edge"
    return near(found, case.between_routes, why)


def sample(tokenizer: Any, chat: bool) -> Item:
    """Return a short needle-in-a-haystack sample as in experiments, with the needle in the middle."""
    if toy.is_toy(tokenizer):
        settings: dict[str, Any] = {"lengths": [64]}
    else:
        settings = {"lengths": [240], "reserve_tokens": 0, "style": "chat" if chat else "base"}
    task = make_task({"kind": "niah", "depths": [50], **settings})
    return next(iter(task.items(tokenizer, 0, None, None)))


@law("spans", "a needle's span is the needle, token by token")
def plain_spans(case: Case) -> LawResult:
    return _check_span(_tokenizer(case), chat=False)


@law("chat spans", "so it is inside the chat template")
def chat_spans(case: Case) -> LawResult:
    """Check that a chat prompt is what the chat template gives, and the needle's span in it."""
    tokenizer = _tokenizer(case)
    if not has_chat(tokenizer):
        raise DoesNotApply("the tokenizer has no chat template")
    if toy.is_toy(tokenizer):
        raise DoesNotApply("the toy language is asked in plain text")

    def in_template(content: str, tokens: bool) -> Any:
        turn = [{"role": "user", "content": content}]
        return tokenizer.apply_chat_template(turn, tokenize=tokens, add_generation_prompt=True)

    item = sample(tokenizer, chat=True)
    frame = str(in_template(MARKER, tokens=False)).split(MARKER)
    made = in_template(item.prompt_text.removeprefix(frame[0]).removesuffix(frame[-1]), tokens=True)
    expected, found = tuple(made["input_ids"] if hasattr(made, "keys") else made), item.prompt
    if expected != found and _decoded(tokenizer, expected) != _decoded(tokenizer, found):
        at = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), min(len(expected), len(found)))
        words = f"the prompt is not what the chat template gives: {_quoted(tokenizer, found, at, at + 3)} and not"
        return LawResult(False, f"{words} {_quoted(tokenizer, expected, at, at + 3)} at token {at}")
    return _check_span(tokenizer, chat=True)


def _tokenizer(case: Case) -> Any:
    """Return the tokenizer; raise DoesNotApply without one that knows the needle's words."""
    tokenizer = case.subject.tokenizer
    if tokenizer is None:
        raise DoesNotApply("there is no tokenizer")
    unknown = getattr(tokenizer, "unk_token_id", None)
    needle = fill_template(NEEDLE, key=KEY, value=VALUE)
    if not toy.is_toy(tokenizer) and unknown is not None and unknown in token_ids(tokenizer, needle):
        raise DoesNotApply("the tokenizer does not know the words of the built-in English needle")
    return tokenizer


def _check_span(tokenizer: Any, chat: bool) -> LawResult:
    """Compare the span of a sample's needle with where the needle is in the decoded text; a doubled BOS fails, too."""
    item = sample(tokenizer, chat)
    ((start, end),) = item.spans["needle"]
    ids = item.prompt
    parts = (
        ("begins", 0, min(3, start)),
        ("before", max(0, start - 3), start),
        ("needle", start, end),
        ("after", end, end + 3),
        ("ends", max(end, len(ids) - 6), len(ids)),
    )
    shown = tuple(f"{name:<7}{a:>4}: {_quoted(tokenizer, ids, a, b)}" for name, a, b in parts if b > a)
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is not None and ids[:2] == (bos, bos):
        return LawResult(False, "the prompt begins with BOS twice", shown=shown)
    if toy.is_toy(tokenizer):
        needle = _decoded(tokenizer, ids[start:end])
        words = f"tokens {start} to {end - 1} are {needle!r}, which holds the answer {item.target!r}"
        return LawResult(item.target in needle and needle in item.prompt_text, words, shown=shown)
    needle = fill_template(NEEDLE, key=KEY, value=VALUE)
    if needle not in _decoded(tokenizer, ids):  # a tokenizer that normalizes text, e.g. to lower case
        needle = _decoded(tokenizer, token_ids(tokenizer, needle))
    last = next((i for i in range(1, len(ids) + 1) if needle in _decoded(tokenizer, ids[:i])), None)
    if last is None:
        return LawResult(False, f"decoding the prompt does not give back the needle {needle!r}", shown=shown)
    found = next((i, last) for i in range(last - 1, -1, -1) if needle in _decoded(tokenizer, ids[i:last]))  # the shortest range
    if found != (start, end):
        words = f"the span is tokens {start} to {end - 1}, decoding finds the needle in {found[0]} to {found[1] - 1}"
        return LawResult(False, words, shown=shown)
    return LawResult(True, f"the needle is tokens {start} to {end - 1} of {len(ids)}, and decoding finds it there", shown=shown)


def _quoted(tokenizer: Any, ids: Sequence[int], start: int, end: int) -> str:
    return " ".join(repr(_decoded(tokenizer, [token], strip=False)) for token in ids[start:end])


def _decoded(tokenizer: Any, ids: Sequence[int], strip: bool = True) -> str:
    text = str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
    return text.strip() if strip else text


def doctor(
    subject: Subject,
    *,
    quick: bool = False,
    most_tokens: int | None = None,
    progress: bool = False,
    report: Progress = no_progress,
) -> Checkup:
    """Check the laws that all measurements rely on; return which hold, which fail and which do not apply.

    The model is left unchanged, also if a law fails.

    Args:
        quick: Use short prompts only, as `nw.run` does by default.
        most_tokens: Longest prompt (default 4,096, quick 256); sliding windows that end beyond it are not checked.
        progress: Show a progress bar.
        report: Called with the share of the laws that are checked.
    """
    from needlework import __version__

    longest = most_tokens or (QUICK_MOST_TOKENS if quick else MOST_TOKENS)
    tokens, after = (QUICK_TOKENS, QUICK_AFTER) if quick else (TOKENS, AFTER)
    if subject.anatomy.max_tokens is not None:
        longest = min(longest, subject.anatomy.max_tokens - 2 * AFTER)
    text: tuple[int, ...] = ()
    with suppress(Exception):  # the law of spans reports a tokenizer that fails
        text = sample(subject.tokenizer, chat=False).prompt
    case = Case(subject, min(tokens, longest), after, longest, text if max(text, default=0) < subject.anatomy.vocabulary else ())
    checks = []
    with Bar(len(LAWS), "laws", shown=progress) as bar:
        for name, (says, check) in LAWS.items():
            bar.show(name)
            start = time.perf_counter()
            try:
                found = check(case)
                outcome: Outcome = "pass" if found.holds else "fail"
            except DoesNotApply as reason:
                found, outcome = LawResult(False, str(reason)), "does not apply"
            except Exception as error:  # a law that raises is not shown to hold
                found, outcome = LawResult(False, (str(error) or type(error).__name__).splitlines()[0]), "fail"
            numbers = (found.measured, found.allowed, time.perf_counter() - start)
            checks.append(Check(name, says, outcome, found.why, *numbers, found.shown))
            bar.advance()
            report(bar.share)
    versions = {
        "needlework": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": str(subject.body.device),
        "dtype": str(subject.model.dtype).removeprefix("torch."),
        "kernels": subject.body.kernels,
    }
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Checkup(subject.anatomy.architecture, tuple(checks), versions, now, quick)
