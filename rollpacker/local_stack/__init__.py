"""The services and their Redis as child processes on this machine."""
