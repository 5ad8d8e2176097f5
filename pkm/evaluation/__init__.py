"""What a model is worth: perplexity, use of its memories, speed; and the report of one run."""
