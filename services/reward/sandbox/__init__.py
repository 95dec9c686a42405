"""The sandbox: runs programs that a model wrote, by bubblewrap, seccomp and rlimits."""
