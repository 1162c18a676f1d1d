"""Tiny random checkpoints with the toy language's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHAT = (
    "{% for m in messages %}{{ 'ask : ' if m['role'] == 'user' else 'answer : ' }}{{ m['content'] }}"
    "{{ ' . ' if not loop.last or add_generation_prompt else '' }}{% endfor %}"
    "{{ 'answer : ' if add_generation_prompt else '' }}"
)


def save(name: str, folder: Path, chat: bool = False, **changes: Any) -> Path:
    from needlework.toy import tokenizer
    from tiny import build

    model = build(name, vocab_size=len(tokenizer.build()), bos_token_id=1, eos_token_id=2, **changes)
    model.save_pretrained(folder)
    words = tokenizer.build()
    words.chat_template = CHAT if chat else None
    words.save_pretrained(folder)
    return folder
