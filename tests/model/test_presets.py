"""Presets: public configurations are inspected and planned for without weights, with the anatomy that was published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from needlework.cli import app
from needlework.errors import NeedleworkError
from needlework.experiments.models import PublicModels
from needlework.experiments.plan import Model
from needlework.experiments.schema import Loading
from needlework.model.files import preset_config, presets

# As stated by the publishers: layers, of which with attention and with a recurrent mixer; query and key-value heads.
PUBLISHED = {
    "ai21-jamba-mini-1.6": (32, 4, 28, 32, 8),
    "ai21-jamba-reasoning-3b": (28, 2, 26, 20, 1),
    "bamba-9b": (32, 3, 29, 32, 8),
    "falcon-h1-0.5b-base": (36, 36, 36, 8, 2),
    "falcon-h1-tiny-90m-base": (24, 24, 24, 8, 2),
    "granite-4.0-h-micro": (40, 4, 36, 32, 8),
    "granite-4.0-h-tiny": (40, 4, 36, 12, 4),
    "jamba-v0.1": (32, 4, 28, 32, 8),
    "kimi-linear-48b-a3b-instruct": (27, 7, 20, 32, 32),
    "lfm2-1.2b": (16, 6, 10, 32, 8),
    "lfm2-2.6b": (30, 8, 22, 32, 8),
    "lfm2-350m": (16, 6, 10, 16, 8),
    "lfm2-700m": (16, 6, 10, 24, 8),
    "lfm2.5-1.2b-instruct": (16, 6, 10, 32, 8),
    "minimax-text-01-hf": (80, 10, 70, 64, 8),
    "nemotron-h-8b-base-8k": (52, 4, 24, 32, 8),
    "nvidia-nemotron-3-nano-30b-a3b-bf16": (52, 6, 23, 32, 2),
    "nvidia-nemotron-nano-12b-v2": (62, 6, 28, 40, 8),
    "nvidia-nemotron-nano-9b-v2": (56, 4, 27, 40, 8),
    "olmo-hybrid-7b": (32, 8, 24, 30, 30),
    "qwen3-next-80b-a3b-instruct": (48, 12, 36, 16, 2),
    "qwen3.5-0.8b": (24, 6, 18, 8, 2),
    "qwen3.5-35b-a3b": (40, 10, 30, 16, 2),
    "qwen3.5-4b": (32, 8, 24, 16, 4),
    "qwen3.5-9b": (32, 8, 24, 16, 4),
    "recurrentgemma-2b": (26, 8, 18, 10, 1),
    "recurrentgemma-9b": (38, 12, 26, 16, 1),
    "zamba-7b-v1": (76, 13, 76, 16, 16),
    "zamba2-1.2b": (38, 6, 38, 32, 32),
    "zamba2-2.7b": (54, 9, 54, 32, 32),
    "zamba2-7b": (81, 13, 81, 32, 32),
}
ALSO = {"jamba-mini-1.6": "ai21-jamba-mini-1.6", "minimax-text-01": "minimax-text-01-hf"}


def test_every_preset_has_its_published_anatomy_below_and_a_source() -> None:
    assert set(presets()) == {*PUBLISHED, *ALSO}
    assert all(presets()[other] is presets()[name] for other, name in ALSO.items())
    assert all(preset["source"] for preset in presets().values())


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_looked_at_without_weights_and_has_the_published_sizes(name: str) -> None:
    """Names round sizes ("7B" has 7.4 billion parameters); a wrong width, vocabulary or tied head is off by more."""
    info = PublicModels().inspect(Model("here", name, name, Loading(dtype="bfloat16")))
    anatomy, costs = info.anatomy, info.costs
    attention = [part for _, part in anatomy.attention_parts()]
    layers, with_attention, with_mixer, query_heads, kv_heads = PUBLISHED[name]
    assert (len(anatomy.layers), len(attention), len(anatomy.recurrent_layers)) == (layers, with_attention, with_mixer)
    assert {(part.query_heads, part.kv_heads) for part in attention} == {(query_heads, kv_heads)}
    assert anatomy.parameters == pytest.approx(presets()[name]["parameters"], rel=0.07)
    assert costs is not None
    assert costs.weights == pytest.approx(2 * anatomy.parameters, rel=0.01)


@pytest.mark.slow
def test_commands_take_presets_by_name(tmp_path: Path) -> None:
    found = json.loads(CliRunner().invoke(app, ["inspect", "qwen3.5-0.8b", "--json"]).output)
    assert [layer["kind"] for layer in found["layers"]].count("attention") == 6
    (tmp_path / "plan.yaml").write_text(
        "models: [tiny-griffin]\nexperiments:\n  one:\n    interventions: [none]\n"
        "    tasks: [{kind: niah, lengths: [150], depths: [0], max_new_tokens: 8}]\n"
    )
    said = CliRunner().invoke(app, ["plan", str(tmp_path / "plan.yaml"), "--model", "qwen3.5-0.8b"])
    assert said.exit_code == 0, said.output
    assert "qwen3.5-0.8b" in said.output


def test_a_model_type_that_transformers_lacks_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets(), "new-1b", {"model_type": "new_hybrid", "config": {}})
    with pytest.raises(NeedleworkError, match=r"new-1b: transformers \S+ does not know the model type 'new_hybrid'; upgrade"):
        preset_config("new-1b")


def test_a_preset_cannot_be_loaded_and_says_so() -> None:
    said = CliRunner().invoke(app, ["ask", "qwen3.5-0.8b", "hello"])
    assert said.exit_code == 2
    assert "preset" in " ".join(said.output.split())
