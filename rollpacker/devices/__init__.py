"""Who may use which GPU of a host: leases, their store, and the measure of free memory.

Not wired yet: no service takes a lease. It is what replicas that share a host's GPUs, and engines
and trainers that take turns on them, need to agree on.
"""
