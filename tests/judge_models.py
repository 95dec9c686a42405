"""Tiny judges on disk: a random one, and one that gives the same verdict to everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from services.reward.judge_process import JudgeModelSettings
from tests.tiny_models import STOP, save_model

LAYERS = 5
SCORE = 0.75
_CHARACTERS = 128
_VERDICT_TOKEN = 1  # no prompt holds that character
_CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def save_judge(directory: Path, *, layers: int = LAYERS, **changes: Any) -> JudgeModelSettings:
    """A random judge that reads and writes single characters; one token is a whole verdict."""
    save_model(
        directory,
        num_hidden_layers=layers,
        vocab_size=_CHARACTERS,
        eos_token_id=STOP,
        bos_token_id=None,
        **changes,
    )
    vocabulary = {chr(code): code for code in range(_CHARACTERS)}
    del vocabulary[chr(_VERDICT_TOKEN)]
    vocabulary[f'VERDICT: {{"score": {SCORE}}}'] = _VERDICT_TOKEN
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=chr(STOP))
    tokenizer.chat_template = _CHATML
    tokenizer.save_pretrained(directory)
    return JudgeModelSettings(str(directory), dtype="float32", batch=4)


def save_decided_judge(directory: Path) -> JudgeModelSettings:
    """A judge whose reply to every prompt is one verdict with SCORE.

    Its layers add nothing, and a token is known by its place: behind the end of a prompt comes the
    verdict, behind that the end.
    """
    settings = save_judge(directory, hidden_size=_CHARACTERS, head_dim=32)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(torch.eye(_CHARACTERS))
        model.lm_head.weight.zero_()
        model.lm_head.weight[_VERDICT_TOKEN, ord(">")] = 1.0
        model.lm_head.weight[STOP, _VERDICT_TOKEN] = 1.0
    model.save_pretrained(directory)
    return settings
