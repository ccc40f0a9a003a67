"""The commands of `retrodraft.cli` that have a room of their own."""
