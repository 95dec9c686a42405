"""The reward service: graders behind gRPC; imports no torch."""
