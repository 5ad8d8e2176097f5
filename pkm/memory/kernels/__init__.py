"""How a memory computes: `reference` defines what is correct; the other files are equal to it and faster."""
