"""gRPC the way every service uses it: one error table, one server, one client."""
