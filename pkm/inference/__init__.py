"""A trained model, found again: to generate with, or to export."""
