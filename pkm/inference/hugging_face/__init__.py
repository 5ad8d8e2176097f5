"""Models in Hugging Face's format: the files that an exported directory holds, how they are written, how they are read."""
