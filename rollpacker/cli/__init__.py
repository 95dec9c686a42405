"""The `rollpacker` command."""
