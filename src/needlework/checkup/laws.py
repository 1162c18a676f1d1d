"""The laws, one function each: what must hold on any model, tried on this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from needlework.checkup.case import Case, DoesNotApply, Finding, near, worst
from needlework.checkup.window import window_edge
from needlework.interventions.base import NONE, Intervention
from needlework.interventions.text import parse
from needlework.requests import Answer, Request

_EFFECT = 1e-5  # standard deviations: what an act moves at least, if it acts at all
_NO_HEADS, _NO_MEMORY = parse("ablate_attention()"), parse("ablate_recurrent()")
_HIDES_NOTHING = parse(f"limit_context({1 << 30})")  # makes attention go needlework's own way, and changes nothing


def idle_is_stock(case: Case) -> Finding:
    case.need_full_heads()
    found = case.apart(case.idle, case.stock(case.prompt))
    return near(found, case.rounding, f"logits of {case.tokens} tokens against transformers' own forward with SDPA")


def causal(case: Case) -> Finding:
    """Later tokens are changed: nothing before them may move, however the prompt is read."""
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
        found = worst(found, case.apart(*(read(ids)[:, :kept] for ids in (case.prompt, other))))
        if not found <= case.rounding:
            return Finding(False, f"{way}: tokens that come later change the logits before them", found, case.rounding)
    why = f"the last 4 of {case.tokens} tokens changed, logits before them stay, in {len(ways)} ways of reading"
    return Finding(True, why, found, case.rounding)


def reached(case: Case) -> Finding:
    """With heads and memory silenced, no token may hear of another: a part that needlework does not reach would tell it."""
    anatomy = case.anatomy
    silent: Intervention = NONE
    if anatomy.attention_layers:
        silent = silent + _NO_HEADS
    if anatomy.recurrent_layers:
        silent = silent + _NO_MEMORY
    other = case.changed(case.prompt, range(case.tokens - 1))
    a, b = (case.subject.logits([ids], silent)[:, -1] for ids in (case.prompt, other))
    found = case.apart(a, b)
    if not found <= case.rounding and anatomy.no_mixer_reason:
        raise DoesNotApply(f"tokens hear of each other without attention: {anatomy.no_mixer_reason}")
    why = f"{silent}: all tokens before the last changed, its logits stay"
    return near(found, case.rounding, why, f"{silent}: tokens still hear of each other, so a layer is not under control")


def keeping_all_is_identity(case: Case) -> Finding:
    case.need_heads()
    all_heads = parse("keep_heads(fraction=1.0)")
    acts = (all_heads, all_heads + _HIDES_NOTHING)
    found = max(case.apart(case.subject.logits([case.prompt], act), case.idle) for act in acts)
    return near(found, case.rounding, "k = all against idle, also where needlework computes attention itself")


def keeping_none_is_ablation(case: Case) -> Finding:
    case.need_heads()
    none, ablated = parse("keep_heads(k=0)"), _NO_HEADS
    found = case.apart(*(case.subject.logits([case.prompt], act) for act in (none, ablated)))
    a, b = (case.ask([case.forced(act)])[0].receipt.total("heads_zeroed") for act in (none, ablated))
    if a != b:
        return Finding(False, f"k = 0 zeroed {a} head outputs, ablate_attention() {b}", found, case.rounding)
    return near(found, case.rounding, f"k = 0 against ablate_attention(); both zeroed {a} head outputs")


def silencing_heads_acts(case: Case) -> Finding:
    case.need_heads()
    layers = {layer.index: len(layer.heads) for layer in case.anatomy.attention_layers}
    return _each_layer_acts(
        case, [parse(f"ablate_attention(layers=[{i}])") for i in layers], list(layers), "heads_zeroed", layers
    )


def cutting_memory_acts(case: Case) -> Finding:
    layers = [layer.index for layer in case.anatomy.recurrent_layers]
    if not layers:
        why = case.anatomy.no_mixer_reason or f"{case.anatomy.architecture} has no recurrent layers"
        raise DoesNotApply(why)
    return _each_layer_acts(
        case, [parse(f"ablate_recurrent(layers=[{i}])") for i in layers], layers, "states_cut", dict.fromkeys(layers, 1)
    )


def _each_layer_acts(
    case: Case, acts: Sequence[Intervention], layers: Sequence[int], count: str, per_token: dict[int, int]
) -> Finding:
    """Each layer by itself: its receipt counts every token, no other layer's counts any, and log-probabilities move."""
    idle, again, *acted = case.ask([case.forced(), case.forced(), *map(case.forced, acts)])
    least = max(_EFFECT, 3 * case.logprobs_apart(idle, again))
    read = case.tokens + case.after - 1
    effects = {}
    for layer, answer in zip(layers, acted, strict=True):
        counted, everywhere = answer.receipt.total(count, layer=layer), answer.receipt.total(count)
        passes = max(1, answer.receipt.total("positions", layer=layer) // read)  # some modules run several times a token
        if counted != everywhere or counted != passes * read * per_token[layer]:
            return Finding(
                False, f"layer {layer}: {count} is {counted} ({everywhere} in all), not {passes * read * per_token[layer]}"
            )
        effects[layer] = case.logprobs_apart(idle, answer)
    weakest = min(effects, key=effects.__getitem__)
    if not effects[weakest] > least:
        why = f"layer {weakest}: the receipt says that it was silenced, but log-probabilities do not move"
        return Finding(False, why, effects[weakest], least)
    why = f"each of {len(layers)} layers by itself moves log-probabilities, layer {weakest} least; receipts are whole"
    return Finding(True, why, effects[weakest])


def decode_is_full_forward(case: Case) -> Finding:
    stepwise = case.subject.logits([case.prompt], prompt_tokens=case.tokens // 2)
    drift = case.subject.body.family.drift_reason
    found = case.apart(stepwise, case.idle)
    why = f"{case.tokens - case.tokens // 2} tokens decoded one by one against one forward"
    known = f"{why}; this family's own drift: {drift}" if drift else why
    return near(found, case.between_routes, known)


def continued_is_one_shot(case: Case) -> Finding:
    """A prompt read in two parts, as options and shared beginnings are."""
    cut = case.tokens // 2
    start, rest = case.prompt[:cut], case.prompt[cut:]
    options = (rest, rest[: len(rest) // 2], case.sequence(3, seed=4))
    (answer,) = case.ask([Request(start, options=options)])
    found = 0.0
    for option, logprobs in zip(options, answer.option_logprobs, strict=True):
        found = worst(found, case.follows(logprobs, case.subject.logits([start + option])[0, cut - 1 : -1], option))
    body = case.subject.body
    how, long = "in two pieces", f"long prompts are read in chunks of {body.chunk:,} tokens"
    if not body.continues:
        how, long = "token by token after the first piece, as this model needs it", "long prompts are read in one piece"
    return near(found, case.between_routes, f"{case.tokens} tokens read {how} against one forward; {long}")


def forked_rows_do_not_mix(case: Case) -> Finding:
    """Rows that share one reading of a prompt, each under something else and each saying something else."""
    acts: list[Intervention] = [NONE, NONE]
    if case.anatomy.attention_layers:
        acts += map(
            parse, ("ablate_attention(phase='decode')", "keep_heads(1, phase='decode')", "limit_context(4, phase='decode')")
        )
    if case.anatomy.recurrent_layers:
        acts.append(parse("ablate_recurrent(phase='decode')"))
    requests = [case.forced(act, after=case.sequence(case.after, seed=10 + i)) for i, act in enumerate(acts)]
    return _together_and_alone(case, requests, f"{len(acts)} rows forked from one prompt")


def batch_is_single(case: Case) -> Finding:
    """Prompts of several lengths and contents in one batch, some of them with something done to them."""
    lengths = (case.tokens, case.tokens - 5, case.tokens // 2)
    prompts = [case.prompt, *(case.sequence(count, seed=20 + count) for count in lengths)]
    few = parse("keep_heads(k=1)") if case.anatomy.attention_layers else NONE
    requests = [case.forced(few if i % 2 else NONE, prompt) for i, prompt in enumerate(prompts)]
    return _together_and_alone(case, requests, f"{len(requests)} requests of {len(set(lengths))} lengths")


def _together_and_alone(case: Case, requests: Sequence[Request], what: str) -> Finding:
    found = 0.0
    for number, (request, answer) in enumerate(zip(requests, case.ask(requests), strict=True)):
        alone: Answer = case.ask([request])[0]
        if alone.receipt != answer.receipt:
            return Finding(False, f"{what}: of request {number} ({request.intervention}) another receipt than by itself")
        found = worst(found, case.logprobs_apart(answer, alone))
    return near(found, case.rounding, f"{what}: log-probabilities and receipts together against each by itself")


def greedy(case: Case) -> Finding:
    """Every token that is said is the first choice, given all that was said before."""
    said = case.ask([Request(case.prompt, max_new_tokens=2 * case.after)])[0].tokens
    ids, whose = case.prompt + said, "transformers' own forward"
    if case.half or case.subject.body.streams:  # the two ways of reading may disagree there, so the way that was gone is asked
        logits, whose = case.subject.logits([ids], prompt_tokens=case.tokens)[0, case.tokens - 1 : -1], "the same decode"
    else:
        logits = case.stock(ids)[0, case.tokens - 1 : -1]
    chosen = logits.gather(1, torch.tensor(said, device=logits.device)[:, None])[:, 0]
    behind = ((logits.max(-1).values - chosen) / case.spread).tolist()
    ties = sum(value > 0 for value in behind)
    why = f"{len(said)} tokens, each the first choice of {whose}" + (f"; {ties} of them near ties" if ties else "")
    return near(worst(*behind), case.between_routes, why, f"a token was said that is not the first choice of {whose}")


LAWS: dict[str, tuple[str, Callable[[Case], Finding]]] = {
    "idle is stock": ("with nothing done, logits are those of transformers", idle_is_stock),
    "causal": ("changing later tokens changes no logits before them", causal),
    "reached": ("with heads and memory silenced, no token hears of another", reached),
    "k = all": ("keeping all heads is the identity", keeping_all_is_identity),
    "k = 0": ("keeping no head is ablating attention", keeping_none_is_ablation),
    "heads act": ("silencing a layer's heads is counted and changes the answer", silencing_heads_acts),
    "memory acts": ("cutting a layer's recurrent memory is counted and changes the answer", cutting_memory_acts),
    "decode": ("tokens decoded one by one give the logits of one forward", decode_is_full_forward),
    "continued": ("a prompt read in pieces is the prompt read at once", continued_is_one_shot),
    "forks": ("rows that share a prompt do not mix", forked_rows_do_not_mix),
    "batch": ("a row of a batch is the request by itself", batch_is_single),
    "window": ("attention ends where the configuration says", window_edge),
    "greedy": ("answers are the model's first choices", greedy),
}
