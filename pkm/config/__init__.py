"""The schema and the rules of a run, and how YAML becomes them: every mistake at once."""
