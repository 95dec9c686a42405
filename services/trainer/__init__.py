"""The trainer service: stream training over FSDP2."""
