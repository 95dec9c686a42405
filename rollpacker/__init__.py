"""RollPacker: synchronous RL post-training with tail batching. See docs/architecture.md."""

__version__ = "0.1.0"
