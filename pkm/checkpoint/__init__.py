"""Saving and loading of checkpoints that verify, whatever the number of ranks."""
