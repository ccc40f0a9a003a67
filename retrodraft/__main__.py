"""`python -m retrodraft`."""

from retrodraft.cli import main

main()
