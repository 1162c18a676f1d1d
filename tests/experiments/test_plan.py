"""Plans: what they stand for, and that every mistake is told with file and line before anything is written."""

from __future__ import annotations

from pathlib import Path

import fakes
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from needlework.errors import NeedleworkError
from needlework.experiments import models, run
from needlework.experiments.plan import Model, Plan, load
from needlework.experiments.schema import Loading, PlanError
from needlework.experiments.trials import decoding, expand, item_digest, trial_id
from needlework.interventions import NONE, parse
from needlework.interventions.base import check_ranges
from needlework.interventions.base import expand as expand_text
from needlework.tasks.base import Item

GOOD = """\
name: good
models: [alpha]
seeds: [0]
experiments:
  first:
    about: something
    tasks:
      - kind: fake
        samples: 3
    interventions:
      - none
      - keep_heads(k=0..2)
    limit: 2
    fast:
      interventions: [none]
      seeds: [1]
  second:
    tasks: [fake]
    interventions: none
"""

# what is changed in the good plan, the line that must be named, and words of the message
BAD = {
    "not YAML": ("name: good", "name: 'good", 1, "not valid YAML"),
    "a tab": ("name: good", "name:\tgood", 1, "not valid YAML"),
    "a control character": ("name: good", "name: go\x07od", 1, "not valid YAML"),
    "an unknown tag": ("name: good", "name: !!python/object:os.system x", 1, "cannot read the value"),
    "an impossible date": ("seeds: [0]", "seeds: 2024-99-99", 3, "cannot read the value"),
    "a key twice": ("seeds: [0]", "seeds: [0]\nseeds: [1]", 4, "'seeds' occurs twice"),
    "a key that is no text": ("seeds: [0]", "1: [0]", 3, "is not text"),
    "an unknown key": ("seeds: [0]", "seed: [0]", 3, "unknown key 'seed': did you mean 'seeds'?"),
    "an unknown key of an experiment": ("    limit: 2", "    limits: 2", 13, "did you mean 'limit'?"),
    "an unknown key of a reduced grid": ("      seeds: [1]", "      seds: [1]", 16, "did you mean 'seeds'?"),
    "an unknown key of a model": ("models: [alpha]", "models: [{source: a, dtipe: float32}]", 2, "did you mean 'dtype'?"),
    "an unknown key of a task": ("        samples: 3", "        sampels: 3", 9, "sampels"),
    "no experiments": (GOOD[GOOD.index("experiments:") :], "", 1, "'experiments' is missing"),
    "empty experiments": (GOOD[GOOD.index("experiments:") :], "experiments: {}", 4, "at least 1 item"),
    "experiments as a list": (GOOD[GOOD.index("experiments:") :], "experiments: [a]", 4, "valid dictionary"),
    "an experiment without tasks": ("    tasks: [fake]\n", "", 17, "'tasks' is missing in experiments.second"),
    "an experiment without interventions": ("    interventions: none\n", "", 17, "'interventions' is missing"),
    "empty tasks": ("    tasks: [fake]", "    tasks: []", 18, "at least 1 item"),
    "a bad name of an experiment": ("  second:", "  sec ond:", 17, "is no name"),
    "no models": ("models: [alpha]\n", "", 4, "no models"),
    "empty models": ("models: [alpha]", "models: []", 2, "at least 1 item"),
    "a model that is no text": ("models: [alpha]", "models: [7]", 2, "models.0"),
    "two models of one name": ("models: [alpha]", "models: [a/alpha, b/alpha]", 2, "two models are called 'alpha'"),
    "a model that is not there": ("models: [alpha]", "models: [missing]", 2, "no such model"),
    "an unknown dtype": ("models: [alpha]", "models: [{source: alpha, dtype: int8}]", 2, "dtype"),
    "an unknown task": ("    tasks: [fake]", "    tasks: [fak]", 18, "unknown task kind 'fak'"),
    "a task that is a number": ("    tasks: [fake]", "    tasks: [3]", 18, "a task is its name, or a mapping"),
    "a task without a kind": ("      - kind: fake\n        samples: 3", "      - samples: 3", 8, "with kind: NAME"),
    "a task option of a wrong type": ("        samples: 3", "        samples: many", 9, "samples"),
    "a task option out of range": ("        samples: 3", "        samples: 0", 9, "greater than or equal to 1"),
    "one name for two devices": (
        "models: [alpha]",
        "models: [alpha, {source: alpha, device: cuda}]",
        2,
        "two models are called 'alpha'",
    ),
    "one name for two ways to compute": (
        "models: [alpha]",
        "models: [alpha, {source: alpha, kernels: stock}]",
        2,
        "two models are called 'alpha'",
    ),
    "unknown kernels": ("models: [alpha]", "models: [{source: alpha, kernels: slow}]", 2, "'fast' or 'stock'"),
    "two tasks of one name": ("    tasks: [fake]", "    tasks: [fake, fake]", 18, "two tasks are called 'fake'"),
    "a bad name of a task": ("        samples: 3", "        name: a b", 9, "is no name"),
    "a task that cannot be made": ("        samples: 3", "        length: 13", 8, "13 is unlucky"),
    "seeds as words": ("seeds: [0]", "seeds: some", 3, "a range such as 0..4"),
    "a negative seed": ("seeds: [0]", "seeds: [-1]", 3, "greater than or equal to 0"),
    "seeds that run backwards": ("seeds: [0]", "seeds: 4..1", 3, "at least 1 item"),
    "a seed that is true": ("seeds: [0]", "seeds: true", 3, "seeds"),
    "a limit of nothing": ("    limit: 2", "    limit: 0", 13, "greater than or equal to 1"),
    "a limit with a comma": ("    limit: 2", "    limit: 2.5", 13, "integer"),
    "an unknown boundary": ("    limit: 2", "    boundary: middle", 13, "boundary"),
    "max_new_tokens of nothing": ("    limit: 2", "    max_new_tokens: 0", 13, "max_new_tokens"),
    "an observation of scores": ("    tasks: [fake]", "    tasks: fake_choice\n    observe: true", 17, "observe: true"),
    "optional as a word": ("        samples: 3", "        optional: perhaps", 9, "optional is true or false"),
    "an unknown intervention": ("keep_heads(k=0..2)", "keep_head(k=0..2)", 12, "did you mean 'keep_heads'?"),
    "an unknown field": ("keep_heads(k=0..2)", "keep_heads(kk=0..2)", 12, "no 'kk'"),
    "a wrong value": ("keep_heads(k=0..2)", "keep_heads(k=0..2, phase='later')", 12, "phase"),
    "a range that is empty": ("keep_heads(k=0..2)", "keep_heads(k=2..0)", 12, "is empty"),
    "a range of fractions": ("keep_heads(k=0..2)", "keep_heads(fraction=0.1..0.5)", 12, "whole numbers"),
    "a range to an unknown size": ("keep_heads(k=0..2)", "keep_heads(k=0..Q)", 12, "'Q' is neither"),
    "a range without end": ("keep_heads(k=0..2)", "keep_heads(k=0..)", 12, "whole numbers"),
    "far too many": ("keep_heads(k=0..2)", "keep_heads(k=0..2, seed=0..900000)", 12, "more than 10000"),
    "an open brace": ("keep_heads(k=0..2)", "keep_heads(k={0,1)", 12, "'}' is missing"),
    "a brace that stays open": ("keep_heads(k=0..2)", "keep_heads(k={0,1", 12, "never closed"),
    "an empty alternative": ("keep_heads(k=0..2)", "keep_heads(k={0,})", 12, "is empty; write none"),
    "text that is no call": ("keep_heads(k=0..2)", "keep heads", 12, "cannot read the intervention"),
    "code": ("keep_heads(k=0..2)", "keep_heads(k=open('x'))", 12, "no plain value"),
    "an intervention that is a mapping": ("- keep_heads(k=0..2)", "- {none, x}", 12, "interventions.1"),
    "braces without quotes": ("- keep_heads(k=0..2)", "- {none, a()} + b()", 12, "must stand in quotes"),
    "two of a kind": ("keep_heads(k=0..2)", "keep_heads(k=1) + keep_heads(k=2)", 12, "meet in one phase"),
    "more heads than there are": ("keep_heads(k=0..2)", "keep_heads(k=0..5)", 12, "more than the 4 heads"),
    "a layer that is not there": ("keep_heads(k=0..2)", "ablate_attention(layers=[7])", 12, "layers [7]"),
    "an unknown span": ("keep_heads(k=0..2)", "expose_tokens('omit', span='thread')", 12, "no span 'thread'"),
    "an unknown twin": ("keep_heads(k=0..2)", "swap_memory(half='kv', from='sister')", 12, "no twin 'sister'"),
    "decode in a scoring task": ("      - kind: fake", "      - kind: fake_choice", 12, "scoring has no decode phase"),
    "a list of nothing": ("    interventions: none", "    interventions: []", 19, "at least 1 item"),
    "an alias to itself": ("name: good", "about: &a [*a]", 1, "too deep"),
}
DECODE_ONLY = "decode in a scoring task"


