"""The site of the documentation in a real browser (`make test-site`)."""
