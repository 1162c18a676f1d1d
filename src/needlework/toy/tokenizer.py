"""Hugging Face fast tokenizer of the toy language: one token per word, with BOS in front."""

from __future__ import annotations

from typing import TYPE_CHECKING

from needlework.toy.words import BOS, EOS, PAD, UNK, WORD_ID

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CONTEXT_LIMIT = 4096  # the declared model_max_length; what a model can use depends on its training


def build() -> PreTrainedTokenizerFast:
    """Build the tokenizer. Decoding without special tokens returns the encoded text if single spaces separate its words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel(vocab=dict(WORD_ID), unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, WORD_ID[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,  # " ." must not become "."
        model_max_length=CONTEXT_LIMIT,
        padding_side="left",
    )
