"""Fused and chunked operations, each with an eager twin."""
