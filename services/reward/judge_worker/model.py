"""The judge's model: a causal LM of transformers, its layers resident or streamed.

A batch is padded on the left and decoded together, each response with its own noise, so what is
sampled depends on the request, and on the batch around it only as far as floating point does.
Before a batch the layers are arranged by the memory that is free then (`residency`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from services.reward.judge_process import JudgeModelSettings
from services.reward.judge_worker.layer_stream import LayerStream
from services.reward.judge_worker.residency import (
    DeviceMemoryError,
    ModelShape,
    residents,
)

_RESERVE_BYTES = 512 << 20  # of a CUDA device, for the work of its libraries
Messages = Sequence[dict[str, str]]


class PromptTooLongError(ValueError):
    """The prompt leaves no room for a reply; a repeat would fail too."""


@dataclass(frozen=True, slots=True)
class Request:
    """One reply to make."""

    token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0  # 0: the likeliest token
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """What was sampled, without the token that ended it."""

    token_ids: tuple[int, ...]
    is_whole: bool  # ended by itself, not by its limit


class JudgeModel:
    """One thread calls `complete` and `release`; any may encode and decode meanwhile."""

    def __init__(self, settings: JudgeModelSettings) -> None:
        """Load it into host memory. Raises OSError, ValueError (what transformers says)."""
        self._device = torch.device(settings.device)
        self._limit = settings.memory_gib * (1 << 30) or math.inf
        self._one_at_a_time = threading.Lock()  # a tokenizer serves one thread
        self._tokenizer: Any = AutoTokenizer.from_pretrained(settings.model, local_files_only=True)
        dtype = settings.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
        load: Any = AutoModelForCausalLM.from_pretrained
        self._model = load(settings.model, dtype=dtype, local_files_only=True).eval()
        layers = decoder_layers(self._model)
        inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
        self.layers = LayerStream(layers, self._device)
        self._other_bytes = self._move_the_rest(inside)
        self._shape = _shape(self._model, self.layers.layer_bytes)
        self._ends = _end_tokens(self._model, self._tokenizer)
        self._context = int(self._model.config.get_text_config().max_position_embeddings)

    def encode(self, messages: Messages, max_tokens: int) -> tuple[int, ...]:
        """The prompt of a conversation. Raises PromptTooLongError."""
        with self._one_at_a_time:
            ids = self._tokens(messages)
        if len(ids) + max_tokens > self._context:
            raise PromptTooLongError(
                f"messages: {len(ids)} tokens and a reply of up to {max_tokens} are more than the"
                f" {self._context} of the judge; shorten the response, or take another model"
            )
        return ids

    def _tokens(self, messages: Messages) -> tuple[int, ...]:
        tokenizer = self._tokenizer
        if tokenizer.chat_template:
            text = tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        else:
            text = "".join(f"{message['content']}\n\n" for message in messages)
        own_marks = not tokenizer.chat_template
        return tuple(tokenizer(text, add_special_tokens=own_marks)["input_ids"])

    def decode(self, reply: Reply) -> str:
        with self._one_at_a_time:
            return str(self._tokenizer.decode(reply.token_ids, skip_special_tokens=True))

    def complete(self, requests: Sequence[Request]) -> list[Reply]:
        """A reply to each request, decoded together. Raises DeviceMemoryError."""
        try:
            return self._complete(requests)
        except torch.OutOfMemoryError as error:  # somebody else took what was free
            self.release()
            raise DeviceMemoryError(str(error)) from error

    @torch.no_grad()
    def _complete(self, requests: Sequence[Request]) -> list[Reply]:
        longest = max(len(request.token_ids) for request in requests)
        most = max(request.max_tokens for request in requests)
        self._arrange(len(requests), longest + most)
        ids, mask = self._padded(requests, longest)
        sampler = _Sampler(requests, self._device)
        cache = DynamicCache(config=self._model.config)
        replies: list[list[int]] = [[] for _ in requests]
        whole = [False] * len(requests)
        for _ in range(most):
            tokens = sampler.choose(self._logits(ids, mask, cache))
            for row, token in enumerate(tokens.tolist()):
                if not whole[row] and len(replies[row]) < requests[row].max_tokens:
                    whole[row] = token in self._ends
                    replies[row] += [] if whole[row] else [token]
            if all(
                whole[row] or len(replies[row]) == request.max_tokens
                for row, request in enumerate(requests)
            ):
                break
            ids = tokens[:, None]
            mask = torch.cat([mask, mask.new_ones(len(requests), 1)], dim=1)
        return [Reply(tuple(reply), end) for reply, end in zip(replies, whole, strict=True)]

    def release(self) -> None:
        """Give the device's memory back, all but embeddings and head."""
        self.layers.release()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _logits(self, ids: torch.Tensor, mask: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Of the next token, [sequences, vocabulary], in float32."""
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def _padded(
        self, requests: Sequence[Request], longest: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and mask, [sequences, longest], padded on the left."""
        ids = torch.zeros(len(requests), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            start = longest - len(request.token_ids)
            ids[row, start:] = torch.tensor(request.token_ids)
            mask[row, start:] = 1
        return ids.to(self._device), mask.to(self._device)

    def _arrange(self, sequences: int, tokens: int) -> None:
        self.layers.arrange(residents(self._shape, self._free_bytes(), sequences, tokens))

    def _free_bytes(self) -> float:
        """For layers, cache and activations: what is free, or would be without our layers."""
        own_limit = self._limit - self._other_bytes
        if self._device.type != "cuda":
            return own_limit
        free, _ = torch.cuda.mem_get_info(self._device)
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(
            self._device
        )
        return min(own_limit, free + cached + self.layers.device_bytes - _RESERVE_BYTES)

    def _move_the_rest(self, inside: set[int]) -> int:
        """What is no layer goes to the device for good. Returns its bytes."""
        moved = 0
        for parameter in self._model.parameters():
            if id(parameter) not in inside:
                parameter.data = parameter.data.to(self._device)
                moved += parameter.numel() * parameter.element_size()
        for module in self._model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self._device))
        return moved


class _Sampler:
    """Chooses tokens, each row by its own temperature and noise."""

    def __init__(self, requests: Sequence[Request], device: torch.device) -> None:
        self._temperatures = [request.temperature for request in requests]
        self._noise = [
            torch.Generator(device).manual_seed(request.seed & (2**63 - 1)) for request in requests
        ]

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        tokens = logits.argmax(dim=-1)
        for row, temperature in enumerate(self._temperatures):
            if temperature > 0:
                law = torch.softmax(logits[row] / temperature, dim=-1)
                tokens[row] = torch.multinomial(law, 1, generator=self._noise[row])[0]
        return tokens


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a decoder, in order: its largest list of modules. Raises ValueError."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of layers; choose another judge")
    return max(lists, key=lambda layers: sum(map(_parameter_count, layers)))


def _parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _shape(model: Any, layer_bytes: tuple[int, ...]) -> ModelShape:
    config = model.config.get_text_config()
    size = model.dtype.itemsize
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # A cache that grows by copying is there twice for a moment.
    cache = 2 * 2 * len(layer_bytes) * heads * width * size
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    work = (6 * config.hidden_size + 3 * inner) * size
    return ModelShape(layer_bytes, cache, work)


def _end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    ends = model.generation_config.eos_token_id
    known = ends if isinstance(ends, list) else [ends]
    return frozenset(end for end in (*known, tokenizer.eos_token_id) if end is not None)
