"""Effective attention of recurrent mixers: what each token contributes to each later output, exactly.

Given its gates, a mixer's recurrence is linear in its values: output_i = sum_j c_ij with c_ij = W_ij * value_j, for j <= i.
The output is that of the recurrence (with its skip term), before the mixer's output gate, norm and projection.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from needlework.anatomy import Anatomy, Group, Head
from needlework.errors import NeedleworkError, did_you_mean
from needlework.interventions.acts import LoweringContext, Span
from needlework.model.hooked_model import Rows
from needlework.model.memory import Mixer
from needlework.model.scans import ConvolutionCall, ScanCall, impulse_responses, intercepted
from needlework.plots import draw_head_map, head_axes, new_axes
from needlework.receipts import Tally
from needlework.requests import check_tokens
from needlework.stats import Floats, bootstrap_mean
from needlework.tables import Table

if TYPE_CHECKING:
    import pandas

    from needlework.subject import Prompt, Subject

Site = Literal["state", "conv", "memory"]
Measure = Literal["mass", "share"]
MOST_BYTES = 2**31  # of the contributions of one prompt
NEEDLE = "needle"


@dataclass(frozen=True, eq=False)
class LayerContributions:
    """What each token contributes to each output of one mixer, for one prompt.

    Attributes:
        layer: The model's own layer index.
        site: "state": of the recurrence, per token of its inputs; "conv": of the short convolution before any activation;
            "memory": of both together.
        kind: What the recurrence is, e.g. "Mamba-2", or "short convolution".
        weights: Tensor [query, source, channels]; the contribution of a source is its weight times its value.
        values: Tensor [source, channels] of what each token writes.
        constant: Tensor [query, channels] of what the output owes to no token (a convolution's bias); None: nothing.
        groups: Number of groups, equal slices of the channels.
    """

    layer: int
    site: Site
    kind: str
    weights: Tensor
    values: Tensor
    constant: Tensor | None
    groups: int

    @cached_property
    def vectors(self) -> Tensor:
        """The contributions c_ij, [query, source, channels]; 0 where the source comes after the query."""
        return self.weights * self.values

    @property
    def output(self) -> Tensor:
        """The sum of the contributions of all tokens and of the constant, [query, channels]: the mixer's own output."""
        total = self.vectors.sum(1)
        return total if self.constant is None else total + self.constant

    def measured(self, how: Measure = "mass") -> Tensor:
        """Return how much of each group's output is owed to each source: [groups, query, source], summing to 1 over sources.

        "mass" is the projection on the sum of all contributions, <c_ij, o_i> / <o_i, o_i>, which may be negative or above 1.
        "share" is the norm |c_ij| over the sum of all norms, which does not know whether contributions cancel.
        """
        by_group = self.vectors.view(*self.vectors.shape[:2], self.groups, -1)  # [query, source, groups, width]
        if how == "share":
            size = by_group.norm(dim=-1)
        else:
            size = (by_group * by_group.sum(1, keepdim=True)).sum(-1)
        total = size.sum(1, keepdim=True)
        return torch.where(total > 0, size / total.clamp_min(torch.finfo(size.dtype).tiny), 0.0).permute(2, 0, 1)


@dataclass(frozen=True, eq=False)
class RecurrentContributions:
    """What each token of one prompt contributes to the outputs of the recurrent mixers at each later token.

    Attributes:
        tokens: Token ids of the prompt.
        labels: Its tokens as text, or their ids.
        layers: The contributions in each layer, in the order of the model.
        spans: Named token ranges of the prompt.
    """

    tokens: tuple[int, ...]
    labels: tuple[str, ...]
    layers: tuple[LayerContributions, ...]
    spans: Mapping[str, Span] = field(default_factory=dict)

    def __getitem__(self, layer: int) -> LayerContributions:
        """Return the contributions in the layer of this index."""
        found = {part.layer: part for part in self.layers}
        if layer not in found:
            raise NeedleworkError(f"there are contributions of layers {sorted(found)}, not of {layer}")
        return found[layer]

    def frame(self) -> pandas.DataFrame:
        """Return one row per layer, group, query and source, with mass and share; sources after the query are left out."""
        import pandas

        queries, sources = np.tril_indices(len(self.tokens))
        parts = []
        for part in self.layers:
            mass, share = (part.measured(how).cpu().numpy()[:, queries, sources] for how in get_args(Measure))
            for group in range(part.groups):
                columns = {"query": queries, "source": sources, "mass": mass[group], "share": share[group]}
                parts.append(pandas.DataFrame({"layer": part.layer, "group": group, **columns}))
        return pandas.concat(parts, ignore_index=True)

    def plot(self, layer: int, group: int = 0, ax: Any = None, *, of: Measure = "mass") -> Any:
        """Draw how much one group's output at each token owes to each source as a heat map, and return the matplotlib axes."""
        part = self[layer]
        if not 0 <= group < part.groups:
            raise NeedleworkError(f"layer {layer} has groups 0 to {part.groups - 1}, not {group}")
        count = len(self.tokens)
        ax = new_axes(ax, 2.0 + 0.14 * min(count, 60), 1.6 + 0.14 * min(count, 60))
        cells = part.measured(_checked(of))[group].cpu().numpy()
        image = ax.imshow(np.where(np.tri(count, dtype=bool), cells, np.nan), cmap="RdBu_r", vmin=-1, vmax=1)
        step = max(1, count // 60)
        for axis in (ax.set_xticks, ax.set_yticks):
            axis(range(0, count, step), self.labels[::step], fontsize=6)
        ax.tick_params(axis="x", rotation=90)
        ax.set(xlabel="source", ylabel="query", title=f"layer {layer}, group {group} ({part.kind}): {of}")
        ax.figure.colorbar(image, ax=ax, shrink=0.8)
        return ax

    def _repr_html_(self) -> str:
        columns = ["layer", "site", "kind", "groups", "channels"]
        rows = [[str(getattr(x, name)) for name in columns[:-1]] + [str(x.values.shape[1])] for x in self.layers]
        return Table(columns, rows, f"contributions of {len(self.tokens)} tokens; .plot(layer, group) shows one group").to_html()


@dataclass(frozen=True, eq=False)
class RecurrentMass:
    """How much of each recurrent group's output is owed to a span, over many prompts.

    Attributes:
        span: The span that contributions are summed over.
        at: The tokens whose outputs are looked at: "last", or the name of a span.
        groups: All groups that were observed.
        masses: [prompts, groups] summed mass of the span (see `LayerContributions.measured`).
        shares: [prompts, groups] its summed share of the norms.
        even: [prompts] the share of the span if all visible tokens contributed alike.
    """

    span: str
    at: str
    groups: tuple[Group, ...]
    masses: Floats
    shares: Floats
    even: Floats

    def frame(self) -> pandas.DataFrame:
        """Return one row per group, largest mean mass first, with 95 % bootstrap intervals of the mass over prompts."""
        import pandas

        prompts = [str(i) for i in range(len(self.masses))]
        rows = []
        for i, group in enumerate(self.groups):
            mean = bootstrap_mean(self.masses[:, i], prompts)
            rows.append((*group, mean.value, mean.low, mean.high, self.shares[:, i].mean(), self.even.mean(), len(prompts)))
        columns = ["layer", "group", "mass", "low", "high", "share", "even", "prompts"]
        return pandas.DataFrame(rows, columns=columns).sort_values("mass", ascending=False, ignore_index=True)

    def plot(self, ax: Any = None, *, of: Measure = "mass") -> Any:
        """Draw the mean mass (or share) of the span as a heat map of layers by groups, and return the matplotlib axes."""
        means = (self.masses if _checked(of) == "mass" else self.shares).mean(0)
        values = {Head(*group): float(mean) for group, mean in zip(self.groups, means, strict=True)}
        ax = head_axes(ax, values)
        draw_head_map(ax, values)
        ax.set(xlabel="group", title=f"{of} of {self.span!r} in the output at {self.at!r}")
        return ax

    def _repr_html_(self) -> str:
        return Table.from_frame(self.frame(), f"what {self.at!r} owes to {self.span!r} in recurrent groups", most=10).to_html()


def recurrent_contributions(
    subject: Subject,
    prompt: Prompt,
    *,
    layers: Collection[int] | None = None,
    site: Site | None = None,
    spans: Mapping[str, Span] | None = None,
) -> RecurrentContributions:
    """Return what each token of a prompt contributes to the outputs of recurrent mixers at each later token, exactly.

    Args:
        prompt: A text or token ids.
        layers: Layers by the model's own index; None: all recurrent layers.
        site: "state": contributions through the recurrence; a source is a token of its inputs, after the short convolution.
            "conv": contributions to the convolution's output, before its activation. "memory": through both, where nothing
            lies between them (RG-LRU); a source is a token of the prompt. None: "state", or "conv" for mixers without a state.
        spans: Named token ranges, kept with the result.

    Raises:
        NeedleworkError: A mixer is not known to be linear in its values, or has no such part; the message says which.
    """
    tokens = subject.encode(prompt)
    sites = _sites(subject.anatomy, layers, site)
    width = {mixer.layer: getattr(mixer.output, "in_features", 0) for mixer in subject.body.mixers}
    if 8 * len(tokens) ** 2 * sum(width[layer] for layer in sites) > MOST_BYTES:
        raise NeedleworkError(
            f"the contributions of {len(tokens)} tokens in {len(sites)} layers take more than {MOST_BYTES >> 30} GiB; choose"
            " fewer layers, a shorter prompt, or recurrent_mass, which keeps sums only"
        )
    found: list[LayerContributions] = []
    _read(subject, tokens, sites, found.append)
    decode = getattr(subject.tokenizer, "decode", None)
    labels = tuple(str(token) if decode is None else repr(decode([token]))[1:-1] for token in tokens)
    return RecurrentContributions(tokens, labels, tuple(sorted(found, key=lambda part: part.layer)), spans or {})


def recurrent_mass(
    subject: Subject,
    prompts: Sequence[Prompt],
    spans: Sequence[Mapping[str, Span]],
    *,
    span: str = NEEDLE,
    at: str = "last",
    layers: Collection[int] | None = None,
    site: Site | None = None,
) -> RecurrentMass:
    """Measure how much of each recurrent group's output is owed to a span of each prompt.

    Args:
        spans: Named token ranges of each prompt.
        span: The span that contributions are summed over.
        at: The tokens whose outputs are looked at: "last" (the last token of the prompt), or the name of a span.
        layers, site: As in `recurrent_contributions`.
    """
    if not prompts or len(prompts) != len(spans):
        raise NeedleworkError(f"recurrent_mass: {len(prompts)} prompts and {len(spans)} mappings of spans; give one for each")
    sites = _sites(subject.anatomy, layers, site)
    rows: dict[Measure, list[list[float]]] = {"mass": [], "share": []}
    even, groups = [], []
    for prompt, named in zip(prompts, spans, strict=True):
        tokens = subject.encode(prompt)
        context = LoweringContext(subject.anatomy, len(tokens), named)
        sources = list(context.positions(span))
        queries = [len(tokens) - 1] if at == "last" else list(context.positions(at))
        sums: dict[int, dict[Measure, list[float]]] = {}

        def add(part: LayerContributions, sums: Any = sums, queries: Any = queries, sources: Any = sources) -> None:
            picked = {how: part.measured(how)[:, queries][:, :, sources].sum(2).mean(1) for how in rows}
            sums[part.layer] = {how: values.tolist() for how, values in picked.items()}

        _read(subject, tokens, sites, add)
        even.append(np.mean([sum(source <= query for source in sources) / (query + 1) for query in queries]))
        groups = [Group(layer, i) for layer in sorted(sums) for i in range(len(sums[layer]["mass"]))]
        for how, row in rows.items():
            row.append([value for layer in sorted(sums) for value in sums[layer][how]])
    return RecurrentMass(span, at, tuple(groups), np.array(rows["mass"]), np.array(rows["share"]), np.array(even))


def _checked(of: Measure) -> Measure:
    if of not in get_args(Measure):
        raise NeedleworkError(f"contributions have no {of!r}; {did_you_mean(of, get_args(Measure))}")
    return of


def _sites(anatomy: Anatomy, layers: Collection[int] | None, site: Site | None) -> dict[int, Site]:
    """Return the site of each layer; raise if a layer or site does not exist, or is not known to be linear."""
    parts = dict(anatomy.recurrent_parts())
    if not parts:
        why = anatomy.no_mixer_reason or "it has no separate recurrent layers"
        raise NeedleworkError(f"{anatomy.architecture} has no recurrent mixers whose contributions could be told apart: {why}")
    if site not in (None, *get_args(Site)):
        raise NeedleworkError(f"site={site!r} is not known; {did_you_mean(str(site), get_args(Site))}")
    if unknown := sorted(set(parts if layers is None else layers) - set(parts)):
        raise NeedleworkError(f"layers {unknown} are no recurrent layers of {anatomy.architecture}; choose from {sorted(parts)}")
    chosen: dict[int, Site] = {}
    for layer in parts if layers is None else sorted(set(layers)):
        part = parts[layer]
        chosen[layer] = site or ("state" if part.carries_state else "conv")
        which = f"layer {layer} ({part.mixer})"
        if chosen[layer] == "conv" and not part.taps:
            raise NeedleworkError(f"{which} has no short convolution of its own; use site='state'")
        if chosen[layer] != "conv" and not part.carries_state:
            raise NeedleworkError(f"{which} has no recurrent state; use site='conv'")
        if chosen[layer] != "conv" and not part.recurrence:
            raise NeedleworkError(f"{which}: its recurrence is not known to be linear in what tokens write into its state")
        if chosen[layer] == "memory" and part.recurrence != "RG-LRU":
            raise NeedleworkError(
                f"{which}: an activation lies between its convolution and its recurrence, or it has no convolution, so that"
                " no token's share of both is defined; use site='state' or site='conv'"
            )
    return chosen


def _tap_weights(call: ConvolutionCall) -> Tensor:
    """Return a convolution as weights [query, source, channels]."""
    lag = torch.arange(call.tokens, device=call.weight.device)
    lag = lag[:, None] - lag
    taps = call.weight.shape[-1]
    weights = call.weight.T.flip(0)[lag.clamp(0, taps - 1)]  # lag 0 is the last tap
    return weights * ((lag >= 0) & (lag < taps))[..., None]


def _read(
    subject: Subject, tokens: tuple[int, ...], sites: Mapping[int, Site], found: Callable[[LayerContributions], Any]
) -> None:
    """Read a prompt and pass the contributions in each layer to a function, as soon as its mixer has run."""
    check_tokens(tokens, subject.anatomy)
    body = subject.body
    body.check_length(len(tokens))
    parts = dict(subject.anatomy.recurrent_parts())
    if body.kernels == "stock" and "memory" in sites.values():
        raise NeedleworkError("site='memory' needs needlework's kernel of RG-LRU: load the model with kernels='fast'")
    convolved: dict[int, ConvolutionCall] = {}
    heads: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def scans(mixer: Mixer, call: ScanCall) -> None:
        site = sites.get(mixer.layer, "conv")
        if site == "conv":
            return
        weights, values, constant = impulse_responses(call), call.values[0], None
        calls = heads.setdefault(mixer.layer, [])
        calls.append((weights, values))
        width = getattr(mixer.output, "in_features", 0)
        if sum(value.shape[-1] for _, value in calls) < width:
            return  # the mixer calls its scan once per head
        weights, values = (torch.cat(pieces, -1) for pieces in zip(*calls, strict=True))
        if site == "memory":
            taps = convolved.pop(mixer.layer)
            constant = None if taps.bias is None else weights.sum(1) * taps.bias
            weights = torch.einsum("ijc,jkc->ikc", weights, _tap_weights(taps))
            values = taps.inputs[0, :, -taps.tokens :].T
        part = parts[mixer.layer]
        found(LayerContributions(mixer.layer, site, part.recurrence, weights, values, constant, max(1, part.groups)))

    def convolutions(mixer: Mixer, call: ConvolutionCall) -> None:
        if sites.get(mixer.layer) == "memory":
            convolved[mixer.layer] = call
        if sites.get(mixer.layer) != "conv":
            return
        part, channels = parts[mixer.layer], len(call.weight)
        groups = part.groups if part.groups * part.group_width == channels else 1
        constant = None if call.bias is None else call.bias.expand(call.tokens, -1)
        values = call.inputs[0, :, -call.tokens :].T
        found(LayerContributions(mixer.layer, "conv", "short convolution", _tap_weights(call), values, constant, groups))

    slots = torch.zeros(1, dtype=torch.int64, device=body.device)
    with body.session(), intercepted([mixer for mixer in body.mixers if mixer.layer in sites], scans, convolutions):
        ids = torch.tensor([tokens], device=body.device)
        body.feed(ids, body.new_memory(1), "prefill", Rows(slots), Tally(1), chunk=len(tokens))
