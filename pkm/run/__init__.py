"""A run's directory: whose it is, where the run stands, what it measured, what may change."""
