"""The tests of sparkhvd."""
