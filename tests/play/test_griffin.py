"""RecurrentGemma in the browser: the exported page of tiny-griffin answers as the engine does, in real Chromium."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parts import parts_of

import needlework as nw
from needlework.engine.engine import feed_tokens
from needlework.play.export import export, pack, refusal
from needlework.play.playground import Encoded, Playground
from needlework.play.state import PromptState, RequestState
from needlework.requests import Request, prepare

pytestmark = pytest.mark.slow
TOLERANCE = 2e-3
NEW_TOKENS = 12
TEXTS = [
    "none",
    "keep_heads(k=2)",
    "keep_heads(k=2, by='random', seed=3)",
    "keep_heads(phase='prefill', k=3, by='l2')",
    "ablate_heads(heads=[[2, 0], [5, 3]]) + keep_heads(k=2, by='norm')",
    "ablate_attention(phase='decode')",
    "expose_tokens(phase='decode', mode='balanced') + expose_tokens(phase='prefill', mode='omit')",
    "expose_tokens(mode='only', renormalize=True) + limit_context(tokens=24, sinks=2)",
    "ablate_recurrent(phase='decode')",
    "ablate_recurrent(layers=[0, 4], site='conv') + ablate_recurrent(layers=[1], site='state')",
    "ablate_recurrent_groups(groups=[[0, 1], [4, 9]])",
    "swap_memory(half='kv')",
]
MORE_TEXTS = [
    "ablate_attention(layers=[5], site='block')",
    "ablate_attention(layers=[2]) + keep_heads(k=1, layers=[5], phase='prefill')",
    "ablate_recurrent()",
    "ablate_recurrent(layers=[3], phase='prefill', site='state')",
    "ablate_recurrent(phase='decode', site='conv') + ablate_recurrent(phase='decode', site='state')",
    "ablate_recurrent(layers=[1], site='block')",
    "expose_tokens(layers=[2], mode='null') + expose_tokens(layers=[5], mode='omit', phase='decode')",
    "expose_tokens(mode='omit') + limit_context(tokens=3)",
    "keep_heads(k=0)",
    "keep_heads(k=10)",
    "keep_heads(k=4, by='random', phase='decode', seed=-2)",
    "limit_context(phase='prefill', sinks=500, tokens=500)",
    "keep_heads(k=2, by='random') + swap_memory(half='recurrent')",
    "swap_memory(half='kv') + swap_memory(half='recurrent')",
]

ASK = """async ([prompt, all, most]) => {
    const found = [];
    for (const parts of all) found.push(await playground.provider.generate({ prompt, parts, max_new_tokens: most }));
    return found;
}"""
TRY = """async (request) => playground.provider.generate(request)
    .then(() => "", (error) => error.constructor.name + ": " + error.message)"""
LOGITS = """async ([prompt, asked]) => {
    const found = [];
    for (const [parts, tokens] of asked) {
        const logits = await playground.provider.logits({ prompt, parts, max_new_tokens: 1 }, tokens);
        found.push(logits.map((step) => Array.from(step, Math.fround)));
    }
    return found;
}"""


@pytest.fixture(scope="module")
def file(griffin: Playground, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("griffin") / "griffin.html"
    size = export(griffin, path)
    assert size == path.stat().st_size < 8 * 2**20
    return path


@pytest.fixture(scope="module")
def page(chromium: Any, file: Path) -> Iterator[Any]:
    """The exported page; errors in its scripts and requests to elsewhere fail the tests."""
    troubles: list[str] = []
    page = chromium.new_page()
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
    page.on("request", lambda r: troubles.append(r.url) if not r.url.startswith((file.as_uri(), "data:", "blob:")) else None)
    page.goto(file.as_uri())
    for _ in range(600):
        if page.evaluate("Boolean(globalThis.playground?.answer)"):
            break
        page.wait_for_timeout(50)
    yield page
    page.close()
    assert troubles == []


def request_of(prompt: PromptState, text: str) -> RequestState:
    return RequestState(prompt=prompt, parts=tuple(parts_of(text)), max_new_tokens=NEW_TOKENS)


def compare(page: Any, griffin: Playground, prompt: PromptState, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Compare the page's answers with the engine's; return the engine's."""
    expected = griffin.generate_all([request_of(prompt, text) for text in texts])
    found = page.evaluate(ASK, [prompt.model_dump(mode="json"), [parts_of(text) for text in texts], NEW_TOKENS])
    for text, own, other in zip(texts, expected, found, strict=True):
        for same in ("intervention", "prompt", "text", "finish", "receipt", "notes"):
            assert other[same] == own[same], (text, same, prompt.label)
        for same in ("id", "text"):
            assert [token[same] for token in other["tokens"]] == [token[same] for token in own["tokens"]], (text, prompt.label)
        for tokens in ("tokens", "options"):
            near = pytest.approx([token["probability"] for token in own[tokens]], abs=TOLERANCE)
            assert [token["probability"] for token in other[tokens]] == near, (text, prompt.label)
        near = pytest.approx([option["logprob"] for option in own["options"]], abs=TOLERANCE)
        assert [option["logprob"] for option in other["options"]] == near, (text, prompt.label)
    return expected


