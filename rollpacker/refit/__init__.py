"""Weight refit: published weights on their way from the trainer to the engines.

A version is a directory with a manifest (`manifest`). Engines load directories, so a carrier's only
task is to put the same directory where an engine can read it; which one does is chosen by place:

    file        weights_uri is below the weights root of the rollout service: nothing moves
                (one host, a shared file system; with /dev/shm as root, shared memory)
    broadcast   torch.distributed over gloo, to all hosts at once, where both ends allow it
    stream      gRPC with offset, checksum and resume (`sender`, `receiver`); always there

Whatever carried it, a directory is hashed against its manifest before an engine sees it. While it
is being received it has another name; so a receiver that is killed leaves the old version, and goes
on from what it has when it comes back.
"""
