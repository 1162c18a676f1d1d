"""`needlework heads`: what it writes can be read, what is there is never written over, and bad input says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import needlework as nw
from needlework.cli import app
from needlework.heads import output
from needlework.heads.methods import all_methods
from needlework.interventions.ranking import Ranking

FEW = ["--samples", "6", "--held-out", "6", "--by", "copy_score", "--by", "entropy"]


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["heads", *arguments])
    return result.exit_code, result.output + (result.stderr or "")


@pytest.mark.slow
def test_everything_is_written_and_can_be_used(tmp_path: Path) -> None:
    out = tmp_path / "heads"
    code, said = run("tiny-griffin-small", *FEW, "--out", str(out), "--export", "wu", "--export", "duo")
    assert code == 0, said
    assert "smallest set: " in said
    sentences = ("smallest set: ", "wrote ")
    assert max(len(line) for line in said.splitlines() if not line.startswith(sentences)) <= 80
    names = {path.name for path in out.iterdir()}
    assert {"heads.json", "heads.html", "heads.png", "heads.svg", "curves.svg", "static-or-dynamic.png"} <= names
    summary = json.loads((out / "heads.json").read_text())
    ranking = Ranking.load(out / "ranking-copy_score.json")
    assert summary["rankings"]["copy_score"] == ranking.to_dict()
    assert (ranking.method, ranking.samples, ranking.seed, ranking.model.name) == ("copy_score", 6, 0, "tiny-griffin-small")
    subject = nw.load("tiny-griffin-small")
    assert subject.generate([[1, 2, 3]], nw.KeepHeads(k=1, by=ranking), max_new_tokens=1)[0].tokens
    with pytest.raises(nw.NeedleworkError, match="the ranking"):
        nw.load("tiny-griffin").generate([[1, 2, 3]], nw.KeepHeads(k=1, by=ranking), max_new_tokens=1)
    assert summary["retest"]["copy_score"]["other_seed"]["k"] == 5
    assert summary["agreement"]["copy_score"]["entropy"]["spearman"] == summary["agreement"]["entropy"]["copy_score"]["spearman"]
    assert summary["curves"]["random"]["points"][-1]["value"] == 1.0
    assert {way["name"] for way in summary["static_or_dynamic"]["ways"]} >= {"all heads", "dynamic: entropy", "static: random"}
    page = (out / "heads.html").read_text()
    assert page.count("<svg") == 4  # heads, curves, static or dynamic, roles
    assert not any(word in page for word in ("<script", "<link", "<img", "src="))
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    code, said = run("tiny-griffin-small", *FEW, "--out", str(out))
    assert (code, "exists and is not empty" in said) == (2, True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    files = [str(out / "copy_score.wu.json"), str(out / "copy_score.full_attention_heads.tsv")]
    code, said = run("tiny-griffin-small", *FEW[:4], "--import", files[0], "--import", files[1], "--no-dynamic", "--json")
    assert code == 0, said
    judged = json.loads(said[said.index("{") :])
    assert set(judged["rankings"]) == {"copy_score.wu", "copy_score.full_attention_heads"}
    assert judged["rankings"]["copy_score.wu"]["heads"] == summary["rankings"]["copy_score"]["heads"]


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--by", "copy_score", "--no-judge", "--no-dynamic", "--no-retest"], ["--recurrent"]])
def test_a_directory_appears_when_all_of_it_is_written(more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "heads"
    arguments = ["tiny-griffin-small", "--samples", "2", *more, "--out", str(out)]
    with monkeypatch.context() as patch:
        patch.setattr(output, "render_template", stopped)
        patch.setattr(output, "draw_recurrent", stopped)
        assert run(*arguments)[0] == 130
    assert list(tmp_path.iterdir()) == []
    code, said = run(*arguments)
    assert code == 0, said
    assert (out / ("recurrent.json" if "--recurrent" in more else "heads.html")).exists()


@pytest.mark.parametrize(
    "arguments,says",
    [
        (["tiny-griffin-small", "--by", "copy"], "heads are not ranked by 'copy'; did you mean 'copy_score'?"),
        (["tiny-griffin-small", "--samples", "0"], "samples=0 must be a whole number"),
        (["tiny-griffin-small", "--task", "nihha"], "did you mean"),
        (["tiny-griffin-small", "--share", "0"], "share=0.0 of the heads"),
        (["tiny-griffin-small", "--export", "wu"], "give --out DIR"),
        (["tiny-griffin-small", "--export", "csv", "--out", "nowhere"], "no format 'csv'"),
        (["tiny-griffin-small", "--import", "nothing.json"], "cannot be read"),
        (["tiny-mamba"], "has no attention heads"),
        (["tiny-grifin"], "did you mean 'tiny-griffin'"),
    ],
)
def test_bad_input_has_exit_code_2(arguments: list[str], says: str) -> None:
    code, said = run(*arguments)
    assert (code, says in " ".join(said.split())) == (2, True), said


def test_methods_are_listed_without_a_model_and_nothing_else_is_done_without_one() -> None:
    code, said = run("--methods", "--json")
    assert (code, [row["method"] for row in json.loads(said)]) == (0, list(all_methods())), said
    code, said = run("--samples", "6")
    assert (code, "which model?" in said) == (2, True), said


def test_a_plan_without_retrieval_is_refused(tmp_path: Path) -> None:
    plan = "models: [tiny-griffin-small]\nexperiments: {text: {tasks: [{kind: perplexity}], interventions: none}}\n"
    (tmp_path / "plan.yaml").write_text(plan)
    code, said = run("tiny-griffin-small", "--task", str(tmp_path / "plan.yaml"))
    assert (code, "no task here generates" in said) == (2, True), said


def test_a_directory_with_other_contents_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("all of it")
    code, said = run("tiny-griffin-small", "--out", str(tmp_path))
    assert (code, "nothing in it was touched" in said) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_methods_are_listed() -> None:
    code, said = run("any", "--methods", "--json")
    assert code == 0
    assert [row["method"] for row in json.loads(said)] == list(all_methods())


@pytest.mark.slow
def test_the_recurrent_side_is_a_table_and_files(tmp_path: Path) -> None:
    out = tmp_path / "side"
    code, said = run("tiny-griffin-small", "--recurrent", "--samples", "4", "--out", str(out))
    assert code == 0, said
    assert "segregated: " in said
    found = json.loads((out / "recurrent.json").read_text())
    assert {path.name for path in out.iterdir()} == {"recurrent.json", "recurrent.png", "recurrent.svg"}
    code, said = run("tiny-griffin-small", "--recurrent", "--samples", "4", "--json")
    assert code == 0
    assert json.loads(said) == found


def test_a_model_without_recurrent_layers_has_no_recurrent_side() -> None:
    code, said = run("tiny-transformer", "--recurrent", "--samples", "4")
    assert code == 2
    assert "recurrent" in said
