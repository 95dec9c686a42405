"""Redis: what must outlive its writer. Every key is named in `keys`."""
