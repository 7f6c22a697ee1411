"""Coverage-guided search for bytes that a parser of `tests/harness/parsers.py` does not expect."""
