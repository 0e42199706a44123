"""Layers, rope, attention and losses that several heads share."""
