"""Coverage-guided search for bytes that raise an unexpected error in a parser of `tests/harness/parsers.py`."""
