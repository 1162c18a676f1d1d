"""One pass over the data for all interventions: equal to lm-eval alone and to tasks/knowledge, resumed, checked beforehand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mini_tasks as mini
import pytest
from checkpoints import save

from needlework import NeedleworkError
from needlework.lmeval.evaluate import PAPER_KEPT
from needlework.results import Store

pytestmark = pytest.mark.slow
ACTS = ["none", "keep_heads(k=1)", "ablate_attention()"]
TASKS = ["mini_mmlu_animals", "mini_mmlu_cloze_animals"]


def run(model: Path, out: Path, acts: list[str] = ACTS, tasks: list[str] = TASKS, **options: Any) -> Any:
    from needlework.lmeval.evaluate import evaluate

    return evaluate(model, tasks, acts, out, progress=False, **options)


@pytest.fixture(scope="module")
def done(griffin: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    out = tmp_path_factory.mktemp("eval")
    return run(griffin, out), out


def rows(out: Path) -> dict[tuple[str, str], Any]:
    store = Store(out)
    found = {(trial.sample, trial.intervention): trial for trial in store.rows()}
    store.close()
    return found


def test_scores_are_those_of_lm_eval_alone_under_each_intervention(griffin: Path, done: tuple[Any, Path]) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    import needlework.lmeval.model  # noqa: F401  (registers the model type)

    summary, _ = done
    manager = TaskManager(include_path=str(mini.FOLDER), include_defaults=False)
    for act, file in zip(ACTS, summary.files, strict=True):
        arguments: Any = f"pretrained={griffin},intervention={act},dtype=float32"
        alone = simple_evaluate("needlework", arguments, tasks=list(TASKS), task_manager=manager, bootstrap_iters=100)
        stored = json.loads(file.read_text())
        for task in TASKS:
            assert stored["results"][task]["acc,none"] == alone["results"][task]["acc,none"]
            samples = [json.loads(line) for line in (file.parent / f"samples_{task}.jsonl").read_text().splitlines()]
            for mine, its in zip(samples, alone["samples"][task], strict=True):
                assert [r[0][0] for r in mine["resps"]] == pytest.approx([r[0][0] for r in its["resps"]], abs=1e-5)


def test_the_same_questions_score_the_same_through_tasks_knowledge(griffin: Path, done: tuple[Any, Path]) -> None:
    import needlework as nw
    from needlework.tasks import make_task

    subject, found, compared = nw.load(griffin), rows(done[1]), 0
    for kind in ("letter", "cloze_choice"):
        task = make_task({"kind": kind, "subjects": ("animals",)})
        items = [item for item in task.items(subject.tokenizer, mini.SEED, None, None) if (item.id, "none") in found]
        for act in ACTS:
            asked = subject.choices([i.prompt for i in items], [i.options for i in items], nw.parse(act))
            for item, scores in zip(items, asked, strict=True):
                row = found[item.id, act]
                assert row.logprobs == pytest.approx(scores.totals, abs=1e-5)
                told = task.score(item, scores)
                assert row.scores["correct"] == told["correct"]
                compared += 1
    assert compared == len(found) == 2 * 20 * 3


def test_lm_eval_is_left_as_it_was(done: tuple[Any, Path]) -> None:
    """Its templates were compiled once each while we ran; afterwards they are its own business again."""
    from lm_eval import utils

    assert "from_string" not in vars(utils.env)


def test_rows_say_what_a_report_needs(done: tuple[Any, Path]) -> None:
    forms = {"letter": 0, "cloze": 0}
    for row in rows(done[1]).values():
        form = "letter" if row.facts["form"] == "letter" else "cloze"
        forms[form] += 1
        assert row.experiment == "ability"
        assert row.facts["chance"] == 0.25
        assert row.facts["subject"] == "animals"
        assert row.cluster.startswith("animals/")
        zeroed = sum(layer.get("heads_zeroed", 0) for layer in row.receipt["layers"])
        assert (zeroed > 0) == (row.intervention != "none")
    assert forms == {"letter": 60, "cloze": 60}


def test_what_is_stored_is_not_asked_again(griffin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from needlework.experiments.models import LoadedSubject

    monkeypatch.setattr("needlework.experiments.trials.CHUNK_TRIALS", 12)
    asked: list[Any] = []
    stock = LoadedSubject.answers

    def dies(self: Any, requests: Any) -> Any:
        if len(asked) >= 24:
            raise KeyboardInterrupt
        asked.extend(requests)
        return stock(self, requests)

    monkeypatch.setattr(LoadedSubject, "answers", dies)
    with pytest.raises(KeyboardInterrupt):
        run(griffin, tmp_path)
    before = rows(tmp_path)
    assert 0 < len(before) == len(asked) < 120
    monkeypatch.setattr(LoadedSubject, "answers", stock)
    run(griffin, tmp_path)
    whole = rows(tmp_path)
    run(griffin, tmp_path, [*ACTS, "keep_heads(k=2)"])
    more = rows(tmp_path)
    assert (len(whole), len(more)) == (120, 160)
    assert all(whole[key] == row for key, row in before.items()), "with its seconds"
    assert all(more[key] == row for key, row in whole.items())
    monkeypatch.setattr(LoadedSubject, "answers", lambda *_: pytest.fail("asked again"))
    run(griffin, tmp_path)


def test_rows_with_other_prompts_are_kept_but_not_counted(griffin: Path, tmp_path: Path) -> None:
    def counted(acts: list[str], shots: int) -> dict[tuple[str, int], int]:
        run(griffin, tmp_path, acts, ["mini_mmlu_animals"], limit=4, shots=shots)
        store = Store(tmp_path)
        assert all(len(t.greedy) == len(t.facts["options"]) for t in store.rows())
        counts = store.db.execute("SELECT intervention, asked, count(*) FROM trials GROUP BY 1, 2").fetchall()
        store.close()
        return {(act, asked): count for act, asked, count in counts}

    assert counted(["none"], 0) == {("none", 1): 4}
    assert counted(["none"], 1) == {("none", 0): 4, ("none", 1): 4}
    # the first questions again, under something else: their baseline belongs to them
    assert counted(["keep_heads(k=1)"], 0) == {("none", 0): 4, ("none", 1): 4, ("keep_heads(k=1)", 1): 4}
    store = Store(tmp_path)
    (prompts,) = store.db.execute("SELECT count(DISTINCT prompt_id) FROM trials WHERE asked").fetchone()
    assert prompts == 4
    store.close()


def test_what_is_wrong_is_said_before_the_model_is_loaded(griffin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import needlework.subject

    monkeypatch.setattr(needlework.subject, "load", lambda *a, **k: pytest.fail("the model was loaded"))
    wrong: list[tuple[list[str], list[str], str]] = [
        (["mini_mmlu_animal"], ["none"], "mini_mmlu_animals"),
        (["mmlu_anatomy"], ["none"], "--data"),
        (TASKS, ["keep_hats(k=1)"], "keep_heads"),
        (TASKS, ["keep_heads(k=1, phase='decode')"], "decode only"),
        (TASKS, ["keep_heads(k=50)"], "50"),
        (TASKS, ["expose_tokens(mode='omit')"], "no span"),
        ([], ["none"], "at least one task"),
    ]
    for tasks, acts, why in wrong:
        with pytest.raises(NeedleworkError, match=why):
            run(griffin, tmp_path / "out", acts, tasks)
    with pytest.raises(NeedleworkError, match="nowhere"):
        run(griffin, tmp_path / "out", ["none"], TASKS, data=tmp_path / "nowhere")
    assert not (tmp_path / "out").exists()


def test_a_chat_template_that_swallows_answers_is_refused(tmp_path: Path) -> None:
    glued = save("recurrent_gemma", tmp_path / "model", chat=True)
    template = glued / "chat_template.jinja"
    template.write_text(template.read_text().replace("'answer : ' if add", "'answer :' if add"))
    with pytest.raises(NeedleworkError, match="must end with white space"):
        run(glued, tmp_path / "out", [], ["mini_mmlu_animals"], paper=True, limit=1)
    assert not (tmp_path / "out").exists()


def test_the_papers_preset_keeps_the_same_shares_and_talks_in_turns(griffin: Path, tmp_path: Path) -> None:
    summary = run(griffin, tmp_path, [], ["mini_mmlu_animals"], paper=True, limit=2, shots=2)
    texts = [line.intervention for line in summary.lines]
    assert texts == ["none", "keep_heads(k=0)", "keep_heads(k=1)", "keep_heads(k=4)"]  # 0, 3, 4, 5, 32 of 32 on 4 heads
    config = json.loads(summary.files[0].read_text())["config"]
    assert config["apply_chat_template"] is config["fewshot_as_multiturn"] is True
    prompt = next(iter(rows(tmp_path).values())).prompt
    assert prompt.count("ask : ") == 3  # two examples and the question, a turn each
    assert PAPER_KEPT == (0, 3, 4, 5, 32)


def test_shots_chat_and_loading_go_by_the_command_line(griffin: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from needlework.cli import app

    def prompts(name: str, *more: str) -> list[str]:
        words = ["eval", str(griffin), "--tasks", "mini_mmlu_animals", "--intervene", "none", "--limit", "2"]
        shown = CliRunner().invoke(app, [*words, "--out", str(tmp_path / name), *more])
        assert shown.exit_code == 0, shown.output
        return [row.prompt for row in rows(tmp_path / name).values()]

    plain = prompts("plain", "--shots", "0")
    for asked, shown in zip(plain, prompts("shots", "--shots", "2", "--kernels", "stock", "--dtype", "bfloat16"), strict=True):
        assert shown.endswith(asked)
        assert shown.count("question") == 3 * asked.count("question")
    assert all(prompt.startswith("ask : ") for prompt in prompts("chat", "--shots", "0", "--chat"))
    preset = prompts("paper", "--shots", "0", "--no-chat", "--paper")
    assert set(preset) == set(plain), "the preset would ask in the chat template"
    store = Store(tmp_path / "shots")
    (versions,) = store.versions().values()
    store.close()
    assert (versions["kernels"], versions["dtype"]) == ("stock", "bfloat16")


def test_an_intervention_that_the_model_has_no_parts_for_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    with pytest.raises(NeedleworkError, match="no separate recurrent layers"):
        run(Path("tiny-transformer"), tmp_path / "out", ["none", "ablate_recurrent()"], ["mini_mmlu_animals"], limit=1)
    assert not (tmp_path / "out").exists()


def test_rows_of_other_evaluations_are_neither_counted_nor_judged(
    griffin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = ["mini_mmlu_animals"]
    assert run(griffin, tmp_path, ["limit_context(tokens=5000)"], task, limit=2).idle == ["limit_context(tokens=5000)"]
    assert "hid nothing in any of its 2 trials" in capsys.readouterr().err
    again = run(griffin, tmp_path, ["none"], task, limit=1)
    told = capsys.readouterr().err
    assert again.idle == []
    assert "hid nothing" not in told
    assert "1 rows in" in told, "rows that are no longer counted are said"
