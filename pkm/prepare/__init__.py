"""Documents become a corpus."""
