"""Programs of the Makefile, and generators of pages; run `python -m tools.<name>` from the checkout."""
