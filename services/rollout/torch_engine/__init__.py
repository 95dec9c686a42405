"""The embedded engine: continuous batching over a small decoder, in plain PyTorch.

TorchEngine (engine.py)      asyncio in front, one thread behind
  DecodeLoop (decode_loop)   one step: preempt, admit, decode, hand out
    Scheduler (scheduler)    decides who runs; counts only (`responses`: who there is)
    SlotTable (slot_table)   per-slot tensors
    Sampler (sampler)        Gumbel-max for decoded tokens and for drafts
    KvCache (kv_cache)       keys and values, rows grouped by capacity
    Decoder (decoder)        the forward pass; `decoder_config`, `weights` read a directory
"""

from services.rollout.torch_engine.engine import TorchEngine

__all__ = ["TorchEngine"]
