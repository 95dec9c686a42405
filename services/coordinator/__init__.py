"""The coordinator service: the only one people talk to; imports no torch."""
