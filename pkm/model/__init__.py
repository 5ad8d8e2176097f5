"""The transformer, its loss, and what it costs."""