@pytest.mark.parametrize("fault", BAD)
def test_bad_plans_are_told_with_file_and_line_and_write_nothing(fault: str, tmp_path: Path) -> None:
    before, after, line, words = BAD[fault]
    assert GOOD.count(before) >= 1
    text = GOOD.replace(before, after, 1)
    if fault == DECODE_ONLY:
        text = text.replace("keep_heads(k=0..2)", "keep_heads(k=0..2, phase='decode')")
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(PlanError) as error:
        fakes.run_fakes(path, tmp_path / "out")
    told = str(error.value)
    assert f"{path}:{line}: " in told, told
    assert words in told
    assert not (tmp_path / "out").exists()


def test_there_are_at_least_thirty_kinds() -> None:
    assert len(BAD) >= 30


def test_the_good_plan_is_good(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(GOOD)
    assert fakes.run_fakes(tmp_path / "plan.yaml", tmp_path / "out").sound


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"- a\n- b\n", b"just text", b"# nothing\n", b"null"])
def test_files_that_are_no_plans(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_bytes(content)
    with pytest.raises(PlanError, match=r"plan\.yaml"):
        fakes.run_fakes(tmp_path / "plan.yaml", tmp_path / "out")
    with pytest.raises(PlanError, match="cannot be read"):
        fakes.run_fakes(tmp_path / "absent.yaml", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_all_faults_are_told_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(GOOD.replace("seeds: [0]", "seedz: [0]").replace("limit: 2", "limit: -2"))
    with pytest.raises(PlanError) as error:
        fakes.run_fakes(tmp_path / "plan.yaml", tmp_path / "out")
    lines = str(error.value).splitlines()
    assert [line.split(":")[1] for line in lines] == ["3", "13"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_plan_cut_or_scrambled_anywhere_is_good_or_told_never_a_traceback(data: st.DataObject, tmp_path: Path) -> None:
    start = data.draw(st.integers(0, len(GOOD)))
    end = data.draw(st.integers(start, min(len(GOOD), start + 12)))
    text = GOOD[:start] + data.draw(st.text(max_size=6)) + GOOD[end:]
    path = tmp_path / "plan.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    told = ""
    try:
        plan = load(path, make_task=fakes.make_task)
        expand(plan, fakes.FakeModels().inspect(next(iter(plan.models.values()))))
    except PlanError as error:
        told = str(error)
    assert not told or told.startswith(str(path))


def the_plan(tmp_path: Path, text: str = GOOD, **options: object) -> Plan:
    (tmp_path / "plan.yaml").write_text(text)
    return load(tmp_path / "plan.yaml", make_task=fakes.make_task, **options)  # type: ignore[arg-type]


def test_fast_takes_the_reduced_grid_where_there_is_one(tmp_path: Path) -> None:
    first, second = the_plan(tmp_path).experiments
    assert [g.text for g in first.grids] == ["none", "keep_heads(k=0..2)"]
    assert (first.seeds, first.limit, second.limit) == ((0,), 2, None)
    first, second = the_plan(tmp_path, fast=True).experiments
    assert [g.text for g in first.grids] == ["none"]
    assert first.seeds == (1,)
    assert first.limit == 2
    assert second.limit == 75, "where the plan says nothing, 75 samples: enough for a bound of 5 %"
    skipping = GOOD.replace("    interventions: none\n", "    interventions: none\n    fast: {skip: true}\n")
    assert [e.name for e in the_plan(tmp_path, skipping, fast=True).experiments] == ["first"]
    assert [e.name for e in the_plan(tmp_path, skipping).experiments] == ["first", "second"]


def test_model_replaces_all_models_of_the_plan(tmp_path: Path) -> None:
    own = GOOD.replace("    tasks: [fake]\n", "    tasks: [fake]\n    models: [gamma]\n")
    assert set(the_plan(tmp_path, own).models) == {"alpha", "gamma"}
    plan = the_plan(tmp_path, own, models=["some/beta"])
    assert set(plan.models) == {"beta"}
    assert all(e.models == ("beta",) for e in plan.experiments)


@pytest.mark.parametrize(
    "given, name, source",
    [
        ("mine=./some/beta", "mine", "./some/beta"),
        ("mine=org/beta", "mine", "org/beta"),
        ("mine=runs/lr=3e-4/beta", "mine", "runs/lr=3e-4/beta"),
        ("./runs/lr=3e-4", "lr=3e-4", "./runs/lr=3e-4"),  # what stands before the = is a path, so the whole is
        ("lr=1", "lr=1", "lr=1"),  # a directory that is there
        ("mine=lr=1", "mine", "lr=1"),
    ],
)
def test_a_model_may_be_given_a_name(given: str, name: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=1").mkdir()
    (model,) = the_plan(tmp_path, GOOD, models=[given]).models.values()
    assert (model.name, model.source) == (name, source)


@pytest.mark.parametrize(
    "given, words",
    [
        (["my model=x"], "'my model' is no name; use letters, digits and . _ + -"),
        (["=x"], "'' is no name"),
        (["mine="], "nothing after the '='"),
        ([""], "--model is empty"),
        (["a/beta", "b/beta"], "give one another name: --model NAME=PATH"),
        (["mine=a", "mine=b"], "two models are called 'mine'"),
    ],
)
def test_a_bad_name_of_a_model_is_refused(given: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(NeedleworkError) as error:
        the_plan(tmp_path, GOOD, models=given)
    assert words in str(error.value)


def test_a_limit_spreads_over_all_samples(tmp_path: Path) -> None:
    text = GOOD.replace("samples: 3", "samples: 10").replace("limit: 2", "limit: 4")
    work = expand(the_plan(tmp_path, text), fakes.FakeModels().inspect(Model("x:1", "alpha", "alpha")))
    assert [t.item.id for t in work.trials if t.experiment == "first" and not t.intervention.parts] == [
        "fake/0",
        "fake/2",
        "fake/5",
        "fake/7",
    ]


def test_what_a_model_has_no_parts_for_is_left_out_and_said(tmp_path: Path) -> None:
    text = GOOD.replace("keep_heads(k=0..2)", "{ablate_attention(), ablate_recurrent(), swap_memory(half='kv')}")
    text = text.replace("- {", "- '{").replace("'kv')}", "''kv'')}'")
    look = fakes.FakeModels(shapes={"alpha": fakes.anatomy(attention=0)}).inspect
    work = expand(the_plan(tmp_path, text), look(Model("x:1", "alpha", "alpha")))
    assert {str(trial.intervention) for trial in work.trials} == {"none", "ablate_recurrent()"}
    assert [note.split(", so ")[1] for note in work.skipped] == [
        "ablate_attention() is left out",
        "swap_memory(half='kv') is left out",
    ]
    text = GOOD.replace("      - none\n      - keep_heads(k=0..2)", "      - ablate_attention()")
    with pytest.raises(PlanError, match="leave this model out"):
        expand(the_plan(tmp_path, text), look(Model("x:1", "alpha", "alpha")))


def test_equal_questions_of_one_task_count_once(tmp_path: Path) -> None:
    text = GOOD.replace("    tasks: [fake]", "    tasks: [fake]\n    seeds: [0, 1000]")  # the fake repeats itself mod 1000
    work = expand(the_plan(tmp_path, text), fakes.FakeModels().inspect(Model("x:1", "alpha", "alpha")))
    assert work.repeated == 4


@pytest.mark.parametrize(
    "text, sizes, expected",
    [
        ("none", {}, ["none"]),
        ("keep_heads(k=0..2)", {}, ["keep_heads(k=0)", "keep_heads(k=1)", "keep_heads(k=2)"]),
        ("keep_heads(k=0..H)", {"H": 1}, ["keep_heads(k=0)", "keep_heads(k=1)"]),
        ("keep_heads(k=H)", {"H": 3}, ["keep_heads(k=3)"]),
        ("keep_heads(k=0..H..4)", {"H": 10}, ["keep_heads(k=0)", "keep_heads(k=4)", "keep_heads(k=8)"]),
        ("keep_heads(k={1, 0..1})", {}, ["keep_heads(k=1)", "keep_heads(k=0)"]),
        ("{none, ablate_attention()}", {}, ["none", "ablate_attention()"]),
        (
            "{none, limit_context(tokens={8, 9}, phase='prefill')} + {none, ablate_recurrent()}",
            {},
            [
                "none",
                "ablate_recurrent()",
                "limit_context(phase='prefill', tokens=8)",
                "ablate_recurrent() + limit_context(phase='prefill', tokens=8)",
                "limit_context(phase='prefill', tokens=9)",
                "ablate_recurrent() + limit_context(phase='prefill', tokens=9)",
            ],
        ),
        (
            "expose_tokens({'omit', 'only'}, span='a {b}..c')",
            {},
            ["expose_tokens(mode='omit', span='a {b}..c')", "expose_tokens(mode='only', span='a {b}..c')"],
        ),
        ("ablate_heads(heads=[[0, 1..2]])", {}, ["ablate_heads(heads=[[0, 1]])", "ablate_heads(heads=[[0, 2]])"]),
    ],
)
def test_texts_with_ranges(text: str, sizes: dict[str, int], expected: list[str]) -> None:
    found = [str(act) for act in expand_text(text, sizes)]
    assert [str(parse(one)) for one in expected] == found


HYBRID = {"attention": (2, 5, 8, 11, 14), "recurrent": (0, 1)}


@pytest.mark.parametrize(
    ("text", "sets"),
    [
        ("ablate_attention(layers=each)", [[2], [5], [8], [11], [14]]),
        ("ablate_attention(layers={early, middle, late})", [[2, 5], [8], [11, 14]]),
        ("ablate_attention(layers=all_but(late))", [[2, 5, 8]]),
        ("ablate_attention(layers=all_but(each), phase='decode')", [[5, 8, 11, 14], [2, 8, 11, 14], [2, 5, 11, 14]]),
        ("ablate_recurrent(layers=each)", [[0], [1]]),
        ("ablate_recurrent(layers={early, middle, late})", [[0], [1]]),  # of two layers, none is in the middle
        ("ablate_recurrent(layers=random(0.9, 0..9))", []),  # both of them
        ("keep_heads(2, layers=late)", [[11, 14]]),
    ],
)
def test_names_of_layers_are_those_of_the_model(text: str, sets: list[list[int]]) -> None:
    found = expand_text(text, {}, HYBRID)
    assert [list(act.parts[0].layers or ()) for act in found][:3] == sets[:3]
    assert len(found) == len(sets) or "all_but(each)" in text
    assert all(parse(str(act)) == act for act in found)


def test_random_layers_are_as_many_and_of_one_draw() -> None:
    drawn = [act.parts[0].layers for act in expand_text("ablate_attention(layers=random({early, 0.5, 3}, 0..4))", {}, HYBRID)]
    assert sorted({len(layers or ()) for layers in drawn}) == [2, 3]
    assert len(drawn) == len(set(drawn)) > 5
    assert drawn == [
        act.parts[0].layers for act in expand_text("ablate_attention(layers=random({early, 0.5, 3}, 0..4))", {}, HYBRID)
    ]
    with_others = expand_text("ablate_attention(layers=random(2, 0)) + ablate_recurrent(layers=each)", {}, HYBRID)
    assert [len(act.parts) for act in with_others] == [2, 2]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ablate_attention(layers=every)", "layers='every' is not known; write layers=each"),
        ("ablate_attention(layers=random(2))", "write layers=each"),
        ("ablate_attention(layers=all_but(each, 2))", "write layers=each"),
        ("swap_memory('kv', layers=early)", "has no layers of its own to name"),
        ("keep_heads(layers=each)", "give either k or fraction"),
    ],
)
def test_wrong_names_of_layers(text: str, says: str) -> None:
    with pytest.raises(NeedleworkError, match=says):
        check_ranges(text)


def test_golden_ids() -> None:
    """An id may only change together with SEMANTICS_VERSION: stores out there are resumed by it."""
    model = fakes.FakeModels().inspect(Model("x:1", "alpha", "alpha"))
    item = Item("a", "a", (1, 2, 3), "1 2 3", "2", {"needle": ((1, 2),)}, ((4,), (5, 6)), 0, {"twin": (1, 9, 3)})
    generate = decoding("generate", 40, "decode", frozenset({0, 7}))
    digest = item_digest(item)
    assert digest == "90d0e963448632ba3887bc00"
    assert trial_id(model, digest, NONE, generate) == "65620ee320cdc03ba2e28530"
    assert trial_id(model, digest, parse("keep_heads(k=2)"), generate) == "30bb841a8dfbe0c1bec425a6"
    assert trial_id(model, digest, parse("keep_heads(k=2, by='l2', sinks=0)"), generate) == "24aaeb5ae0402af7a72c67f5"
    assert trial_id(model, digest, parse("keep_heads(k=2, sinks=1)"), generate) == "6a03964df9d343218eb500cd"
    assert trial_id(model, digest, NONE, decoding("choices", 40, "decode", frozenset())) == "ac489e9eafecfabdc8d6ca27"


def test_an_act_that_changed_its_meaning_changed_its_ids() -> None:
    """The paper's way of exposing, in prefill: its answers of before were wrong, and must not be taken for new ones."""
    model, how = fakes.FakeModels().inspect(Model("x:1", "alpha", "alpha")), decoding("generate", 40, "decode", frozenset({0}))
    old = {
        "expose_tokens(mode='only', compat='paper')": "0e626e418af5740ffb1ceff8",
        "expose_tokens(phase='decode', mode='only', compat='paper')": "20c41a2eafd629e5081caaf3",
    }
    changed = {text: trial_id(model, "digest", parse(text), how) != name for text, name in old.items()}
    assert list(changed.values()) == [True, False]


def test_ids_depend_on_what_changes_an_answer_and_on_nothing_else() -> None:
    look = fakes.FakeModels().inspect
    one = look(Model("x:1", "alpha", "alpha"))
    item = Item("a", "a", (1, 2, 3), "1 2 3", "2", {"needle": ((1, 2),)}, ((4,), (5, 6)), 0, {"twin": (1, 9, 3)})
    base = {"mode": "generate", "max_new_tokens": 40, "boundary": "decode", "stop": frozenset({0})}

    def key(model=one, item=item, text="none", how=base) -> str:  # type: ignore[no-untyped-def]
        return trial_id(model, item_digest(item), parse(text), decoding(**how))

    from dataclasses import replace

    different = [
        key(replace(one, weights="other")),
        key(replace(one, tokenizer_hash="other")),
        key(replace(one, model=replace(one.model, loading=Loading(dtype="bfloat16")))),
        key(item=replace(item, prompt=(1, 2, 4))),
        key(item=replace(item, spans={"needle": ((0, 2),)})),
        key(item=replace(item, twins={})),
        key(item=replace(item, options=())),
        key(text="ablate_attention()"),
        key(how={**base, "boundary": "prefill"}),
        key(how={**base, "max_new_tokens": 41}),
        key(how={**base, "stop": frozenset()}),
        key(how={**base, "mode": "choices"}),
    ]
    assert len({key(), *different}) == len(different) + 1
    assert key(item=replace(item, id="b", cluster="c", target="d", facts={"x": 1})) == key()
    assert key(replace(one, model=replace(one.model, place="y:2"))) == key()
    scoring = {**base, "mode": "choices"}
    assert key(how=scoring) == key(how={**scoring, "max_new_tokens": 9, "boundary": "prefill"}), "scoring decodes nothing"


@pytest.mark.parametrize(
    "intervention, words",
    [
        ("keep_heads(k=8)", "model 'tiny-lfm': keep_heads(k=8): k=8 is more than the 4 heads there are; choose k from 0 to 4"),
        ("ablate_recurrent_groups(groups=[[0, 99]])", "no such groups [(0, 99)]"),
        ("ablate_attention(layers=[2])", "layers [2] are no attention layers of Lfm2ForCausalLM; choose from ["),
    ],
)
def test_what_a_configuration_rules_out_is_refused_before_weights_are_read(
    intervention: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models.DiskModels, "inspect", lambda *_: pytest.fail("weights were looked at"))
    experiments = f"{{few: {{tasks: [niah], interventions: [none, '{intervention}']}}}}"
    (tmp_path / "plan.yaml").write_text(f"models: [tiny-griffin, tiny-lfm]\nexperiments: {experiments}")
    with pytest.raises(PlanError) as error:
        run.run(tmp_path / "plan.yaml", tmp_path / "out")
    told = str(error.value)
    assert words in told
    assert "experiment 'few'" in told
    assert "out of this experiment (models: ...)" in told
    assert not (tmp_path / "out").exists()


def test_an_experiment_that_leaves_a_model_nothing_is_refused_from_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models.DiskModels, "inspect", lambda *_: pytest.fail("weights were looked at"))
    text = "models: [tiny-mamba]\nexperiments: {few: {tasks: [niah], interventions: ['keep_heads(k=2)']}}"
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(PlanError, match=r"experiment 'few': tiny-mamba has no attention layers, and each .*keep_heads\(k=2\)"):
        run.run(tmp_path / "plan.yaml", tmp_path / "out")
