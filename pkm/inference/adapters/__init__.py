"""What other programs call the parts of a model, one file a format, each a table that is read both ways."""
