"""The loop: batch -> loss -> update, and what it needs."""
