"""Grids: tables of cells become runs, here or on a cluster."""
