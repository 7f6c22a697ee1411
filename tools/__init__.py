"""Programs of the Makefile, and generators of pages.

Run `python -m tools.<name>` from the checkout.
"""
