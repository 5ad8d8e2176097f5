"""Train language models with product-key memories from one YAML file."""

__version__ = "0.1.0"
