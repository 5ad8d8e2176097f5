"""Reads what people have: text, JSONL, Parquet, WARC, compressed or not."""
