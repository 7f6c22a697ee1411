"""Shared parts of tests: ranks as threads, ranks as processes, faults, Spark sessions."""
