"""The rollout service: one inference engine behind gRPC."""
