"""Generated from protos/rollpacker/v1 by `make protos`; do not edit."""
