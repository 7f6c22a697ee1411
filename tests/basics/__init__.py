"""Tests of the modules at the bottom of the package."""