def compare_logits(page: Any, griffin: Playground, prompt: PromptState, answers: dict[str, dict[str, Any]]) -> None:
    """Compare all logits of the last prompt token and of the answer's tokens."""
    encoded = griffin.encode(prompt)
    asked = {text: [token["id"] for token in answer["tokens"]] for text, answer in answers.items() if "swap" not in text}
    found = page.evaluate(LOGITS, [prompt.model_dump(mode="json"), [[parts_of(text), ids] for text, ids in asked.items()]])
    own = engine_logits(griffin, encoded, asked)
    for text, logits in zip(asked, found, strict=True):
        difference = np.abs(own[text] - np.array(logits))
        assert difference.max() < TOLERANCE, (text, prompt.label, difference.max())


def engine_logits(griffin: Playground, encoded: Encoded, asked: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """Return the logits [tokens, vocabulary] from which each text's tokens follow; texts of equally many in one batch."""
    body, found = griffin.subject.body, {}
    for count in {len(tokens) for tokens in asked.values()}:
        texts = [text for text, tokens in asked.items() if len(tokens) == count]
        requests = [Request(encoded.ids, nw.parse(text), count, spans=encoded.spans) for text in texts]
        ids = torch.tensor([[*encoded.ids, *asked[text][:-1]] for text in texts])
        with body.session():
            logits = feed_tokens(body, [prepare(request, body.anatomy) for request in requests], ids, "last")
        found |= dict(zip(texts, logits[:, 1:].numpy(), strict=True))  # the first follow what prefill read
    return found


@pytest.mark.parametrize("depth", [0, 25, 50, 75, 100])
@pytest.mark.parametrize("length", [64, 128, 192, 256])
def test_five_prompts_under_12_interventions_are_answered_as_by_the_engine(
    page: Any, griffin: Playground, length: int, depth: int
) -> None:
    for seed in range(5):
        prompt = griffin.sample(length, depth, seed)
        answers = compare(page, griffin, prompt, TEXTS)
        compare_logits(page, griffin, prompt, dict(zip(TEXTS, answers, strict=True)))


def test_other_parts_and_their_sums_are_the_engines(page: Any, griffin: Playground) -> None:
    order = griffin.ranking("copy_score")
    ranking = "keep_heads(k=3, by=ranking('" + " ".join(f"{layer}.{head}" for layer, head in order) + "'))"
    for seed, length in enumerate((64, 192)):
        prompt = griffin.sample(length, 50, seed + 5)
        answers = compare(page, griffin, prompt, [*MORE_TEXTS, ranking])
        compare_logits(page, griffin, prompt, dict(zip([*MORE_TEXTS, ranking], answers, strict=True)))


def test_prompts_that_were_typed_are_read_as_by_the_engine(page: Any, griffin: Playground) -> None:
    prompt = griffin.sample(64, 50, 3)
    changes: list[dict[str, Any]] = [
        {"special": False},
        {"before": "", "after": ""},
        {"options": (), "target": ""},
        {"options": ("5", "4 7 1 .")},
        {"after": prompt.after * 9},  # longer than the window of attention
        {"before": "", "needle": "the", "after": "", "question": "", "twin": ""},
    ]
    for change in changes:
        typed = prompt.model_copy(update=change)
        compare(page, griffin, typed, ["none", "keep_heads(k=2)", "keep_heads(k=1, by='random')", "limit_context(tokens=5)"])
    compare(page, griffin, prompt.model_copy(update=changes[4]), ["expose_tokens(mode='omit')"])
    compare(page, griffin, prompt.model_copy(update={"needle": ""}), ["none"])


@pytest.mark.parametrize("text", ["none", "keep_heads(k=2)", "expose_tokens(mode='omit') + limit_context(tokens=40)"])
def test_attention_is_the_engines(page: Any, griffin: Playground, text: str) -> None:
    request = request_of(griffin.sample(128, 50, 1), text)
    for token in (0, 2):
        ask = "([request, token]) => playground.provider.attention(request, token)"
        found = page.evaluate(ask, [request.model_dump(mode="json"), token])
        expected = griffin.attention(request, token)
        assert (found["token"], len(found["layers"])) == (token, 2)
        for own, other in zip(expected["layers"], found["layers"], strict=True):
            assert own["layer"] == other["layer"]
            np.testing.assert_allclose(other["weights"], own["weights"], atol=TOLERANCE)
        for own, other in zip(expected["needle"], found["needle"], strict=True):
            assert other["mass"] == pytest.approx(own["mass"], abs=TOLERANCE)
    ask = "(request) => playground.provider.attention(request, 99).catch((error) => error.message)"
    assert "the answer has tokens 0 to" in page.evaluate(ask, request.model_dump(mode="json"))


@pytest.mark.parametrize(
    ("fields", "parts", "said"),
    [
        ({"before": "", "needle": "", "after": "", "question": " "}, [], "the prompt is empty"),
        ({"needle": "the secret code of gandalf is 4"}, [], "toy language without the words 'gandalf'"),
        ({"needle": "  "}, [], "the needle is empty"),
        ({"options": ("",)}, [], "an option is empty"),
        ({"after": "the king " * 2000}, [], "in the browser, tiny-griffin reads at most 2048"),
        ({"twin": "the secret code of belan is 1"}, [{"name": "swap_memory", "half": "kv"}], "they must be of one length"),
        ({"twin": ""}, [{"name": "swap_memory", "half": "kv"}], "the prompt has no twin"),
        ({"needle": ""}, [{"name": "expose_tokens", "mode": "omit"}], "no span 'needle'"),
        ({}, [{"name": "keep_heads", "k": 11}], "k=11 is more than the 10 heads"),
        ({}, [{"name": "keep_heads", "k": 1, "by": "beauty"}], "there is no head score beauty"),
        ({}, [{"name": "keep_heads", "k": 1, "by": {"ranking": [[2, 0]]}}], "does not cover heads 2.1"),
        ({}, [{"name": "keep_heads", "k": 1, "layers": [0]}], "layers 0 are no attention layers; choose from 2, 5"),
        ({}, [{"name": "ablate_heads", "heads": [[2, 10]]}], "there are no heads 2.10"),
        ({}, [{"name": "ablate_heads", "heads": [[99, 0]]}], "layers 99 are no attention layers"),
        ({}, [{"name": "ablate_recurrent", "site": "all"}], "site is one of memory, conv, state, block"),
        ({}, [{"name": "ablate_recurrent_groups", "groups": [[0, 10]]}], "there are no groups 0.10"),
        ({}, [{"name": "keep_heads", "k": 1}, {"name": "keep_heads", "k": 2, "phase": "decode"}], "two keep_heads meet"),
    ],
)
def test_what_is_wrong_is_told_and_the_page_goes_on(
    page: Any, griffin: Playground, fields: dict[str, Any], parts: list[dict[str, Any]], said: str
) -> None:
    prompt = griffin.sample(64, 50, 0)
    asked = {"prompt": prompt.model_copy(update=fields).model_dump(mode="json"), "parts": parts, "max_new_tokens": 12}
    told = page.evaluate(TRY, asked)
    assert told.startswith("ProviderError: ")
    assert said in told
    compare(page, griffin, prompt, ["none"])


def test_a_request_that_was_superseded_stops(page: Any, griffin: Playground) -> None:
    prompt = griffin.sample(256, 75, 19).model_dump(mode="json")
    told = page.evaluate(
        """async (prompt) => {
            const stop = new AbortController();
            const asked = playground.provider.generate({ prompt, parts: [], max_new_tokens: 12 }, { signal: stop.signal });
            stop.abort();
            return asked.then(() => "answered", (error) => error.name);
        }""",
        prompt,
    )
    assert told == "AbortError"


def test_a_click_in_the_exported_page_changes_the_answer(page: Any, griffin: Playground) -> None:
    page.get_by_role("switch", name="all attention heads", exact=True).click()
    for _ in range(200):
        if page.evaluate("playground.answer?.intervention") == "ablate_attention()":
            break
        page.wait_for_timeout(50)
    prompt = PromptState.model_validate_json(page.evaluate("JSON.stringify(playground.state.prompt)"))
    (expected,) = griffin.generate_all([request_of(prompt, "ablate_attention()")])
    assert page.evaluate("playground.answer.tokens.map((token) => token.id)") == [token["id"] for token in expected["tokens"]]
    assert "It runs in this page" in page.locator("#lede").inner_text()


def as_packed(weights: np.ndarray) -> np.ndarray:
    factors, numbers = pack(weights)
    whole = np.frombuffer(numbers, np.uint8).reshape(-1, 3).astype(np.int32)
    signed = whole[:, 0] | whole[:, 1] << 8 | np.where(whole[:, 2] < 128, whole[:, 2], whole[:, 2] - 256) << 16
    rows = signed.reshape(-1, weights.shape[-1]) * np.frombuffer(factors, "<f4")[:, None].astype(float)
    return rows.reshape(weights.shape).astype(np.float32)


def test_weights_need_more_bits_than_fp16_has(griffin: Playground) -> None:
    """Packed weights change logits by far less than the page may; in fp16, also other heads would be kept."""

    def logits(subject: nw.Subject, text: str) -> list[np.ndarray]:
        places = product((64, 128, 192, 256), (0, 25, 50, 75, 100), range(2))
        prompts = [griffin.encode(griffin.sample(*place)) for place in places]
        return [subject.logits([prompt.ids], text, spans=prompt.spans)[0].float().numpy() for prompt in prompts]

    found = {}
    for name, rounded in {"fp16": lambda x: x.astype(np.float16).astype(np.float32), "packed": as_packed}.items():
        subject = nw.load("tiny-griffin")
        for parameter in subject.model.parameters():
            parameter.data = torch.from_numpy(rounded(parameter.detach().numpy()))
        for text in ("none", "keep_heads(k=2)"):
            pairs = zip(logits(subject, text), logits(griffin.subject, text), strict=True)
            found[name, text] = max(float(np.abs(own - other).max()) for own, other in pairs)
    assert found["fp16", "none"] > TOLERANCE
    assert found["fp16", "keep_heads(k=2)"] > 50 * TOLERANCE
    assert max(found["packed", text] for text in ("none", "keep_heads(k=2)")) < TOLERANCE / 50
    assert (as_packed(np.zeros((2, 3), np.float32)) == 0).all()


def test_models_that_do_not_run_in_the_browser_say_why(griffin: Playground, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(griffin.subject) == ""
    jamba = nw.load("tiny-jamba")
    assert "none of JambaForCausalLM" in refusal(jamba)
    config = griffin.subject.model.config
    monkeypatch.setattr(config, "num_attention_heads", 8)
    assert "heads were pruned" in refusal(griffin.subject)
    monkeypatch.setattr(config, "hidden_activation", "silu")
    assert "gelu_pytorch_tanh" in refusal(griffin.subject)
    monkeypatch.setattr(griffin.subject, "tokenizer", None)
    assert "toy language only" in refusal(griffin.subject)
