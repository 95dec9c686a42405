"""The four services of RollPacker; each is a thin process around `rollpacker`."""
