"""Ranks and what they do together."""
