"""Logit lens: what the model's own final norm and unembedding make of the residual stream after each layer.

The residual streams come from the observer of `nw.observe(hidden=True)`, under any intervention. The model reads them out itself
(`HookedModel.read_out`), so that after the last layer the lens gives the model's own logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch

from needlework.anatomy import Head
from needlework.errors import NeedleworkError, did_you_mean
from needlework.heads.samples import answer_tokens
from needlework.interventions.acts import Phase, Span
from needlework.interventions.base import NONE, Intervention, as_intervention
from needlework.measure import run_requests
from needlework.observation import HiddenState, StreamObserver, check_places, stream_depth
from needlework.requests import Request, check_tokens, stop_tokens
from needlework.stats import bootstrap_mean
from needlework.subject import Prompt, Subject
from needlework.tasks.base import Item

if TYPE_CHECKING:
    import pandas

LensValue = Literal["p", "rank"]
ENTRY = -1  # layer of what enters the first layer
_STATES_AT_ONCE = 128


@dataclass(frozen=True, eq=False)
class LogitLens:
    """Probability and rank of target tokens after each layer, at some tokens of some prompts.

    Attributes:
        model: The model's architecture.
        intervention: Text of the intervention.
        prompts: [states] index of the prompt of each state.
        phases: [states] "prefill" or "decode".
        positions: [states] position of the token that was read.
        labels: [states] this token as text, or its id.
        targets: Names of the targets.
        tokens: [prompts, targets] their token ids.
        layers: -1 for what enters the first layer, then the layers.
        log_p: [states, layers, targets] log-probability of each target.
        rank: [states, layers, targets] its rank; 1 is the most likely token.
        top: [states, layers] the most likely token as text, or its id.
    """

    model: str
    intervention: str
    prompts: np.ndarray
    phases: tuple[Phase, ...]
    positions: np.ndarray
    labels: tuple[str, ...]
    targets: tuple[str, ...]
    tokens: np.ndarray
    layers: tuple[int, ...]
    log_p: np.ndarray
    rank: np.ndarray
    top: np.ndarray

    def frame(self) -> pandas.DataFrame:
        """Return one row per state, layer and target."""
        import pandas

        states, layers, targets = (axis.ravel() for axis in np.indices(self.log_p.shape))
        return pandas.DataFrame(
            {
                "prompt": self.prompts[states],
                "phase": np.array(self.phases)[states],
                "position": self.positions[states],
                "token": np.array(self.labels)[states],
                "layer": np.array(self.layers)[layers],
                "target": np.array(self.targets)[targets],
                "p": np.exp(self.log_p.ravel()),
                "rank": self.rank.ravel(),
                "top": self.top[states, layers],
            }
        )

    def table(self) -> pandas.DataFrame:
        """Return one row per layer and target: mean probability over prompts with its 95 % interval, and median rank."""
        import pandas

        clusters = [str(prompt) for prompt in self.prompts]
        rows = []
        for t, target in enumerate(self.targets):
            for i, layer in enumerate(self.layers):
                p = bootstrap_mean(np.exp(self.log_p[:, i, t]), clusters)
                rows.append((layer, target, p.value, p.low, p.high, float(np.median(self.rank[:, i, t])), p.n))
        return pandas.DataFrame(rows, columns=["layer", "target", "p", "low", "high", "rank", "n"])

    def plot(self, ax: Any = None, *, of: LensValue = "p", target: str | None = None) -> Any:
        """Draw a value by layer, and return the matplotlib axes.

        A line for each target with the interval of its mean over prompts or, for several tokens of one prompt, a heat map of
        layers by tokens of one target (by default the first).
        """
        from needlework.plots import draw_head_map, head_axes, new_axes

        if of not in get_args(LensValue):
            raise NeedleworkError(f"a logit lens has no {of!r}; {did_you_mean(of, get_args(LensValue))}")
        if target is not None and target not in self.targets:
            raise NeedleworkError(f"{target!r} is no target of this lens; {did_you_mean(target, self.targets)}")
        shown = self.targets if target is None else (target,)
        if len(self.prompts) > 1 and len(set(self.prompts)) == 1:
            t = self.targets.index(shown[0])
            values = (np.exp(self.log_p) if of == "p" else self.rank)[:, :, t]
            cells = {Head(self.layers[i], s): float(values[s, i]) for s, i in np.ndindex(values.shape)}
            ax = head_axes(ax, cells)
            draw_head_map(ax, cells)
            ax.set_xticks(range(len(self.labels)), self.labels, rotation=90, fontsize=7)
            ax.set(xlabel="token", title=f"{of} of {shown[0]} after each layer, {self.intervention}")
            return ax
        ax, table = new_axes(ax, 5.0, 3.2), self.table()
        for name in shown:
            rows = table[table["target"] == name]
            (line,) = ax.plot(rows["layer"], rows[of], marker="o", markersize=3, label=name)
            if of == "p":
                ax.fill_between(rows["layer"], rows["low"], rows["high"], color=line.get_color(), alpha=0.2, linewidth=0)
        ax.set(xlabel="layer (-1: before the first)", ylabel="mean probability" if of == "p" else "median rank")
        ax.set_title(f"logit lens, {self.intervention}", fontsize=10)
        ax.legend(frameon=False)
        return ax

    def __str__(self) -> str:
        return f"logit lens of {self.model}, {len(self.prompts)} states of {len(set(self.prompts))} prompts, {self.intervention}"

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        from needlework.tables import Table

        return Table.from_frame(self.table(), str(self)).to_html()


def logit_lens(
    subject: Subject,
    prompts: Prompt | Item | Sequence[Prompt | Item],
    intervention: Intervention | str = NONE,
    *,
    targets: Sequence[str | int] | Mapping[str, Sequence[str | int]] | None = None,
    at: str | int | Sequence[str | int] = "last",
    spans: Sequence[Mapping[str, Span]] | None = None,
    max_new_tokens: int = 1,
) -> LogitLens:
    """Return the probability and rank of target tokens after each layer, read from the residual stream under an intervention.

    Args:
        prompts: Texts, token ids or Items; or one of them.
        targets: Texts (of which the first token counts) or token ids; or a mapping from names to lists with one for each prompt.
            By default the answers of Items, and for other prompts the token that the untouched model gives.
        at: The tokens after which is looked: "last" (of the prompt), "all", "prefill", "decode" (tokens that are generated and
            read, with `max_new_tokens`), positions from 0, names of spans, or a list of these.
        spans: Named token ranges of each prompt; Items have their own.
        max_new_tokens: How many tokens are generated.
    """
    act = as_intervention(intervention)
    one_prompt = isinstance(prompts, (str, Item)) or (len(prompts) > 0 and isinstance(prompts[0], int))
    asked: list[Any] = [prompts] if one_prompt else list(prompts)  # type: ignore[arg-type]
    if not asked:
        raise NeedleworkError("logit_lens: give at least one prompt: a text, token ids or an Item")
    if spans is not None and len(spans) != len(asked):
        raise NeedleworkError(f"logit_lens: {len(asked)} prompts and {len(spans)} mappings of spans; give one for each")
    places = [at] if isinstance(at, (str, int)) else list(at)
    check_places(places)
    ends = stop_tokens(getattr(subject.model.generation_config, "eos_token_id", None))
    requests = []
    for given, named in zip(asked, spans or [{}] * len(asked), strict=True):
        tokens, own = (given.prompt, given.spans) if isinstance(given, Item) else (subject.encode(given), {})
        requests.append(Request(tokens, act, max_new_tokens, ends, {**own, **named}))
    names, wanted = _targets(subject, asked, requests, targets)
    observer = StreamObserver(stream_depth(subject), None if "all" in places else places)
    with subject.body.observed_by(observer):
        answers = run_requests(subject, requests)
    by_prompt: dict[int, dict[int, HiddenState]] = {}
    for state in observer.hidden:
        by_prompt.setdefault(state.sample, {}).setdefault(state.position, state)
    states = [(i, state) for i, one in enumerate(requests) for _, state in sorted(by_prompt.get(one.key, {}).items())]
    if not states:
        raise NeedleworkError(f"logit_lens: at={at!r} names no token that is read; choose 'last', 'all' or max_new_tokens=2")
    rows = np.array([i for i, _ in states])
    read = [(*one.prompt, *answer.tokens) for one, answer in zip(requests, answers, strict=True)]
    log_p, rank, top = _read_out(subject, [state for _, state in states], wanted[rows])
    return LogitLens(
        subject.anatomy.architecture,
        str(act),
        rows,
        tuple(state.phase for _, state in states),
        np.array([state.position for _, state in states]),
        tuple(_shown(subject, read[i][state.position]) for i, state in states),
        names,
        wanted,
        tuple(range(ENTRY, len(subject.anatomy.layers))),
        log_p,
        rank,
        np.vectorize(partial(_shown, subject), otypes=[object])(top),
    )


def _targets(
    subject: Subject, prompts: Sequence[Prompt | Item], requests: Sequence[Request], targets: Any
) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the names of the targets, and their token ids [prompts, targets]."""
    if targets is None:
        said = run_requests(subject, [replace(one, intervention=NONE, max_new_tokens=1) for one in requests])
        firsts = [
            answer_tokens(subject, x)[0] if isinstance(x, Item) and (x.target or x.options) else answer.tokens[0]
            for x, answer in zip(prompts, said, strict=True)
        ]
        return ("answer",), np.array(firsts)[:, None]
    if isinstance(targets, (str, int)) or not len(targets):
        raise NeedleworkError(f"logit_lens: targets={targets!r} must be a list of texts or token ids with at least one")
    named = targets if isinstance(targets, Mapping) else {str(target): [target] * len(prompts) for target in targets}
    columns = []
    for name, given in named.items():
        if isinstance(given, (str, int)) or len(given) != len(prompts):
            raise NeedleworkError(
                f"logit_lens: targets[{name!r}] must be a list with one token for each of {len(prompts)} prompts"
            )
        tokens = [(one,) if isinstance(one, int) else subject.encode(one, continuation=True)[:1] for one in given]
        for token in tokens:
            check_tokens(token, subject.anatomy, f"logit_lens: target {name!r}")
        columns.append([token for (token,) in tokens])
    return tuple(named), np.array(columns).T


