"""Tests of the engine through its Python door."""
