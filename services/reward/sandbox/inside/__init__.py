"""What runs inside a sandbox: standard library only, and it trusts nothing but its own parent."""