def _read_out(subject: Subject, states: Sequence[HiddenState], tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return log-probability and rank of tokens [states, targets] after each layer, and the most likely token."""
    streams = torch.stack([state.layers for state in states])  # [states, layers, ...]
    depth = streams.shape[1]
    wanted = torch.as_tensor(tokens).repeat_interleave(depth, 0)
    parts = []
    with subject.body.session():
        for start in range(0, len(wanted), _STATES_AT_ONCE):
            some = slice(start, start + _STATES_AT_ONCE)
            log_p = subject.body.read_out(streams.flatten(0, 1)[some].to(subject.body.device)).log_softmax(-1).cpu()
            own = log_p.gather(1, wanted[some])
            rank = 1 + (log_p[:, None] > own[..., None]).sum(-1)
            parts.append((own.numpy(), rank.numpy(), log_p.argmax(-1).numpy()))
    values, ranks, top = (np.concatenate(column) for column in zip(*parts, strict=True))
    return values.reshape(len(states), depth, -1), ranks.reshape(len(states), depth, -1), top.reshape(len(states), depth)


def _shown(subject: Subject, token: int) -> str:
    """Return a token as text, or its id if there is no tokenizer."""
    return str(token) if subject.tokenizer is None else repr(subject.tokenizer.decode([int(token)]))[1:-1]
