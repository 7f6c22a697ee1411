"""What the Makefile calls; run a module as `python -m tools.<name>` from the checkout."""
