"""Raw text to ids and back: Moses' tokenizer, fastBPE's byte-pair encoding, the vocabulary."""
