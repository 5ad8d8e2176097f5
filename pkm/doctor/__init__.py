"""Is this machine, and are the ranks of a run, fit for it?"""
