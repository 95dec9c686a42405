"""Who may use which GPU: leases, their store, the measure of free memory, and a worker's side.

worker: holder --ClaimDevices, RenewDevices, ReleaseDevices--> coordinator --> store (Redis)
          |                                                                      |
          +-- meter: memory (nvidia-smi), fake                                   +-- lease (pure)
"""
