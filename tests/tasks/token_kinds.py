"""Small tokenizers of the usual kinds, trained here: word-level, byte-level BPE, BPE without word borders, Unigram."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import islice
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from needlework.requests import Answer
from needlework.tasks import haystack
from needlework.tasks.niah import BASE_LEAD, CHAT_END, KEY, NEEDLE, OTHERS, QUESTION, VALUE
from needlework.toy.sample import Stream

CHAT = "<s>{% for m in messages %}[{{ m.role }}] {{ m.content | trim }} [end]{% endfor %}[bot]"
KINDS = ("word", "byte", "joined", "unigram")
SPECIAL = ["<s>", "</s>", "<unk>"]


def _texts() -> list[str]:
    needles = [haystack.fill_template(NEEDLE, key=other.key, value=other.value) for other in OTHERS]
    needle, question = haystack.fill_template(NEEDLE, key=KEY, value=VALUE), haystack.fill_template(QUESTION, key=KEY)
    prompt = f"CONTEXT: {needle}\n\nQUESTION: {question}\n\n{BASE_LEAD}{CHAT_END}"
    digits = " ".join(str(100 * i + 7) for i in range(100, 400))
    frame = "[user] [end][bot]"
    return [
        frame,
        "".join(islice(haystack.generate_sentences(Stream("corpus")), 400)),
        *needles,
        prompt,
        digits,
        " ".join(haystack.NOUNS),
    ]


@cache
def _core(kind: str) -> str:
    common: dict[str, Any] = {"special_tokens": SPECIAL, "show_progress": False}
    if kind == "word":
        core = Tokenizer(models.WordLevel(unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer: Any = trainers.WordLevelTrainer(**common)
    elif kind == "byte":
        core = Tokenizer(models.BPE())
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, **common)
    elif kind == "joined":  # as Gemma and Llama: spaces are letters, and tokens may cross the border of a sentence
        core = Tokenizer(models.BPE(unk_token="<unk>"))
        core.normalizer = normalizers.Replace(" ", "▁")
        core.decoder = decoders.Replace("▁", " ")
        trainer = trainers.BpeTrainer(vocab_size=700, max_token_length=8, **common)
    else:
        core = Tokenizer(models.Unigram())
        core.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Metaspace(prepend_scheme="first")]
        )
        core.decoder = decoders.Metaspace(prepend_scheme="first")
        trainer = trainers.UnigramTrainer(vocab_size=600, unk_token="<unk>", **common)
    core.train_from_iterator(_texts(), trainer)
    return str(core.to_str())


@cache
def make(kind: str, bos: bool = True, chat: bool = False, eos: bool = False) -> Any:
    core = Tokenizer.from_str(_core(kind))
    if bos or eos:
        single = f"{'<s> ' if bos else ''}$A{' </s>' if eos else ''}"
        ids = [(name, core.token_to_id(name)) for name in ("<s>", "</s>")]
        core.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token=None if kind == "byte" else "<unk>"
    )
    made.chat_template = CHAT if chat else None
    return made


def shown(tokenizer: Any, item: Any, name: str) -> list[str]:
    return [tokenizer.decode(list(item.prompt[a:b]), clean_up_tokenization_spaces=False).strip() for a, b in item.spans[name]]


def scored(totals: Sequence[float], greedy: Sequence[bool] = ()) -> Answer:
    """An answer whose options have these log-likelihoods."""
    return Answer(option_logprobs=tuple((float(total),) for total in totals), greedy=tuple(greedy))
